"""The pods of this node that use ResourceClaims, and which requests of which claims their containers reference.

The watch of the pods (`NodeState.pod_watch`) delivers them. The kubelet does not say for which pod it has a claim
prepared, so `claim_preparation` reads the pods from the claim's `status.reservedFor`, and finds them here.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import base_request

_MOST_CLAIMS = 64
"""The most claims of a pod. The API server accepts thousands in 1.5 MB, and each would take memory of the agent."""
_MOST_REFERENCES = 2048
"""The most references of all containers of a pod to claims."""


class Reference(NamedTuple):
    """A reference of a container to a claim.

    Attributes:
        claim: The name of the ResourceClaim.
        request: The request without the name of an alternative; "" for the whole claim.
    """

    claim: str
    request: str


@dataclass(frozen=True, slots=True)
class ClaimPod:
    """A pod that uses claims.

    Attributes:
        waiting: Whether the kubelet has not started it yet, and is still to do so.
        claims: The names of its ResourceClaims, as far as they are known.
        references: The references of each container that has some, in their order.
    """

    uid: str
    namespace: str
    name: str
    ended: bool = False
    claims: frozenset[str] = frozenset()
    references: Mapping[str, tuple[Reference, ...]] = field(default_factory=dict, hash=False)
    waiting: bool = False


def read_claim_pod(raw: Mapping[str, Any]) -> ClaimPod | None:
    """Return the pod, or None if it uses no claim, or more than `_MOST_CLAIMS`, for which claims are not prepared."""
    meta = raw["metadata"]
    spec = table_at(raw, "spec")
    status = table_at(raw, "status")
    if _is_large(spec, status):
        return None
    names = dict(_claim_names(spec, status))
    extended = table_at(status, "extendedResourceClaimStatus")
    if not names and not extended and not _rows(spec, "resourceClaims"):
        return None
    references = {
        str(row.get("name")): found
        for kind in ("initContainers", "containers")
        for row in _rows(spec, kind)
        if (found := (*_references(row, names), *_extended_references(row, extended)))
    }
    claims = {*names.values(), *filter(None, (str(extended.get("resourceClaimName") or ""),))}
    return ClaimPod(
        meta["uid"],
        meta.get("namespace", "default"),
        meta["name"],
        status.get("phase") in ("Succeeded", "Failed"),
        frozenset(claims),
        references,
        waiting=status.get("phase", "Pending") == "Pending" and "deletionTimestamp" not in meta,
    )


def _is_large(spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    containers = (row for kind in ("initContainers", "containers") for row in _rows(spec, kind))
    references = sum(len(_rows(table_at(row, "resources"), "claims")) for row in containers)
    mappings = len(_rows(table_at(status, "extendedResourceClaimStatus"), "requestMappings"))
    return len(_rows(spec, "resourceClaims")) > _MOST_CLAIMS or references + mappings > _MOST_REFERENCES


def _claim_names(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the pod's names of its claims, each with the name of the ResourceClaim."""
    made = {row.get("name"): row.get("resourceClaimName") for row in _rows(status, "resourceClaimStatuses")}
    for row in _rows(spec, "resourceClaims"):
        name = row.get("resourceClaimName") or made.get(row.get("name"))
        if isinstance(name, str) and name:
            yield str(row.get("name")), name


def _references(container: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[Reference]:
    for row in _rows(table_at(container, "resources"), "claims"):
        if row.get("name") in names:
            yield Reference(names[row["name"]], base_request(str(row.get("request") or "")))


def _extended_references(container: Mapping[str, Any], extended: Mapping[str, Any]) -> Iterator[Reference]:
    """Yield the references to the claim that kube-scheduler has created for extended resources."""
    for row in _rows(extended, "requestMappings"):
        if row.get("containerName") == container.get("name"):
            yield Reference(str(extended.get("resourceClaimName")), base_request(str(row.get("requestName") or "")))


def _rows(table: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    rows = table.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


class ClaimUsers:
    """The pods of the node that use claims. Thread-safe.

    Args:
        changed: A function that is called after every change.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._pods: dict[str, ClaimPod] = {}
        self._lock = threading.Lock()

    def take(self, raw: dict[str, Any]) -> None:
        """Store a pod that was added or changed."""
        pod = read_claim_pod(raw)
        uid = raw["metadata"]["uid"]
        with self._lock:
            before = self._pods.get(uid)
            if pod == before:
                return
            if pod is None:
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = pod
        self._changed()

    def drop(self, raw: dict[str, Any]) -> None:
        """Remove a pod that the API does not have any more."""
        with self._lock:
            gone = self._pods.pop(raw["metadata"]["uid"], None)
        if gone is not None:
            self._changed()

    def get(self, uid: str) -> ClaimPod | None:
        with self._lock:
            return self._pods.get(uid)

    def uids(self) -> frozenset[str]:
        """Return the UIDs of the pods that use claims."""
        with self._lock:
            return frozenset(self._pods)

    def waiting(self) -> tuple[ClaimPod, ...]:
        """Return the pods that have not started yet, by namespace, name and UID."""
        with self._lock:
            found = [pod for pod in self._pods.values() if pod.waiting]
        return tuple(sorted(found, key=lambda pod: (pod.namespace, pod.name, pod.uid)))

    def users_of(self, namespace: str, claim: str) -> tuple[ClaimPod, ...]:
        """Return the pods that use a claim, by name and UID, including those that have ended."""
        with self._lock:
            found = [pod for pod in self._pods.values() if pod.namespace == namespace and claim in pod.claims]
        return tuple(sorted(found, key=lambda pod: (pod.name, pod.uid)))
