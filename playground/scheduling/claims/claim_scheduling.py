"""The plugin of the scheduling loop for ResourceClaims.

For each attempt to schedule a pod, `ClaimScheduling.begin` returns a `PodClaims`, whose methods the loop calls in the
order of kube-scheduler's extension points: `filter` for each node, and then either `give_up`, or `reserve` and, on the
thread that binds, `bind`. If the binding fails, the loop calls `unreserve`.

Source: pkg/scheduler/framework/plugins/dynamicresources in Kubernetes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from playground.fit import selector_matches
from playground.scheduling.claims import claim_writes
from playground.scheduling.claims.allocator import allocate
from playground.scheduling.claims.claim_store import ClaimStore, allocated, is_reserved
from playground.scheduling.claims.device_requests import Usage, referenced_classes
from playground.scheduling.claims.extended_resources import ANNOTATION, ExtendedClaim, delegated, extended_claim
from playground.scheduling.claims.pools import SliceIndex
from playground.scheduling.queue import Event

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
_ROOT = "/apis/resource.k8s.io/v1"
_MOST_CONSUMERS = 256
Changed = Callable[[Event, Callable[[Raw], bool]], None]
"""Is called with each event, and with a function that returns whether it may help a pod."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The reason why a pod fits no node, because of one of its claims."""

    reason: str


class ClaimScheduling:
    """Watches claims, slices and classes. It can be started once.

    Args:
        changed: Is called for the events that may make a pod schedulable, on the threads of the watches.
        observed: Is called for each new claim.
    """

    def __init__(self, api: Api, changed: Changed, observed: Callable[[], None]) -> None:
        self._api = api
        self._changed = changed
        self._observed = observed
        self._store = ClaimStore()
        watched = {
            "resourceclaims": (self._claim_changed, self._claim_gone),
            "resourceslices": (self._slice_changed, self._store.remove_slice),
            "deviceclasses": (self._class_changed, self._store.remove_class),
        }
        self._watches = [Reflector(api, f"{_ROOT}/{key}", *calls, optional=True) for key, calls in watched.items()]

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in self._watches:
            watch.stop()

    def wait_synced(self, timeout: float) -> None:
        for watch in self._watches:
            watch.wait_synced(timeout)

    def _claim_changed(self, claim: Raw) -> None:
        newer, known = self._store.set_claim(claim)
        if not newer:
            return
        if known is None:
            self._observed()
        if known is not None and allocated(known) and not allocated(claim):
            self._changed(Event.CLAIM, lambda _: True)
        elif known is None or known.get("status") != claim.get("status"):
            meta = claim["metadata"]
            self._changed(Event.CLAIM, lambda pod: _uses(pod, meta["namespace"], meta["name"]))

    def _claim_gone(self, claim: Raw) -> None:
        known = self._store.remove_claim(claim)
        if known is not None:
            # `PodClaims.give_up` deletes the claim of an earlier attempt.
            self._changed(Event.CLAIM, partial(_is_extended_for, known))

    def _slice_changed(self, raw: Raw) -> None:
        self._store.set_slice(raw)
        self._changed(Event.SLICE, lambda _: True)

    def _class_changed(self, raw: Raw) -> None:
        self._store.set_class(raw)
        self._changed(Event.CLASS, lambda _: True)

    def is_ready(self, pod: Raw) -> bool:
        """Return whether all claims of a pod exist. Until then, kube-scheduler does not try to schedule it."""
        return not isinstance(self._claims_of(pod), Blocked)

    def begin(self, pod: Raw) -> "PodClaims | Blocked | None":
        """Begin an attempt to schedule a pod. The result is None if the pod needs no claim."""
        classes = self._store.extended_resources()
        wants_extended = bool(classes) and any(name in classes for name in _extended_names(pod))
        if not pod["spec"].get("resourceClaims") and not wants_extended:
            return None
        claims = self._claims_of(pod)
        if isinstance(claims, Blocked):
            return claims
        known = self._store.classes()
        for claim in claims:
            if blocked := self._block(pod, claim, known):
                return blocked
        stale = next((c for c in self._store.claims() if _is_extended_for(c, pod)), None) if wants_extended else None
        extended = classes if wants_extended else {}
        return PodClaims(self._api, self._store, self._claim_changed, pod, claims, extended, stale)

    def _claims_of(self, pod: Raw) -> list[Raw] | Blocked:
        found = []
        meta = pod["metadata"]
        where = f"{meta['namespace']}/{meta['name']}"
        for name, owned in _names(pod):
            if name is None:
                return Blocked(f'pod "{where}": ResourceClaim not created yet')
            if name == "":
                continue
            claim = self._store.claim(meta["namespace"], name)
            if claim is None:
                return Blocked(f'resourceclaim "{name}" not found')
            if "deletionTimestamp" in claim["metadata"]:
                return Blocked(f'resourceclaim "{name}" is being deleted')
            if owned and not any(row["uid"] == meta["uid"] for row in claim["metadata"].get("ownerReferences") or ()):
                owner = f"ResourceClaim {meta['namespace']}/{name} was not created for Pod {where}"
                return Blocked(f"{owner} (Pod is not owner)")
            found.append(claim)
        return found

    def _block(self, pod: Raw, claim: Raw, classes: Mapping[str, Raw]) -> Blocked | None:
        """Return why a pod cannot be scheduled at present because of one of its claims, or None."""
        name = claim["metadata"]["name"]
        consumers = (claim.get("status") or {}).get("reservedFor") or ()
        if allocated(claim):
            full = len(consumers) >= _MOST_CONSUMERS and not is_reserved(claim, pod)
            return Blocked("resourceclaim in use") if full else None
        if self._store.in_flight(claim["metadata"]["uid"]):
            return Blocked(f"resource claim {name} is in the process of being allocated")
        for request, device_class in referenced_classes(claim):
            if device_class not in classes:
                return Blocked(f"request {request}: device class {device_class} does not exist")
        return None


class PodClaims:
    """The claims of a pod during one attempt to schedule it.

    Args:
        changed: Is called with each claim that was written.
        claims: The claims that the pod names.
        extended: The DeviceClasses by the extended resources that they stand for; empty if the pod requests none.
        stale: The claim for the extended resources of the pod that an earlier attempt has created, if there is one.
    """

    def __init__(
        self,
        api: Api,
        store: ClaimStore,
        changed: Callable[[Raw], None],
        pod: Raw,
        claims: list[Raw],
        extended: Mapping[str, str],
        stale: Raw | None,
    ) -> None:
        self._api = api
        self._store = store
        self._changed = changed
        self._pod = pod
        self._claims = claims
        self._extended = extended
        self._stale = stale
        self._usage: Usage | None = None  # it is read for the first node, like the slices
        self._slices = SliceIndex(())
        self._found: dict[str, list[tuple[Raw, Raw]]] = {}  # the claims to allocate, by node, with their allocations
        self._special: dict[str, ExtendedClaim] = {}
        self._unavailable: list[Raw] = []  # the allocated claims that some node cannot use
        self._flying: list[Raw] = []
        self._written: list[Raw] = []
        self._created: Raw | None = None

    def is_counted(self, node: Raw) -> Callable[[str], bool]:
        """Return a function that returns whether the node itself must have a resource, because no claim provides it."""
        provided = delegated(self._pod, node, self._extended) if self._extended else ()
        return lambda name: name not in provided

    def filter(self, node: Raw) -> list[str]:
        """Return why a node cannot provide the devices of the claims, or an empty list.

        Raises AllocationError if the claims cannot be allocated on any node.
        """
        if self._stale is not None:
            return ["cannot schedule extended resource claim"]
        for claim in filter(allocated, self._claims):
            selector = claim["status"]["allocation"].get("nodeSelector")
            if selector is not None and not selector_matches(selector, node):
                if claim not in self._unavailable:
                    self._unavailable.append(claim)
                return ["resourceclaim not available on the node"]
        wanted = [claim for claim in self._claims if not allocated(claim)]
        name = node["metadata"]["name"]
        if provided := delegated(self._pod, node, self._extended) if self._extended else []:
            self._special[name] = extended_claim(self._pod, provided, self._extended)
            wanted.append(self._special[name].claim)
        if not wanted:
            return []
        if self._usage is None:
            self._usage = self._store.usage()
            self._slices = SliceIndex(self._store.slices())
        found = allocate(wanted, node, self._slices.of_node(name), self._store.classes(), self._usage)
        if found is None:
            return ["cannot allocate all claims"]
        self._found[name] = list(zip(wanted, found, strict=True))
        return []

    def give_up(self) -> None:
        """Free what keeps the pod from other nodes: an allocation that only this pod uses, or an earlier special claim.

        kube-scheduler does this in its extension point PostFilter.
        """
        try:
            if self._stale is not None:
                claim_writes.delete(self._api, self._stale)
                return
            for claim in self._unavailable:
                consumers = claim["status"].get("reservedFor") or []
                if not consumers or (len(consumers) == 1 and is_reserved(claim, self._pod)):
                    claim_writes.deallocate(self._api, claim)
                    return
        except (ApiError, Unreachable) as error:
            log.info("claim of pod %s not freed: %s", self._pod["metadata"]["name"], error)

    def reserve(self, node: str) -> None:
        """Count the chosen devices of a node as used until they are written."""
        for claim, allocation in self._found.get(node, ()):
            self._store.begin_flight(claim["metadata"]["uid"], allocation)
            self._flying.append(claim)

    def bind(self, node: str) -> None:
        """Write the allocations, and make the pod a consumer of its claims.

        Raises:
            BindError, ApiError, Unreachable: A claim cannot be written. The caller then calls `unreserve`.
        """
        allocations = {claim["metadata"]["uid"]: allocation for claim, allocation in self._found.get(node, ())}
        for claim in self._claims:
            if not is_reserved(claim, self._pod):
                self._reserve(claim, claim, allocations.get(claim["metadata"]["uid"]))
        special = self._special.get(node)
        if special is not None:
            self._created = claim_writes.create_extended(self._api, special.claim)
            self._reserve(special.claim, self._created, allocations[special.claim["metadata"]["uid"]])
            claim_writes.write_extended_status(self._api, self._pod, self._created, list(special.mappings))

    def _reserve(self, flying: Raw, claim: Raw, allocation: Raw | None) -> None:
        written = claim_writes.reserve(self._api, claim, self._pod, allocation)
        self._written.append(written)
        # Pods that use the same claim may wait for its allocation. The event for it is raised here, because the watch
        # will show nothing newer.
        self._changed(written)
        self._store.end_flight(flying["metadata"]["uid"])

    def unreserve(self) -> None:
        """Undo `reserve` and what `bind` has written. An allocation that was written stays.

        No event is raised, so pods that were refused because of these claims are not tried again. The same is true for
        kube-scheduler.
        """
        for claim in self._flying:
            self._store.end_flight(claim["metadata"]["uid"])
        for claim in self._written:
            if self._created is None or claim["metadata"]["uid"] != self._created["metadata"]["uid"]:
                self._try(partial(self._release, claim))
        if self._created is not None:
            created = self._created
            self._try(lambda: claim_writes.delete(self._api, created))

    def _release(self, claim: Raw) -> None:
        self._changed(claim_writes.release(self._api, claim, self._pod))

    def _try(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except (ApiError, Unreachable) as error:
            log.info("claim of pod %s not released: %s", self._pod["metadata"]["name"], error)


def _names(pod: Raw) -> Iterator[tuple[str | None, bool]]:
    """Yield the name of each claim of a pod, and whether the pod must own it.

    The name is None if the claim has not been created, and "" if none is needed.
    """
    statuses = {row["name"]: row for row in (pod.get("status") or {}).get("resourceClaimStatuses") or ()}
    for row in pod["spec"].get("resourceClaims") or ():
        if row.get("resourceClaimName"):
            yield row["resourceClaimName"], False
        elif row["name"] in statuses:
            yield statuses[row["name"]].get("resourceClaimName") or "", True
        else:
            yield None, True


def _uses(pod: Raw, namespace: str, name: str) -> bool:
    return bool(pod["metadata"]["namespace"] == namespace) and any(name == found for found, _ in _names(pod))


def _extended_names(pod: Raw) -> Iterator[str]:
    for part in ("initContainers", "containers"):
        for container in pod["spec"].get(part) or ():
            yield from (container.get("resources") or {}).get("requests") or ()


def _is_extended_for(claim: Raw, pod: Raw) -> bool:
    meta = claim["metadata"]
    is_special = (meta.get("annotations") or {}).get(ANNOTATION) == "true"
    owners = meta.get("ownerReferences") or ()
    return is_special and any(row["uid"] == pod["metadata"]["uid"] and row.get("controller") for row in owners)
