"""The kubelet's DRA manager, which prepares the ResourceClaims of pods before they start, and unprepares them later.

It reproduces pkg/kubelet/cm/dra/manager.go of Kubernetes 1.36. This module opens no connections to drivers:
`driver_client` implements `Driver` over gRPC. The pod workers share one `ClaimManager`, which is thread-safe.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from playground.kubelet import claim_checkpoint
from playground.kubelet.claim_checkpoint import ClaimState, PreparedDevice
from playground.kubelet.pod_claims import (
    ClaimError,
    ClaimUse,
    check_use,
    claims_of,
    listed_claims,
    requests_of_container,
)
from proto import dra_pb2 as api
from proto import podresources_pb2 as listing

Raw = Mapping[str, Any]


class Driver(Protocol):
    """A registered DRA driver. Its calls raise ClaimError."""

    def prepare(self, claims: Sequence[api.Claim]) -> Mapping[str, api.NodePrepareResourceResponse]: ...

    def unprepare(self, claims: Sequence[api.Claim]) -> Mapping[str, api.NodeUnprepareResourceResponse]: ...


@dataclass(frozen=True, slots=True)
class _Needed:
    """A claim that a pod uses, before the kubelet has recorded that.

    Attributes:
        state: The claim without pods and devices.
        drivers: The drivers that have an allocation result in the claim.
    """

    state: ClaimState
    drivers: Mapping[str, Driver]


class ClaimManager:
    """Keeps the claims that pods of the node use, and the devices that drivers have prepared for them.

    After a restart the kubelet knows the claims from its checkpoint, but does not know which are prepared. The pods
    whose sandbox exists are not prepared again, and a new pod makes the kubelet prepare its shared claim once more.

    `_lock` guards the claims and the file, and is not held while drivers or the API server are called.

    Args:
        file: The checkpoint file. It is read at the start, and written before and after a claim is prepared.
        fetch: Returns the ResourceClaim with a name that a pod uses. It raises ClaimError.
        driver: Returns the driver with a name. It raises ClaimError if the driver is not registered.
    """

    def __init__(self, file: Path, fetch: Callable[[Raw, str], Raw], driver: Callable[[str], Driver]) -> None:
        self._file = file
        self._fetch = fetch
        self._driver = driver
        self._lock = threading.RLock()
        self._claims = {(state.namespace, state.name): state for state in claim_checkpoint.read(file)}

    def prepare(self, pod: Raw) -> None:
        """Prepare the claims of the pod. Raises ClaimError if that fails; the call can then be repeated.

        The pod is recorded only when all its claims can be used and all drivers are registered. So a pod that cannot be
        prepared because a driver is missing can be deleted without this driver.
        """
        try:
            needed = [self._needed(pod, use) for use in claims_of(pod)]
            unprepared = self._record(pod, needed)
            for driver, claims in _batches(unprepared):
                for uid, answer in _checked("NodePrepareResources", claims, driver[1].prepare(claims)):
                    self._add_devices(driver[0], uid, answer.devices)
            with self._lock:
                for each in unprepared:
                    self._update(each.state.uid, lambda state: replace(state, prepared=True))
                self._checkpoint()
        except ClaimError as error:
            raise ClaimError(f"prepare dynamic resources: {error}") from error

    def cdi_devices(self, pod: Raw, container: Raw) -> tuple[str, ...]:
        """Return the CDI devices of a container. Raises ClaimError if one of its claims is not known."""
        names: list[str] = []
        for claim, request in requests_of_container(pod, container):
            names += self._known(pod, claim).cdi_devices(request)
        return tuple(names)

    def unprepare(self, pod: Raw) -> None:
        """Release the claims of a pod whose containers have ended. Raises ClaimError if that fails.

        A claim that no other pod uses is unprepared and forgotten. Claims that are not known are skipped.
        """
        meta = pod["metadata"]
        try:
            self._release(meta["uid"], meta["namespace"], [use.claim for use in claims_of(pod)])
        except ClaimError as error:
            raise ClaimError(f"unprepare dynamic resources: {error}") from error

    def release_inactive(self, active: Collection[str]) -> list[ClaimError]:
        """Release the claims of all pods except the active ones, and return the errors. The next call tries again."""
        stale: dict[tuple[str, str], list[str]] = {}
        with self._lock:
            for state in self._claims.values():
                for uid in sorted(state.pods - set(active)):
                    stale.setdefault((uid, state.namespace), []).append(state.name)
        errors = []
        for (uid, namespace), names in stale.items():
            try:
                self._release(uid, namespace, names)
            except ClaimError as error:
                errors.append(error)
        return errors

    def uses(self, uid: str) -> bool:
        """Return whether the pod with this UID still has claims that must be released."""
        with self._lock:
            return any(uid in state.pods for state in self._claims.values())

    def states(self) -> tuple[ClaimState, ...]:
        """Return the claims that are known."""
        with self._lock:
            return tuple(self._claims.values())

    def state(self, namespace: str, name: str) -> ClaimState | None:
        with self._lock:
            return self._claims.get((namespace, name))

    def dynamic_resources(self, pod: Raw, container: Raw) -> list[listing.DynamicResource]:
        """Return what PodResources lists for a container.

        As in the kubelet, all devices of a claim are listed, whichever requests the container uses, and there is
        nothing at all if one of the claims is not known.
        """
        try:
            states = [self._known(pod, name) for name in listed_claims(pod, container)]
        except ClaimError:
            return []
        return [
            listing.DynamicResource(
                claim_name=state.name,
                claim_namespace=state.namespace,
                claim_resources=[row for name, devices in state.drivers.items() for row in _listed(name, devices)],
            )
            for state in states
        ]

    def _needed(self, pod: Raw, use: ClaimUse) -> _Needed:
        """Read a claim, check that the pod may use it, and find its drivers. Raises ClaimError."""
        claim = self._fetch(pod, use.claim)
        check_use(pod, use, claim)
        meta = claim["metadata"]
        allocation = (claim.get("status") or {}).get("allocation")
        if allocation is None:
            raise ClaimError(f"ResourceClaim {meta['name']}: not allocated")
        results = (allocation.get("devices") or {}).get("results") or ()
        names = sorted({result["driver"] for result in results})
        state = ClaimState(meta["uid"], meta["name"], meta["namespace"], drivers=dict.fromkeys(names, ()))
        return _Needed(state, {name: self._driver(name) for name in names})

    def _record(self, pod: Raw, needed: Iterable[_Needed]) -> list[_Needed]:
        """Record that the pod uses its claims, and return those that are not prepared yet. Raises ClaimError."""
        unprepared = []
        with self._lock:
            for each in needed:
                key = (each.state.namespace, each.state.name)
                state = self._claims.get(key, each.state)
                if state.uid != each.state.uid:
                    raise ClaimError(
                        f"old ResourceClaim with same name {state.name} and different UID {state.uid} still exists "
                        "(previous pod force-deleted?!)"
                    )
                self._claims[key] = replace(state, pods=state.pods | {pod["metadata"]["uid"]})
                self._checkpoint()
                if not state.prepared:
                    unprepared.append(each)
        return unprepared

    def _add_devices(self, driver: str, uid: str, devices: Iterable[api.Device]) -> None:
        """Add the devices that a driver has prepared for a claim.

        As in the kubelet, they are appended to those from an earlier try, so repeated calls give repeated devices.
        """
        found = tuple(
            PreparedDevice(
                device.pool_name,
                device.device_name,
                device.share_id if device.HasField("share_id") else None,
                tuple(device.request_names),
                tuple(device.cdi_device_ids),
            )
            for device in devices
        )

        def added(state: ClaimState) -> ClaimState:
            return replace(state, drivers={**state.drivers, driver: (*state.drivers.get(driver, ()), *found)})

        with self._lock:
            self._update(uid, added)

    def _release(self, uid: str, namespace: str, names: Iterable[str]) -> None:
        """Forget that the pod uses the claims, and unprepare those that no other pod uses. Raises ClaimError."""
        last = []
        with self._lock:
            for name in names:
                state = self._claims.get((namespace, name))
                if state is not None and len(state.pods) > 1:
                    self._claims[namespace, name] = replace(state, pods=state.pods - {uid})
                elif state is not None:
                    last.append(state)
        of_driver: dict[str, list[api.Claim]] = {}
        for state in last:
            for driver in state.drivers:
                of_driver.setdefault(driver, []).append(_claim(state))
        for driver, claims in of_driver.items():
            for _ in _checked("NodeUnprepareResources", claims, self._driver(driver).unprepare(claims)):
                pass  # An answer without an error has no content.
        with self._lock:
            for state in last:
                self._claims.pop((state.namespace, state.name), None)
            self._checkpoint()

    def _known(self, pod: Raw, claim: str) -> ClaimState:
        state = self.state(pod["metadata"]["namespace"], claim)
        if state is None:
            raise ClaimError(
                f"internal error: unable to get claim info for ResourceClaim {claim} in namespace "
                f"{pod['metadata']['namespace']}"
            )
        return state

    def _update(self, uid: str, change: Callable[[ClaimState], ClaimState]) -> None:
        """Replace the state of a claim. It may be gone, if its pod has been released meanwhile."""
        for key, state in self._claims.items():
            if state.uid == uid:
                self._claims[key] = change(state)

    def _checkpoint(self) -> None:
        claim_checkpoint.write(self._file, self._claims.values())


def _batches(needed: Iterable[_Needed]) -> list[tuple[tuple[str, Driver], list[api.Claim]]]:
    """Return each driver, with its name, and the claims that it must prepare."""
    drivers: dict[str, Driver] = {}
    claims: dict[str, list[api.Claim]] = {}
    for each in needed:
        for name, driver in each.drivers.items():
            drivers[name] = driver
            claims.setdefault(name, []).append(_claim(each.state))
    return [((name, drivers[name]), rows) for name, rows in claims.items()]


def _claim(state: ClaimState) -> api.Claim:
    return api.Claim(namespace=state.namespace, uid=state.uid, name=state.name)


def _checked(call: str, claims: Sequence[api.Claim], answers: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the UID and the answer for each claim. Raises ClaimError if the answer for a claim is missing or bad."""
    names = {claim.uid: claim.name for claim in claims}
    for uid, answer in answers.items():
        if uid not in names:
            raise ClaimError(f"{call} returned result for unknown claim UID {uid}")
        if answer.error:
            raise ClaimError(f"{call} failed for ResourceClaim {names[uid]}: {answer.error}")
        yield uid, answer
    if len(answers) != len(claims):
        raise ClaimError(f"{call} skipped {len(claims) - len(answers)} ResourceClaims")


def _listed(driver: str, devices: Iterable[PreparedDevice]) -> Iterable[listing.ClaimResource]:
    """Yield the entry of each device. As in the kubelet, it also has the CDI devices of the devices before it."""
    names: list[listing.CDIDevice] = []
    for device in devices:
        names += [listing.CDIDevice(name=name) for name in device.cdi]
        yield listing.ClaimResource(
            cdi_devices=names,
            driver_name=driver,
            pool_name=device.pool,
            device_name=device.device,
            share_id=device.share_id,
        )
