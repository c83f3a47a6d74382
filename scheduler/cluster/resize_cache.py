"""Makes the promises of live resizes in the cluster cache.

`ClusterCache.resizes` is the only instance. It is a facade of the parts of the cluster cache that a resize concerns,
and acquires the lock of the cluster cache for each call. `scheduler.decisions.resizing` calls it.
"""

import threading
from collections.abc import Mapping

from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.pods import Pods
from scheduler.cluster.resize_promises import Promise, is_resizing


class ResizeCache:
    """The promises in force. Thread-safe: each call acquires the lock of the cluster cache."""

    def __init__(self, lock: threading.RLock, pods: Pods, holdings: Holdings, snapshots: NodeSnapshots) -> None:
        self._lock = lock
        self._pods = pods
        self._holdings = holdings
        self._snapshots = snapshots

    def promise(self, gpu_pod: GpuPod, held: Mapping[str, int], version: int) -> bool:
        """Hold these amounts for the pod, by container, until the watch delivers another version of the pod.

        Args:
            gpu_pod: The version of the pod on which the decision is based.
            version: The version of the snapshot of the node on which the decision is based.

        Returns False, and changes nothing, if the pod or the node has changed since.
        """
        uid, node = gpu_pod.pod.uid, gpu_pod.pod.node
        with self._lock:
            now = self._pods.get(uid)
            if now is None or now.version != gpu_pod.version or self._snapshots.version(node) != version:
                return False
            self._holdings.promises.put(uid, Promise(gpu_pod.version, held))
            self._holdings.settle(now)
            return True

    def pods(self) -> tuple[str, ...]:
        """Return the UIDs of the pods that have annotations of a live resize, sorted."""
        with self._lock:
            return tuple(sorted(gpu_pod.pod.uid for gpu_pod in self._pods.all() if is_resizing(gpu_pod)))
