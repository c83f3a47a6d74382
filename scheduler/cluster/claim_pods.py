"""Stores the pods that use ResourceClaims and are not bound yet.

kube-scheduler does not retry a pod that it has rejected when its own sums change without an event
(docs/design/dra.md, "Observations", stranded pods), so `scheduler.claims.waker` looks for pods whose claims fit by the
ledger. The cluster cache uses `ClaimPods` with its lock held.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mgpu.model.compute_resources import NO_CPU_MEMORY, CpuMemory
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import table_at
from scheduler.cluster.converted_pods import ConvertedPods

Raw = Mapping[str, Any]

_MOST_CLAIMS = 32
"""The claims of a pod that count here. The API server accepts thousands, and each is stored and examined."""


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pod that kube-scheduler could not place, and that uses claims.

    Attributes:
        claims: The names of its claims that exist.
    """

    uid: str
    namespace: str
    name: str
    created: str
    claims: tuple[str, ...]


class ClaimPods:
    """Part of the ClusterCache, which holds its lock around every call.

    Attributes:
        converted: The pods that the webhook has converted.
    """

    def __init__(self) -> None:
        self.converted = ConvertedPods()
        self._waiting: dict[str, WaitingPod] = {}
        self._needs: dict[str, CpuMemory] = {}

    def pod_changed(self, raw: Raw, pod: Pod) -> None:
        """Store a pod of any kind that was added or modified.

        Args:
            pod: The same pod as `read_pod` returns it.
        """
        self.converted.pod_changed(raw, pod)
        if pod.node or pod.deleting or pod.ended or not _has_claims(raw):
            self._drop(pod.uid)
            return
        self._needs[pod.uid] = pod.cpu_memory
        waiting = waiting_pod(raw)
        if waiting is None:
            self._waiting.pop(pod.uid, None)
        else:
            self._waiting[pod.uid] = waiting

    def pod_gone(self, uid: str) -> None:
        self.converted.pod_gone(uid)
        self._drop(uid)

    def _drop(self, uid: str) -> None:
        self._waiting.pop(uid, None)
        self._needs.pop(uid, None)

    def needs(self, uid: str) -> CpuMemory:
        """Return the cpu and memory that a pod with claims requests, as long as it is not bound; else nothing."""
        return self._needs.get(uid, NO_CPU_MEMORY)

    def waiting(self) -> tuple[WaitingPod, ...]:
        """Return the waiting pods, the oldest first."""
        return tuple(sorted(self._waiting.values(), key=lambda pod: (pod.created, pod.namespace, pod.name, pod.uid)))


def waiting_pod(raw: Raw) -> WaitingPod | None:
    """Return the pod if it uses claims and kube-scheduler has found no node for it, or None."""
    if not _has_claims(raw):
        return None
    spec = table_at(raw, "spec")
    status = table_at(raw, "status")
    meta = table_at(raw, "metadata")
    if spec.get("nodeName") or meta.get("deletionTimestamp") or not _is_unschedulable(status):
        return None
    return WaitingPod(
        str(meta.get("uid", "")),
        str(meta.get("namespace", "")),
        str(meta.get("name", "")),
        str(meta.get("creationTimestamp") or ""),
        claim_names(raw),
    )


def claim_names(raw: Raw) -> tuple[str, ...]:
    """Return the names of the first `_MOST_CLAIMS` ResourceClaims of a pod that exist, each once, sorted."""
    # Several entries of `spec.resourceClaims` may name the same claim.
    names = dict.fromkeys(_claim_names(table_at(raw, "spec"), table_at(raw, "status")))
    return tuple(sorted(islice(names, _MOST_CLAIMS)))


def _has_claims(raw: Raw) -> bool:
    return bool(table_at(raw, "spec").get("resourceClaims"))


def _is_unschedulable(status: Raw) -> bool:
    conditions = status.get("conditions")
    return any(
        isinstance(row, dict)
        and row.get("type") == "PodScheduled"
        and row.get("status") == "False"
        and row.get("reason") == "Unschedulable"
        for row in (conditions if isinstance(conditions, list) else ())
    )


def _claim_names(spec: Raw, status: Raw) -> Iterator[str]:
    for table, key in ((spec, "resourceClaims"), (status, "resourceClaimStatuses")):
        rows = table.get(key)
        for row in rows if isinstance(rows, list) else ():
            name = table_at(row).get("resourceClaimName")
            if isinstance(name, str) and name:
                yield name
