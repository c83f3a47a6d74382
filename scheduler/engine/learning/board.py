"""What is free on every node, as columns, and what each node is worth to a pod: scored again only where it changed."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from scheduler.engine.learning.node_columns import Ints, Rows
from scheduler.engine.learning.shapes import NodeClass, Shape

UNFIT = -(2**62)
"""The key of a node that cannot take the pod."""

_REMEMBERED = 256  # shapes; at 5,000 nodes 40 kB each
_SPARE_KINDS = 64
"""Classes without a node that are kept until they outnumber the rows, too: an agent can invent one per update."""
_AT_ONCE = 512  # rows per call of a judge: its intermediate arrays stay in the processor's cache


class Chooser(Protocol):
    """Says on which node and cards a pod goes best."""

    def keys(self, rows: Rows, shape: Shape) -> Ints:
        """[B]: higher is better, UNFIT where the pod does not fit."""

    def cards(self, rows: Rows, shape: Shape) -> tuple[int, ...]:
        """The cards on the one node of `rows`, which can take the pod."""


class Judge(Chooser, Protocol):
    """One that can also say what any change of a node is worth."""

    def worths(self, before: Rows, after: Rows) -> Ints:
        """[B]: what it is worth that the one node of `before` becomes each of `after`; higher is better.

        It is what `keys` looks for the highest of among the node's cards.
        """


class Board:
    """Nodes by row number, as the caller gives them out. Not thread-safe."""

    def __init__(self) -> None:
        self._kinds: dict[NodeClass, int] = {}
        self._kind = np.full(0, -1, np.int64)
        self._cpu, self._memory, self._changed = (np.zeros(0, np.int64) for _ in range(3))
        self._free = np.zeros((0, 0), np.int64)
        self._changes = 0
        self._judge: Chooser | None = None
        self._known: OrderedDict[Shape, tuple[int, Ints]] = OrderedDict()

    def put(self, row: int, node: NodeClass, cpu: int, memory: int, free: Sequence[int]) -> None:
        """The node in `row` is of this class and has this much free: cpu in milli, memory in bytes, cards in milli."""
        self._make_room(row + 1, len(free))
        self._kind[row] = self._kinds.setdefault(node, len(self._kinds))
        if len(self._kinds) > 2 * len(self._kind) + _SPARE_KINDS:
            self._renumber_kinds()
        self._cpu[row], self._memory[row] = cpu, memory
        self._free[row] = 0
        self._free[row, : len(free)] = free
        self._touch(row)

    def drop(self, row: int) -> None:
        """There is no node in `row` any more."""
        self._kind[row] = -1
        self._touch(row)

    def rows(self, which: Sequence[int] | Ints) -> Rows:
        """A copy of these rows, all of which hold nodes."""
        at = np.asarray(which, np.int64)
        return Rows(tuple(self._kinds), self._kind[at], self._cpu[at], self._memory[at], self._free[at])

    def keys(self, judge: Chooser, shape: Shape) -> Ints:
        """The judge's key of every row, UNFIT where there is no node. The caller's to keep."""
        if judge is not self._judge:
            self._judge = judge
            self._known.clear()
        at, keys = self._known.pop(shape, (0, np.full(0, UNFIT, np.int64)))
        if len(keys) < len(self._kind):
            keys = np.concatenate((keys, np.full(len(self._kind) - len(keys), UNFIT, np.int64)))
        changed = np.flatnonzero(self._changed > at)
        keys[changed] = UNFIT
        there = changed[self._kind[changed] >= 0]
        for i in range(0, len(there), _AT_ONCE):
            some = there[i : i + _AT_ONCE]
            keys[some] = judge.keys(self.rows(some), shape)
        self._known[shape] = self._changes, keys
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return keys.copy()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Those that keys were asked for, the latest last."""
        return tuple(self._known)

    def copy(self) -> "Board":
        """The same nodes, and no keys yet."""
        other = Board()
        other._kinds, other._changes = dict(self._kinds), self._changes
        other._kind, other._cpu, other._memory = self._kind.copy(), self._cpu.copy(), self._memory.copy()
        other._changed, other._free = self._changed.copy(), self._free.copy()
        return other

    def adopt(self, other: "Board") -> None:
        """Take over the keys of a copy of this one, which may be older than the latest changes."""
        self._judge, self._known = other._judge, other._known

    def _touch(self, row: int) -> None:
        self._changes += 1
        self._changed[row] = self._changes

    def _renumber_kinds(self) -> None:
        classes = list(self._kinds)
        used = np.unique(self._kind[self._kind >= 0])
        numbers = np.full(len(classes) + 1, -1, np.int64)
        numbers[used] = np.arange(len(used))
        self._kind = numbers[self._kind]  # -1, for no node, is the last one
        self._kinds = {classes[old]: new for new, old in enumerate(used.tolist())}

    def _make_room(self, rows: int, cards: int) -> None:
        have, width = self._free.shape
        if rows <= have and cards <= width:
            return
        more = max(rows, 2 * have) - have if rows > have else 0
        self._kind = np.concatenate((self._kind, np.full(more, -1, np.int64)))
        self._cpu, self._memory, self._changed = (
            np.concatenate((column, np.zeros(more, np.int64))) for column in (self._cpu, self._memory, self._changed)
        )
        free = np.zeros((have + more, max(cards, width)), np.int64)
        free[:have, :width] = self._free
        self._free = free
