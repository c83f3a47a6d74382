"""How much cpu and memory the pods on each node reserve, GPU pods or not: what decides whether more would fit there."""

import sys
from collections.abc import Callable

from mgpu.model.compute_resources import NO_CPU_MEMORY, CpuMemory
from mgpu.model.pods import Pod

_ROOMS_KEPT = 10_000


class Usage:
    """Not thread-safe: its owner serialises all calls. `changed` is told of every node whose sum has moved.

    Kept per pod and in sum per node, both from the pods alone, so that the order of events does not matter. A pod that
    reserves nothing takes no memory here.
    """

    def __init__(self, changed: Callable[[str], None] = lambda _: None) -> None:
        self._tell_changed = changed
        self._of_pod: dict[str, tuple[str, CpuMemory]] = {}
        self._on_node: dict[str, tuple[int, int, int]] = {}
        self._rooms: dict[CpuMemory, CpuMemory] = {}

    def follow(self, pod: Pod, reserved: str = "") -> None:
        """The pod as the API shows it; until it is bound it counts on the node where cards are `reserved` for it."""
        self.put(pod.uid, "" if pod.ended else pod.node or reserved, pod.needs)

    def put(self, uid: str, node: str, needs: CpuMemory) -> None:
        """The pod reserves so much on that node, in place of what it did before; "" for no node at all."""
        before = self._of_pod.get(uid)
        if before == (node, needs) or (before is None and not (node and any(needs))):
            return
        if before is not None:
            self._add(*before, -1)
            del self._of_pod[uid]
        if node and any(needs):
            # Of tens of thousands of pods most are of a few sizes: each of those is kept once.
            if len(self._rooms) >= _ROOMS_KEPT:
                self._rooms.clear()
            kept = (sys.intern(node), self._rooms.setdefault(needs, needs))
            self._of_pod[uid] = kept
            self._add(*kept, 1)

    def drop(self, uid: str) -> None:
        """The pod is gone."""
        self.put(uid, "", NO_CPU_MEMORY)

    def on(self, node: str, without: str = "") -> CpuMemory:
        """What is reserved on a node, less what pod `without` reserves there."""
        cpu, memory, _ = self._on_node.get(node, (0, 0, 0))
        where, own = self._of_pod.get(without, ("", NO_CPU_MEMORY))
        return CpuMemory(cpu - own.cpu, memory - own.memory) if where == node and node else CpuMemory(cpu, memory)

    def _add(self, node: str, needs: CpuMemory, times: int) -> None:
        cpu, memory, pods = self._on_node.get(node, (0, 0, 0))
        if pods + times:
            self._on_node[node] = (cpu + times * needs.cpu, memory + times * needs.memory, pods + times)
        else:
            del self._on_node[node]
        self._tell_changed(node)
