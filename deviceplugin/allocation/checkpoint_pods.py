"""Decides which pods of the kubelet's checkpoint may still run.

`allocation.whole_cards` and `partitioning.slice_plugins` use it, each with a `CheckpointPods` of its own.
"""

from collections.abc import Iterable

from deviceplugin.pods.node_pods import NodePods

_UNKNOWN_SECONDS = 30.0
"""How long a pod that is in the checkpoint, but not in `NodePods`, counts as running: the watch may not have delivered
it yet."""
_WAS_PRESENT = float("-inf")
"""The time in `_missing_since` for a pod that the watch has delivered. Once such a pod is missing, it is gone."""


class CheckpointPods:
    """The pods that the kubelet's checkpoint names. Not thread-safe.

    The checkpoint may contain a new pod before the watch delivers it. It also contains an ended pod until the kubelet
    allocates devices for another pod.
    """

    def __init__(self, pods: NodePods) -> None:
        self._pods = pods
        self._missing_since: dict[str, float] = {}

    def running(self, uids: Iterable[str], now: float) -> frozenset[str]:
        """Return the UIDs of those pods that may still run, and forget all pods that are not in `uids`.

        Args:
            uids: The UIDs by which the kubelet knows the pods.
            now: The present time of a monotonic clock, in seconds.
        """
        present = self._pods.presences()
        self._missing_since = {
            uid: _WAS_PRESENT if uid in present else self._missing_since.get(uid, now) for uid in uids
        }
        return frozenset(
            uid
            for uid, since in self._missing_since.items()
            if (not present[uid].ended if uid in present else now - since < _UNKNOWN_SECONDS)
        )
