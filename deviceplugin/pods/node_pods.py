"""The cache of the pods on this node.

The watch of the pods (`NodeState.pod_watch`) calls `NodePods.take` and `NodePods.drop`. Any thread may read the cache:
one lock protects all data, and a caller may change a returned collection without affecting the cache.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from deviceplugin.pods.gpu_pod import (
    MIRROR,
    GpuPod,
    LimitedPod,
    had_ended,
    is_static,
    kubelets_uid,
    read_gpu_pod,
    read_limited,
    with_annotations,
    with_record,
)
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.dialects.watched_pods import fingerprint
from mgpu.settings import Settings


class Presence(NamedTuple):
    """A pod in the API, whether it requests GPUs or not.

    Attributes:
        key: The namespace and the name of the pod, as `namespace/name`.
    """

    key: str
    ended: bool


class NodePods:
    """The pods of the node, and what the agent stores about pods that are gone. Thread-safe.

    Args:
        changed: A function that is called after every removal of a pod, and after every change of a field that the
            agent reads. The lock is not held during the call.

    Attributes:
        dropped: How many pods have been removed since the start.
    """

    def __init__(self, settings: Settings, changed: Callable[[], None], records: RecordVerifier = UNSEALED) -> None:
        self._settings = settings
        self._changed = changed
        self._records = records
        self._pods: dict[str, GpuPod] = {}
        # The annotations of a pod that the API server does not have yet, by UID.
        self._amended: dict[str, Mapping[str, str]] = {}
        # By UID of every pod, with or without GPUs, the UID by which the kubelet knows the pod, and its presence.
        self._present: dict[str, tuple[str, Presence]] = {}
        self._limited: dict[str, LimitedPod] = {}
        self._vanished: dict[str, GpuPod] = {}
        self._ended_before: set[str] = set()
        self._ordered: tuple[GpuPod, ...] | None = None
        self._lock = threading.Lock()
        self.dropped = 0

    def take(self, raw: dict[str, Any]) -> None:
        """Store a pod that was added or changed."""
        uid = raw["metadata"]["uid"]
        with self._lock:
            annotations = raw["metadata"].get("annotations") or {}
            key = f"{raw['metadata'].get('namespace', 'default')}/{raw['metadata']['name']}"
            ended = (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            present = kubelets_uid(annotations, uid), Presence(key, ended)
            unchanged = self._present.get(uid) == present
            self._present[uid] = present
            unchanged = self._keep_limited(raw, ended=ended) and unchanged
            amended = self._amended.get(uid, {})
            if amended.items() <= annotations.items():
                self._amended.pop(uid, None)
            before = self._pods.get(uid)
            # Most updates of a running pod change no field that the agent reads. Reading the pod again would cost the
            # agent milliseconds for each update, and wake all parts that wait for changes.
            if unchanged and not amended and before is not None and before.fingerprint == fingerprint(raw, MIRROR):
                return
            gpu_pod = read_gpu_pod(raw, self._settings, amended, self._records, before.verdict if before else None)
            if gpu_pod is None and unchanged:
                return
            if gpu_pod is not None:
                self._pods[uid] = replace(gpu_pod, fingerprint=None if amended else fingerprint(raw, MIRROR))
                self._ordered = None
        self._changed()

    def drop(self, raw: dict[str, Any]) -> None:
        """Remove a pod that the API does not have any more.

        Args:
            raw: The last object, or only its name and UID if the watch was interrupted.
        """
        uid = raw["metadata"]["uid"]
        with self._lock:
            self._amended.pop(uid, None)
            self._limited.pop(uid, None)
            self._ordered = None
            self.dropped += 1
            present = self._present.pop(uid, None)
            gpu_pod = self._pods.pop(uid, None)
            final = (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            # A pod that disappears without a final phase was deleted by force, or the watch has missed its end.
            if gpu_pod is not None and gpu_pod.started_containers and not gpu_pod.pod.ended and not final:
                self._vanished[uid] = gpu_pod
            if (present is not None and present[1].ended) or had_ended(raw):
                self._ended_before.add(uid)
        self._changed()

    def amend(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None:
        """Apply these annotations to the pod before the API server has them, unless the pod has ended or is gone."""
        uid = gpu_pod.pod.uid
        with self._lock:
            now = self._pods.get(uid)
            if now is None or now.pod.ended:
                return
            self._amended[uid] = {**self._amended.get(uid, {}), **annotations}
            amended = replace(now, pod=with_annotations(now.pod, annotations), fingerprint=None)
            self._pods[uid] = with_record(amended)
            self._ordered = None
        self._changed()

    def by_uid(self, uid: str) -> GpuPod | None:
        """Return the GPU pod with this UID, or None. The kubelet's UID of a static pod, a hash, is accepted too."""
        with self._lock:
            if uid in self._pods or not is_static(uid):
                return self._pods.get(uid)
            return next((mirror for mirror in self._pods.values() if mirror.pod.annotations.get(MIRROR) == uid), None)

    def all(self) -> tuple[GpuPod, ...]:
        """Return the GPU pods, sorted by creation time, namespace, name and UID."""
        with self._lock:
            if self._ordered is None:
                key = attrgetter("pod.created", "pod.namespace", "pod.name", "pod.uid")
                self._ordered = tuple(sorted(self._pods.values(), key=key))
            return self._ordered

    def is_active(self, uid: str) -> bool:
        """Return whether `by_uid` finds a pod with this UID that has not ended."""
        gpu_pod = self.by_uid(uid)
        return gpu_pod is not None and not gpu_pod.pod.ended

    def presences(self) -> Mapping[str, Presence]:
        """Return all pods of the node, also those without GPUs, by the UID by which the kubelet knows them."""
        with self._lock:
            return dict(self._present.values())

    def limited_pods(self) -> tuple[LimitedPod, ...]:
        """Return the Pods of MtgpuPods that have not ended."""
        with self._lock:
            return tuple(sorted(self._limited.values()))

    def held_amount(self, resource: str) -> int:
        """Return how much of the resource is held by pods that the kubelet has admitted and that have not ended.

        The kubelet sets `status.startTime` when it admits a pod. Other pods are left out: any user can create a
        pod that names this node and requests more than the node has, and the Node would then report that amount as its
        capacity.
        """
        with self._lock:
            running = (gpu_pod for gpu_pod in self._pods.values() if gpu_pod.pod.start_time and not gpu_pod.pod.ended)
            return sum(gpu_pod.held.get(resource, 0) for gpu_pod in running)

    def vanished_pods(self) -> tuple[GpuPod, ...]:
        """Return the GPU pods whose objects disappeared while they ran, until `forget_vanished` removes them."""
        with self._lock:
            return tuple(self._vanished.values())

    def forget_vanished(self, uid: str) -> None:
        with self._lock:
            self._vanished.pop(uid, None)

    def had_ended_before(self, uid: str) -> bool:
        """Return whether this pod had ended when its object disappeared, by its phase or the states of its containers.

        The result is False for pods that `forget_ended_before_except` has forgotten.
        """
        with self._lock:
            return uid in self._ended_before

    def forget_ended_before_except(self, uids: Collection[str]) -> None:
        """Make `had_ended_before` return False for all pods except those with these UIDs."""
        with self._lock:
            self._ended_before &= {*uids}

    def _keep_limited(self, raw: Mapping[str, Any], *, ended: bool) -> bool:
        """Store the pod if it is the Pod of an MtgpuPod, and return whether its limits are unchanged.

        A Pod that has lost its owner reference keeps its limits while it runs.
        """
        uid = raw["metadata"]["uid"]
        before = self._limited.pop(uid, None)
        own = None if self._records.finding_of_mtgpu(raw) else read_limited(raw)
        now = None if ended else own or before
        if now:
            self._limited[uid] = now
        return now == before
