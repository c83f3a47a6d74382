"""Ours: the less a placement takes from the pods that are likely to come, above all the hard to place, the better.

A node in any state has a worth, and a pod goes where it lowers that the least. Sums are of whole numbers below 2^53 in
floats, so that they are exact: equal on every machine, in whatever order, for one node as for thousands.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.fragmentation.board import UNFIT
from scheduler.fragmentation.prices import GRAIN, card_values, grains
from scheduler.fragmentation.rows import Ints, Rows, able, milli_or_never, needs, ways
from scheduler.fragmentation.shapes import CARD, NodeClass, Shape
from scheduler.fragmentation.weights import ONE, Types, types_on, weigh

Floats = NDArray[np.float64]

_CARDS = 20
"""How much the values of cards count against the rest. 10 to 40 are alike; without, there is little left of it."""

_STEP = ONE // 100
"""Worths this close are equal, and the node that has the least left is taken. 1/200 to 1/25 are alike."""

_LEFT = 1 << 20
"""More milli than a node has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """For the C node classes of some rows, T types, S sizes of a share and P pairs of a size and a number of cards.

    base: [C] where a class's cards begin in `card` and `value`, which have a row for each number of milli free.
    card: [·, 3 S] for each size whether such a card has room for it, how often, and then the milli free.
    value: [·] worth of such a card. size, cards: [P]; pair, cpu, memory: [T]. fit, copy: [C, T], one row if all are equal.
    """

    types: Types
    base: Ints
    card: NDArray[np.float32]
    value: Ints
    size: Ints
    cards: Floats
    pair: Ints
    cpu: Floats
    memory: Floats
    fit: Floats
    copy: Floats


class Fragmentation:
    """A judge (board.Judge)."""

    def __init__(self, counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> None:
        """counts: as of `Learner.counts`. classes: how many nodes of each; others that come later are judged as well."""
        self._weighed = weigh(counts, classes)
        self._tables: dict[tuple[NodeClass, ...], _Tables] = {}
        self._of(tuple(classes))

    def worth(self, rows: Rows) -> Ints:
        """[B]: what the nodes are worth as they are. It never rises when something is taken from a node."""
        tables = self._of(rows.classes)
        return _worth(tables, rows.kind, _hosted(tables, rows.cpu, rows.memory), rows.free)

    def worths(self, before: Rows, after: Rows) -> Ints:
        return self.worth(after) - self.worth(before)

    def keys(self, rows: Rows, shape: Shape) -> Ints:
        """By the best way's loss in steps, then by what is left on the node."""
        keys = np.full(len(rows.kind), UNFIT, np.int64)
        need = needs(rows, shape)
        at = able(rows, shape, need)
        if len(at):
            one, of = _distinct(rows.some(at))
            row, _, worths = self._ways(one, shape)
            best = np.maximum.reduceat(worths, np.flatnonzero(np.diff(row, prepend=-1)))
            left = one.free.sum(1) - shape.cards * needs(one, shape)
            keys[at] = (best // _STEP * _LEFT - left)[of]
        return keys

    def cards(self, rows: Rows, shape: Shape) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        _, chosen, worths = self._ways(rows, shape)
        return tuple(np.flatnonzero(chosen[np.argmax(worths)]).tolist())

    def _ways(self, rows: Rows, shape: Shape) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """Ways to take the pod: (row, cards [·, cards], what the node's worth changes by) of each."""
        tables = self._of(rows.classes)
        need = needs(rows, shape)
        row, chosen = ways(rows.free, need, shape.cards)
        free = rows.free[row] - chosen * need[row, None]
        hosted = _hosted(tables, rows.cpu - shape.cpu, rows.memory - shape.memory)
        return row, chosen, _worth(tables, rows.kind[row], hosted[row], free) - self.worth(rows)[row]

    def _of(self, classes: tuple[NodeClass, ...]) -> _Tables:
        tables = self._tables.get(classes)
        if tables is None:
            tables = self._tables[classes] = _tables(types_on(self._weighed, classes), classes)
        return tables


def _hosted(tables: _Tables, cpu: Ints, memory: Ints) -> Floats:
    """[B, T]: for how many pods of each type there is cpu and memory."""
    return np.floor(np.minimum(cpu[:, None] / tables.cpu, memory[:, None] / tables.memory))


def _worth(tables: _Tables, kind: Ints, hosted: Floats, free: Ints) -> Ints:
    """[B]. What cards have free where a type fits, the room for more of it, and the cards' own values."""
    at = tables.base[kind][:, None] + np.clip(free, 0, CARD)
    value: Ints = tables.value[at].sum(1)
    if not tables.types.shapes:
        return value
    number, times, usable = np.split(tables.card[at].sum(1), 3, axis=1)
    many = np.floor(times[:, tables.size] / tables.cards) * (number[:, tables.size] >= tables.cards)
    room = np.minimum(many[:, tables.pair], hosted)
    usable = usable[:, tables.size][:, tables.pair] * (room > 0)
    if len(tables.fit) == 1:
        return value + (usable @ tables.fit[0] + room @ tables.copy[0]).astype(np.int64)
    found: Floats = np.einsum("bt,bt->b", usable, tables.fit[kind]) + np.einsum("bt,bt->b", room, tables.copy[kind])
    return value + found.astype(np.int64)


def _distinct(rows: Rows) -> tuple[Rows, Ints]:
    """The rows without repetition, and which of them each row is. The order of a node's cards does not matter."""
    if len(rows.kind) == 1:
        return rows, np.zeros(1, np.int64)
    columns = np.column_stack((rows.kind, rows.cpu, rows.memory, np.sort(rows.free, axis=1)))
    whole = columns.view(np.dtype((np.void, columns.itemsize * columns.shape[1]))).ravel()
    _, first, of = np.unique(whole, return_index=True, return_inverse=True)
    return rows.some(first), of


def _tables(types: Types, classes: tuple[NodeClass, ...]) -> _Tables:
    sizes = sorted({(shape.core, shape.card_memory) for shape in types.shapes})
    pairs = sorted({(sizes.index((shape.core, shape.card_memory)), shape.cards) for shape in types.shapes})
    size_of = [sizes.index((shape.core, shape.card_memory)) for shape in types.shapes]
    needed = [tuple(milli_or_never(Shape(0, 0, 1, *size), node) for size in sizes) for node in classes]
    different = sorted(set(needed))
    demand = [shape.cards * number for shape, number in zip(types.shapes, types.number, strict=True)]
    plain = (types.fit == types.fit[:1]).all() and (types.copy == types.copy[:1]).all()
    kept = slice(1) if plain else slice(None)
    return _Tables(
        types,
        np.array([different.index(row) * (CARD + 1) for row in needed], np.int64),
        np.concatenate([_cards(row) for row in different] or [np.zeros((0, 0), np.float32)]),
        np.concatenate([_values([row[s] for s in size_of], demand) for row in different] or [np.zeros(0, np.int64)]),
        np.array([size for size, _ in pairs], np.int64),
        np.array([cards for _, cards in pairs], np.float64),
        np.array([pairs.index((s, shape.cards)) for s, shape in zip(size_of, types.shapes, strict=True)], np.int64),
        np.array([max(shape.cpu, 1) for shape in types.shapes], np.float64),
        np.array([max(shape.memory, 1) for shape in types.shapes], np.float64),
        types.fit[kept],
        types.copy[kept],
    )


def _cards(needed: tuple[int, ...]) -> NDArray[np.float32]:
    """[1001, 3 S]: see _Tables.card."""
    free = np.arange(CARD + 1)[:, None]
    times = free // np.array(needed, np.int64)
    return np.concatenate((times > 0, times, free * (times > 0)), axis=1).astype(np.float32)


def _values(needed: list[int], demand: list[float]) -> Ints:
    """[1001]: what a card with so much free is worth, when each type needs so many milli and is asked for so often."""
    wanted: dict[int, float] = {}
    for milli, many in zip(needed, demand, strict=True):
        if milli <= CARD:
            wanted[grains(milli)] = wanted.get(grains(milli), 0.0) + many
    values = np.rint(_CARDS * ONE * card_values(wanted)).astype(np.int64)
    return values[np.arange(CARD + 1) // GRAIN]
