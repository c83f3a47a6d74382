"""The nodes of the experiment and what is free on them."""

from collections.abc import Sequence

from scheduler.fragmentation.board import Board
from scheduler.fragmentation.shapes import CARD, NodeClass, Shape, milli_on


class Cluster:
    """Rows are the nodes in the order given, in which ties are broken."""

    def __init__(self, nodes: Sequence[NodeClass]) -> None:
        self.board = Board()
        self._nodes = tuple(nodes)
        self._cpu, self._memory = [node.cpu for node in nodes], [node.memory for node in nodes]
        self._free = [[CARD] * node.cards for node in nodes]
        for row in range(len(self._nodes)):
            self._show(row)

    def take(self, pod: Shape, row: int, cards: Sequence[int]) -> None:
        """Raises ValueError where the pod does not fit there: no policy may give more than there is."""
        node, free = self._nodes[row], self._free[row]
        milli = milli_on(pod, node)
        if milli is None or len(set(cards)) != pod.cards or any(free[card] < milli for card in cards):
            raise ValueError(f"{pod} does not fit on the cards {cards} of {node}, free {free}")
        if self._cpu[row] < pod.cpu or self._memory[row] < pod.memory:
            raise ValueError(f"{pod} needs more than {self._cpu[row]} m cpu or {self._memory[row]} bytes of {node}")
        for card in cards:
            free[card] -= milli
        self._cpu[row] -= pod.cpu
        self._memory[row] -= pod.memory
        self._show(row)

    def _show(self, row: int) -> None:
        self.board.put(row, self._nodes[row], self._cpu[row], self._memory[row], self._free[row])
