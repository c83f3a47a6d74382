"""What is free on every node, as columns, and the rating of every node for a pod. Only changed nodes are rated again.

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
from scheduler.engine.learning.shapes import Ints, NodeClass, NodeRows, Shape, class_of, free_milli
from scheduler.engine.node_fit import HIGHEST

UNFIT = -(2**62)
"""The key of a node that cannot take the pod."""

_REMEMBERED = 256  # shapes; at 5,000 nodes 40 kB each
_SPARE_KINDS = 64
"""How many classes are kept beyond two per row. Unused ones are then dropped: an agent can make up one per update."""
_AT_ONCE = 512  # rows per call of a judge: its intermediate arrays stay in the processor's cache


class Chooser(Protocol):
    """Chooses the node and the cards for a pod."""

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        """Return a key for every row, [B]: higher is better, UNFIT where the pod does not fit."""

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        """Return the cards for the pod on the only node of `rows`, which can take it."""


class Judge(Chooser, Protocol):
    """A chooser that can also rate any change of a node."""

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        """Rate each change of the only node of `before` to a row of `after`, [B]; higher is better.

        `keys` rates a node by the highest of these among the ways to place the pod on it.
        """


class NodeBoard:
    """Nodes by row number. The caller assigns the numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._kinds: dict[NodeClass, int] = {}
        self._kind = np.full(0, -1, np.int64)
        self._cpu, self._memory, self._changed = (np.zeros(0, np.int64) for _ in range(3))
        self._free = np.zeros((0, 0), np.int64)
        self._changes = 0
        self._judge: Chooser | None = None
        self._known: OrderedDict[Shape, tuple[int, Ints]] = OrderedDict()

    def put(self, row: int, node: NodeClass, cpu: int, memory: int, free: Sequence[int]) -> None:
        """Set the class of the node in `row` and what it has free: cpu in milli, memory in bytes, cards in milli."""
        self._make_room(row + 1, len(free))
        self._kind[row] = self._kinds.setdefault(node, len(self._kinds))
        if len(self._kinds) > 2 * len(self._kind) + _SPARE_KINDS:
            self._renumber_kinds()
        self._cpu[row], self._memory[row] = cpu, memory
        self._free[row] = 0
        self._free[row, : len(free)] = free
        self._touch(row)

    def drop(self, row: int) -> None:
        """Remove the node in `row`."""
        self._kind[row] = -1
        self._touch(row)

    def rows(self, which: Sequence[int] | Ints) -> NodeRows:
        """Return a copy of these rows. Each of them must hold a node."""
        at = np.asarray(which, np.int64)
        return NodeRows(tuple(self._kinds), self._kind[at], self._cpu[at], self._memory[at], self._free[at])

    def keys(self, judge: Chooser, shape: Shape) -> Ints:
        """Return the judge's key of every row, UNFIT where there is no node. The caller may change the array."""
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
        """The shapes for which `keys` was called, the latest last."""
        return tuple(self._known)

    def copy(self) -> "NodeBoard":
        """Return a board with the same nodes, but without keys."""
        other = NodeBoard()
        other._kinds, other._changes = dict(self._kinds), self._changes
        other._kind, other._cpu, other._memory = self._kind.copy(), self._cpu.copy(), self._memory.copy()
        other._changed, other._free = self._changed.copy(), self._free.copy()
        return other

    def adopt(self, other: "NodeBoard") -> None:
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
"""The highest score of any node except the best one, which gets 10.

With the recommended weight of 5, a difference of 6 points is 300 points in kube-scheduler. That is more than its scores
for the fullness and the balance of cpu and memory can outweigh (100 each), but less than affinity, taints and topology
spread constraints, which users state."""

DEMOTION = 2**61
"""Subtracted from the key of a node that shall come after all others, but still before nodes that do not fit."""


WIDTH = 16
"""The most cards that a node on the board may have.

All rows of a board are equally wide, and the cost of rating a node grows with the square of the width: one wide node
would slow down the scoring of every pod."""


class BoardByName:
    """The nodes with cards, by name, on a board. Not thread-safe.

    wide: the nodes with more than WIDTH cards, which are not on the board; the caller judges each by itself.
    """

    def __init__(self) -> None:
        self.board = NodeBoard()
        self.wide: set[str] = set()
        self._row: dict[str, int] = {}
        self._unused: list[int] = []

    def put(self, node: Node, cards: Sequence[CardState], room: CpuMemory) -> None:
        """Add or update the node. room: its free cpu and memory."""
        if not 0 < len(cards) <= WIDTH:
            self.drop(node.name)
            if cards:
                self.wide.add(node.name)
            return
        self.wide.discard(node.name)
        row = self._row.get(node.name)
        if row is None:
            row = self._row[node.name] = self._unused.pop() if self._unused else len(self._row)
        self.board.put(row, class_of(node, cards), *room, free_milli(cards))

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


def extender_scores(names: Sequence[str], keys: Ints) -> list[int]:
    """Return scores for kube-scheduler. It chooses at random among the best nodes, so exactly one node gets 10.

    That is the first by name of the nodes with the highest key. The others get 0 to 4 in proportion to their keys. If
    no node is known to fit, all scores are 0.
    """
    fit = keys != UNFIT
    if not fit.any():
        return [0] * len(names)
    best, least = int(keys.max()), int(keys[fit].min())
    share = _OTHERS * ((keys - least) / (best - least)) if best > least else np.full(len(keys), float(_OTHERS))
    scores: list[int] = np.where(fit, share, 0).astype(np.int64).tolist()
    scores[min(np.flatnonzero(keys == best).tolist(), key=lambda i: names[i])] = HIGHEST
    return scores
