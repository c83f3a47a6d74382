"""Stores the pods of the API server: GPU pods by UID, and the UIDs of all pods by name.

The cluster cache uses `Pods` with its lock held.
"""

from collections.abc import Iterable

from scheduler.cluster.gpu_pods import GpuPod


class Pods:
    """Part of the ClusterCache, which holds its lock around every call."""

    def __init__(self) -> None:
        self._gpu_pods: dict[str, GpuPod] = {}
        self._uids: dict[tuple[str, str], str] = {}

    def note_uid(self, namespace: str, name: str, uid: str) -> None:
        """Store the UID of a pod, whether it requests GPUs or not."""
        self._uids[namespace, name] = uid

    def forget_uid(self, namespace: str, name: str, uid: str) -> None:
        """Remove the UID of a deleted pod, unless a new pod of the same name already has another UID."""
        if self._uids.get((namespace, name)) == uid:
            del self._uids[namespace, name]

    def uid_of(self, namespace: str, name: str) -> str | None:
        """Return the UID of the pod with this name, or None if there is none. The pod need not request GPUs."""
        return self._uids.get((namespace, name))

    def put(self, gpu_pod: GpuPod) -> None:
        self._gpu_pods[gpu_pod.pod.uid] = gpu_pod

    def drop(self, uid: str) -> None:
        self._gpu_pods.pop(uid, None)

    def get(self, uid: str) -> GpuPod | None:
        """Return the GPU pod, or None if no GPU pod has this UID.

        The thread of the informer of pods may call this without the lock, because no other thread changes the pods.
        """
        return self._gpu_pods.get(uid)

    def all(self) -> tuple[GpuPod, ...]:
        return tuple(self._gpu_pods.values())

    def on(self, node: str) -> Iterable[GpuPod]:
        """Return the GPU pods that are bound to this node."""
        return [gpu_pod for gpu_pod in self._gpu_pods.values() if gpu_pod.pod.node == node]
