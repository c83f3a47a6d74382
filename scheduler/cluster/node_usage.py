"""Sums the cpu and memory that pods reserve on each node, whether they request GPUs or not.

`NodeSnapshots` computes from the sums how much of a node is free, and `mgpu simulate` uses them too. The sums follow
from the present pods alone, in whatever order the events of the pods arrive.
"""

import sys

from mgpu.model.compute_resources import NO_CPU_MEMORY, CpuMemory

_MAX_SHARED_SIZES = 10_000
"""The maximum number of different amounts that are remembered so that pods with equal amounts share one object."""


class NodeUsage:
    """The sums of cpu and memory by node. Not thread-safe. A pod that reserves nothing is not stored."""

    def __init__(self) -> None:
        self._pods: dict[str, tuple[str, CpuMemory]] = {}
        self._sums: dict[str, tuple[int, int, int]] = {}  # By node, the cpu, the memory and the number of its pods.
        self._sizes: dict[CpuMemory, CpuMemory] = {}

    def put(self, uid: str, node: str, needs: CpuMemory) -> set[str]:
        """Replace what the pod reserves and on which node. Return the nodes whose sums have changed.

        Args:
            node: The node of the pod; "" if it is on none.
            needs: The cpu and memory that the pod reserves.
        """
        before = self._pods.get(uid)
        now = (node, needs) if node and any(needs) else None
        if before == now:
            return set()
        changed = set()
        if before is not None:
            del self._pods[uid]
            self._add(*before, -1)
            changed.add(before[0])
        if now is not None:
            # There may be tens of thousands of pods, but most have one of a few sizes. Equal sizes share one object.
            if len(self._sizes) >= _MAX_SHARED_SIZES:
                self._sizes.clear()
            self._pods[uid] = (sys.intern(node), self._sizes.setdefault(needs, needs))
            self._add(node, needs, 1)
            changed.add(node)
        return changed

    def drop(self, uid: str) -> set[str]:
        """Remove a pod. Return the nodes whose sums have changed."""
        return self.put(uid, "", NO_CPU_MEMORY)

    def on(self, node: str, without: str = "") -> CpuMemory:
        """Return what pods reserve on a node, except for the pod with the UID `without`."""
        cpu, memory, _ = self._sums.get(node, (0, 0, 0))
        where, own = self._pods.get(without, ("", NO_CPU_MEMORY))
        return CpuMemory(cpu - own.cpu, memory - own.memory) if where == node and node else CpuMemory(cpu, memory)

    def _add(self, node: str, needs: CpuMemory, sign: int) -> None:
        cpu, memory, pods = self._sums.get(node, (0, 0, 0))
        if pods + sign:
            self._sums[node] = (cpu + sign * needs.cpu, memory + sign * needs.memory, pods + sign)
        else:
            del self._sums[node]
