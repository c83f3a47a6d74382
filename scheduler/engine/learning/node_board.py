"""What is free on every node, as columns, and what each node is worth to a pod: rated again only where it changed.

`Board` knows nodes by row number; `Field` knows them by name. `points` turns ratings into kube-scheduler's scores. The
callers are `scheduler/decisions/scores.py` and the openb experiment.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.pods import Node
from scheduler.engine.learning.shapes import Ints, NodeClass, Rows, Shape, class_of, free_of
from scheduler.engine.node_fit import HIGHEST

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


_OTHERS = 4
"""The most of any other node. Six points less are 300 with the weight of 5 that we recommend: more than fullness and
balance of cpu and memory can make up for (100 each), less than what users state by affinity, taints and spreading."""

BEHIND = 2**61
"""Taken off a key: behind all nodes that it is not taken off, but still better than not at all."""


WIDTH = 16
"""Cards of a node on the board at most. All rows of a board are equally wide, and what a node costs grows with the
square of the width: one wide node would slow every pod's scoring."""


class Field:
    """The nodes with cards, by name, on a board. Not thread-safe.

    wide: the nodes with more than WIDTH cards, which are not on the board; the caller judges each by itself.
    """

    def __init__(self) -> None:
        self.board = Board()
        self.wide: set[str] = set()
        self._row: dict[str, int] = {}
        self._unused: list[int] = []

    def put(self, node: Node, cards: Sequence[CardState], room: CpuMemory) -> None:
        """Take in the node as it is now. room: what it has free of cpu and memory."""
        if not 0 < len(cards) <= WIDTH:
            self.drop(node.name)
            if cards:
                self.wide.add(node.name)
            return
        self.wide.discard(node.name)
        row = self._row.get(node.name)
        if row is None:
            row = self._row[node.name] = self._unused.pop() if self._unused else len(self._row)
        self.board.put(row, class_of(node, cards), *room, free_of(cards))

    def drop(self, name: str) -> None:
        self.wide.discard(name)
        row = self._row.pop(name, None)
        if row is not None:
            self.board.drop(row)
            self._unused.append(row)

    def keys(self, judge: Judge, shape: Shape, names: Sequence[str]) -> Ints:
        """One key per name, UNFIT where the pod does not fit or there is no such node."""
        keys = np.append(self.board.keys(judge, shape), UNFIT)
        row = self._row
        return keys[np.fromiter([row.get(name, -1) for name in names], np.intp, len(names))]


def points(names: Sequence[str], keys: Ints) -> list[int]:
    """Scores as kube-scheduler wants them. It picks at random among the best, so exactly one node gets 10.

    That is the first by name of those with the highest key; the others get 0..4 in proportion to theirs. No points at
    all where no node is known to fit.
    """
    fit = keys != UNFIT
    if not fit.any():
        return [0] * len(names)
    best, least = int(keys.max()), int(keys[fit].min())
    share = _OTHERS * ((keys - least) / (best - least)) if best > least else np.full(len(keys), float(_OTHERS))
    scores: list[int] = np.where(fit, share, 0).astype(np.int64).tolist()
    scores[min(np.flatnonzero(keys == best).tolist(), key=lambda i: names[i])] = HIGHEST
    return scores
