"""Stores as columns what is free on every node, and rates the nodes for a pod. Only changed nodes are rated again.

`NodeBoard` identifies nodes by row number, and `BoardByName`, which `scheduler.decisions.scores` uses, by name.
`playground.simulate.openb` uses `NodeBoard` directly. The ratings come from a `Chooser`, mainly the judges (`Judge`) of
the policies `fragmentation` and `fgd`. A chooser must rate each row independently of the others, because a rating is
cached until its own row changes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.pods import Node
from scheduler.engine.learning.shapes import Ints, NodeClass, NodeRows, Shape, class_of, free_milli
from scheduler.engine.node_fit import HIGHEST

UNFIT = -(2**62)
"""The key of a node that cannot take the pod."""

_MAX_SHAPES = 256  # the most shapes whose keys are cached; with 5,000 nodes the keys of a shape take 40 kB
_SPARE_CLASSES = 64
"""The number of classes, in addition to two for each row, above which unused classes are dropped.

The classes come from the agents, so their number must be limited.
"""


class Chooser(Protocol):
    """Chooses the node and the cards for a pod."""

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        """Return a key for every row, [B]. A higher key is better; the key is UNFIT where the pod does not fit."""

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        """Return the cards for the pod on the only node of `rows`, on which the pod must fit."""


class Judge(Chooser, Protocol):
    """A chooser that can also rate any change of a node."""

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        """Rate the changes of the only node in `before` to each of the states in `after`, [B]; higher is better."""


_NO_NODE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Rating:
    """A judge's task: the keys of the rows of a board for a shape. It can be carried out while the board changes.

    Attributes:
        change: The number of the latest change of the board that the keys include.
        known: The keys, without those of `nodes`.
        nodes: The rows that must be rated.
        states: What is free on these rows.
    """

    judge: Chooser
    shape: Shape
    change: int
    known: Ints
    nodes: Ints
    states: NodeRows

    def keys(self) -> Ints:
        """Return the keys of all rows of the board. This may take long, so call it without a lock."""
        if len(self.nodes):
            self.known[self.nodes] = self.judge.keys(self.states, self.shape)
        return self.known


class NodeBoard:
    """Stores nodes by row number. The caller assigns the numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._class_numbers: dict[NodeClass, int] = {}
        self._class = np.full(0, _NO_NODE, np.int64)
        self._cpu = np.zeros(0, np.int64)
        self._memory = np.zeros(0, np.int64)
        self._changed = np.zeros(0, np.int64)  # the number of the latest change of each row
        self._free = np.zeros((0, 0), np.int64)
        self._changes = 0
        self._judge: Chooser | None = None
        self._keys: OrderedDict[Shape, tuple[int, Ints]] = OrderedDict()  # with the latest change that each includes

    def put(self, row: int, node: NodeClass, cpu: int, memory: int, free: Sequence[int]) -> None:
        """Set the class of the node in `row`, and what is free on it.

        Args:
            cpu: The free CPU, in thousandths of a core.
            memory: The free memory, in bytes.
            free: The free milli of each card.
        """
        self._grow(row + 1, len(free))
        self._class[row] = self._class_numbers.setdefault(node, len(self._class_numbers))
        if len(self._class_numbers) > 2 * len(self._class) + _SPARE_CLASSES:
            self._drop_unused_classes()
        self._cpu[row] = cpu
        self._memory[row] = memory
        self._free[row] = 0
        self._free[row, : len(free)] = free
        self._touch(row)

    def drop(self, row: int) -> None:
        self._class[row] = _NO_NODE
        self._touch(row)

    def rows(self, which: Sequence[int] | Ints) -> NodeRows:
        """Return a copy of these rows. Each of them must hold a node."""
        rows = np.asarray(which, np.int64)
        return NodeRows(
            tuple(self._class_numbers), self._class[rows], self._cpu[rows], self._memory[rows], self._free[rows]
        )

    def keys(self, judge: Chooser, shape: Shape) -> Ints:
        """Return the judge's key of every row, UNFIT where there is no node. The caller may change the array."""
        rating = self.begin_rating(judge, shape)
        keys = rating.keys()
        self.store(rating, keys)
        return keys.copy()

    def begin_rating(self, judge: Chooser, shape: Shape) -> "Rating":
        """Return what the judge needs to compute the keys of all rows. They do not change with the board."""
        if judge is not self._judge:
            self._judge = judge
            self._keys.clear()
        known_change, known = self._keys.get(shape, (0, np.full(0, UNFIT, np.int64)))
        keys = np.full(len(self._class), UNFIT, np.int64)
        keys[: len(known)] = known
        changed = np.flatnonzero(self._changed > known_change)
        keys[changed] = UNFIT
        nodes = changed[self._class[changed] != _NO_NODE]
        return Rating(judge, shape, self._changes, keys, nodes, self.rows(nodes))

    def store(self, rating: "Rating", keys: Ints) -> None:
        """Cache the keys that `rating` returned. Changes since `begin_rating` are rated by the next call."""
        if rating.judge is not self._judge:
            return
        self._keys[rating.shape] = rating.change, keys
        self._keys.move_to_end(rating.shape)
        if len(self._keys) > _MAX_SHAPES:
            self._keys.popitem(last=False)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes whose keys are cached, the most recently used last."""
        return tuple(self._keys)

    def copy(self) -> "NodeBoard":
        """Return a board with the same nodes, but without keys."""
        other = NodeBoard()
        other._class_numbers = dict(self._class_numbers)
        other._changes = self._changes
        for column in ("_class", "_cpu", "_memory", "_changed", "_free"):
            setattr(other, column, getattr(self, column).copy())
        return other

    def adopt(self, other: "NodeBoard") -> None:
        """Take over the keys of a copy of this board. Rows that have changed since `copy` are rated again.

        So the keys of a new judge can be computed on the copy, without the lock that guards this board.
        """
        self._judge = other._judge
        self._keys = other._keys

    def _touch(self, row: int) -> None:
        self._changes += 1
        self._changed[row] = self._changes

    def _drop_unused_classes(self) -> None:
        classes = list(self._class_numbers)
        used = np.unique(self._class[self._class != _NO_NODE])
        new_number = np.full(len(classes) + 1, _NO_NODE, np.int64)
        new_number[used] = np.arange(len(used))
        self._class = new_number[self._class]  # _NO_NODE, which is -1, takes the last element and so stays _NO_NODE
        self._class_numbers = {classes[old]: new for new, old in enumerate(used.tolist())}

    def _grow(self, rows: int, cards: int) -> None:
        present, width = self._free.shape
        if rows <= present and cards <= width:
            return
        more = max(rows, 2 * present) - present if rows > present else 0
        self._class = np.concatenate((self._class, np.full(more, _NO_NODE, np.int64)))
        self._cpu, self._memory, self._changed = (
            np.concatenate((column, np.zeros(more, np.int64))) for column in (self._cpu, self._memory, self._changed)
        )
        free = np.zeros((present + more, max(cards, width)), np.int64)
        free[:present, :width] = self._free
        self._free = free


_HIGHEST_OF_OTHERS = 4
"""The highest score of any node except the best one, which gets 10.

With the recommended weight of 5, a difference of 6 is 300 points in kube-scheduler. That is more than its scores for
the fullness and the balance of CPU and memory together (100 each). It is less than the scores for affinity, taints and
topology spread constraints together, which users specify.
"""

DEMOTION = 2**61
"""Subtracted from the key of a node to rank it after all others, but before nodes that do not fit."""

WIDTH = 16
"""The most cards that a node on the board may have.

All rows of a board are equally wide, and the cost of rating a node grows with the square of the width. So one wide node
would slow down the scoring of every pod."""


class _RowByName(dict[str, int]):
    """The row of each node; -1 for a node that is not on the board."""

    def __missing__(self, name: str) -> int:
        return -1


class BoardByName:
    """A board of the nodes with cards, by name. Not thread-safe.

    Attributes:
        wide: The nodes with more than WIDTH cards. They are not on the board, and the caller rates each by itself.
    """

    def __init__(self) -> None:
        self.board = NodeBoard()
        self.wide: set[str] = set()
        self._row = _RowByName()
        self._unused: list[int] = []

    def put(self, node: Node, cards: Sequence[CardState], free_resources: CpuMemory) -> None:
        """Add or update a node with these cards, and with this much free CPU and memory."""
        if not 0 < len(cards) <= WIDTH:
            self.drop(node.name)
            if cards:
                self.wide.add(node.name)
            return
        self.wide.discard(node.name)
        row = self._row.get(node.name)
        if row is None:
            row = self._row[node.name] = self._unused.pop() if self._unused else len(self._row)
        self.board.put(row, class_of(node, cards), *free_resources, free_milli(cards))

    def drop(self, name: str) -> None:
        self.wide.discard(name)
        row = self._row.pop(name, None)
        if row is not None:
            self.board.drop(row)
            self._unused.append(row)

    def rows(self, names: Sequence[str]) -> Ints:
        """Return the row of each node, and -1 for a node that is not on the board."""
        return np.fromiter(map(self._row.__getitem__, names), np.int64, len(names))


def extender_scores(names: Sequence[str], keys: Ints) -> list[int]:
    """Return scores for kube-scheduler, which chooses at random among the nodes with the highest score.

    So exactly one node gets 10: among the nodes with the highest key, the one with the first name. The other nodes get
    0 to `_HIGHEST_OF_OTHERS` in proportion to their keys. If all keys are UNFIT, all scores are 0.
    """
    fit = keys != UNFIT
    if not fit.any():
        return [0] * len(names)
    best, least = int(keys.max()), int(keys[fit].min())
    share = (
        _HIGHEST_OF_OTHERS * ((keys - least) / (best - least))
        if best > least
        else np.full(len(keys), float(_HIGHEST_OF_OTHERS))
    )
    scores: list[int] = np.where(fit, share, 0).astype(np.int64).tolist()
    scores[min(np.flatnonzero(keys == best).tolist(), key=lambda i: names[i])] = HIGHEST
    return scores
