"""The pods of this node, as the agent's watch keeps them.

The Reflector of the agent calls `take` and `drop`; allocation, partitioning, isolation and the reporter read, from any
thread. All data is under one lock, and what is handed out is immutable.
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
    """A pod that the API has, GPU or not: `namespace/name`, and whether its phase is final."""

    key: str
    ended: bool


class NodePods:
    """Thread-safe.

    Args:
        settings: for the dialects that are enabled.
        changed: is called, without the lock, after every change of what the agent reads.
        records: checks the seals of allocation records.

    Attributes:
        dropped: how many pods the watch has dropped so far.
    """

    def __init__(self, settings: Settings, changed: Callable[[], None], records: RecordVerifier = UNSEALED) -> None:
        self._settings = settings
        self._changed = changed
        self._records = records
        self._pods: dict[str, GpuPod] = {}
        # UID → annotations of ours that are still on their way to the API server.
        self._amended: dict[str, Mapping[str, str]] = {}
        # UID of every pod, GPU or not → the kubelet's UID, and its presence.
        self._present: dict[str, tuple[str, Presence]] = {}
        self._limited: dict[str, LimitedPod] = {}
        self._vanished: dict[str, GpuPod] = {}
        self._ended_before: set[str] = set()
        self._ordered: tuple[GpuPod, ...] | None = None
        self._lock = threading.Lock()
        self.dropped = 0

    def take(self, raw: dict[str, Any]) -> None:
        """Take over a pod that the watch has added or changed."""
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
            # Most updates of a running pod change nothing that is read of it. Reading it again would cost the agent
            # milliseconds for each update, and wake everything that waits for changes.
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
        """Forget a pod that the API no longer has.

        After an interruption of the watch only its name and UID are known.
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
            # A pod that the watch drops without a final phase was deleted by force, or its end was missed.
            if gpu_pod is not None and gpu_pod.started_containers and not gpu_pod.pod.ended and not final:
                self._vanished[uid] = gpu_pod
            if (present is not None and present[1].ended) or had_ended(raw):
                self._ended_before.add(uid)
        self._changed()

    def amend(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None:
        """Let the pod's record say this from now on, although the API server does not say so yet.

        Does nothing where the pod has ended or gone meanwhile.
        """
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
        """Return the GPU pod that the kubelet knows by this UID: of a static pod the hash, which its mirror names."""
        with self._lock:
            if uid in self._pods or not is_static(uid):
                return self._pods.get(uid)
            return next(
                (gpu_pod for gpu_pod in self._pods.values() if gpu_pod.pod.annotations.get(MIRROR) == uid), None
            )

    def all(self) -> tuple[GpuPod, ...]:
        """Return the GPU pods, oldest first, then by namespace, name and UID."""
        with self._lock:
            if self._ordered is None:
                key = attrgetter("pod.created", "pod.namespace", "pod.name", "pod.uid")
                self._ordered = tuple(sorted(self._pods.values(), key=key))
            return self._ordered

    def is_active(self, uid: str) -> bool:
        """Return whether the GPU pod that the kubelet knows by this UID is on the node and has not ended."""
        gpu_pod = self.by_uid(uid)
        return gpu_pod is not None and not gpu_pod.pod.ended

    def presences(self) -> Mapping[str, Presence]:
        """Return all pods of the node, also those without GPUs, by the kubelet's UID."""
        with self._lock:
            return dict(self._present.values())

    def limited_pods(self) -> tuple[LimitedPod, ...]:
        """Return the Pods of MtgpuPods that have not ended."""
        with self._lock:
            return tuple(sorted(self._limited.values()))

    def held_amount(self, resource: str) -> int:
        """Return how much of the resource is held by pods that the kubelet has admitted and that have not ended.

        The kubelet sets `status.startTime` when it admits a pod. Other pods must not count: any user can create a pod
        that names this node and requests more than any node has, and the Node would report that much capacity.
        """
        with self._lock:
            running = (gpu_pod for gpu_pod in self._pods.values() if gpu_pod.pod.start_time and not gpu_pod.pod.ended)
            return sum(gpu_pod.held.get(resource, 0) for gpu_pod in running)

    def vanished_pods(self) -> tuple[GpuPod, ...]:
        """Return the pods whose objects vanished while they ran, until `forget_vanished`."""
        with self._lock:
            return tuple(self._vanished.values())

    def forget_vanished(self, uid: str) -> None:
        """Forget a vanished pod, since nothing of it runs any more."""
        with self._lock:
            self._vanished.pop(uid, None)

    def had_ended_before(self, uid: str) -> bool:
        """Return whether this pod is gone and its last status said that all of its containers had ended."""
        with self._lock:
            return uid in self._ended_before

    def forget_ended_before_except(self, uids: Collection[str]) -> None:
        """Forget what `ended_before` says of all other pods."""
        with self._lock:
            self._ended_before &= {*uids}

    def _keep_limited(self, raw: Mapping[str, Any], *, ended: bool) -> bool:
        """Follow the Pod of an MtgpuPod, and return whether it is unchanged.

        An orphaned one keeps its limits while it runs.
        """
        uid = raw["metadata"]["uid"]
        before = self._limited.pop(uid, None)
        own = None if self._records.finding_of_mtgpu(raw) else read_limited(raw)
        now = None if ended else own or before
        if now:
            self._limited[uid] = now
        return now == before
