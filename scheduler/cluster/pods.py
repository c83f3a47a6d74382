"""The pods that the API server has: GPU pods by UID, and the UIDs of all pods by name."""

from collections.abc import Iterable

from scheduler.cluster.gpu_pods import GpuPod


class Pods:
    """Part of the ClusterCache, which holds its lock around every call."""

    def __init__(self) -> None:
        self._gpu_pods: dict[str, GpuPod] = {}
        self._uids: dict[tuple[str, str], str] = {}

    def note_uid(self, namespace: str, name: str, uid: str) -> None:
        """Note the UID of a pod, whether it requests GPUs or not."""
        self._uids[namespace, name] = uid

    def forget_uid(self, namespace: str, name: str, uid: str) -> None:
        """Forget the UID of a pod that is gone. A pod of the same name may have been created meanwhile: it stays."""
        if self._uids.get((namespace, name)) == uid:
            del self._uids[namespace, name]

    def uid_of(self, namespace: str, name: str) -> str | None:
        """Return the UID of the pod of this name, GPU pod or not, or None where there is no such pod."""
        return self._uids.get((namespace, name))

    def put(self, pod: GpuPod) -> None:
        """Keep this state of a GPU pod instead of its last one."""
        self._gpu_pods[pod.pod.uid] = pod

    def drop(self, uid: str) -> None:
        """Forget a GPU pod."""
        self._gpu_pods.pop(uid, None)

    def get(self, uid: str) -> GpuPod | None:
        """Return the GPU pod, or None where no GPU pod has this UID. Safe without the lock for the pods' informer."""
        return self._gpu_pods.get(uid)

    def all(self) -> tuple[GpuPod, ...]:
        """Return all GPU pods, in no order that means anything."""
        return tuple(self._gpu_pods.values())

    def on(self, node: str) -> Iterable[GpuPod]:
        """Return the GPU pods that are bound to this node."""
        return [known for known in self._gpu_pods.values() if known.pod.node == node]
