"""Decides which pods of the kubelet's checkpoint may still run.

`whole_cards` and `partitioning.slice_plugins` ask for the pods whose device ids they read in the checkpoint.
"""

from collections.abc import Iterable

from deviceplugin.pods.node_pods import NodePods

_UNKNOWN_SECONDS = 30.0
"""How long a pod that only the kubelet knows counts as a pod that the API server has not delivered yet."""
_WAS_PRESENT = float("-inf")
"""Replaces the time since when a pod is missing if the watch had it before: such a pod is gone."""


class CheckpointPods:
    """The pods that the kubelet's checkpoint names. Not thread-safe.

    The checkpoint runs ahead of the watch for a new pod, and keeps the ids of an ended pod until the next allocation.
    """

    def __init__(self, pods: NodePods) -> None:
        self._pods = pods
        self._missing_since: dict[str, float] = {}

    def running(self, uids: Iterable[str], now: float) -> frozenset[str]:
        """Return those of these pods, by the kubelet's UIDs, that may still run; forget all others.

        Args:
            now: a monotonic time in seconds.
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
