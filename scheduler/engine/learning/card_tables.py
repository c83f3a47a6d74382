"""Tables of what cards are worth to the expected pods: the values of free parts, and the weighed types as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.learning.expected_pods import ONE, Weighed
from scheduler.engine.learning.shapes import CARD, Ints, NodeClass, Shape, milli_on, milli_or_never

Floats = NDArray[np.float64]

GRAIN = 10
"""Milli: finer takes ten times as long, and the traces' shares are whole grains."""

_WHOLE = CARD // GRAIN
_ROUNDS = 1000  # the traces' shares need 30 to 60
_TINY = 1e-9


def grains(milli: int) -> int:
    """A share in grains: rounded up, but so that no fewer of them fill a card (333 milli are 33 grains, not 34)."""
    return max(1, min(-(-milli // GRAIN), _WHOLE // (CARD // milli)))


def card_values(demand: Mapping[int, float]) -> Floats:
    """[101]: what a card with so many grains free is worth; a whole one 1.

    demand: share in grains → how many are asked for. A free part is worth the most that shares put into it can be at
    their `prices`: 190 milli are worth little where nobody asks for less.
    """
    if not demand:
        return np.array([0.0] * _WHOLE + [1.0])
    sizes = sorted(demand)
    values = np.array(_filled(sizes, prices(sizes, [demand[size] for size in sizes]))[0])
    values[-1] = max(values[-1], 1.0)
    return values


def prices(sizes: list[int], wanted: list[float]) -> list[float]:
    """What one share of each size adds to the number of cards that all of them need; no card's fill costs over 1.

    The duals of the cutting-stock problem, by column generation (Gilmore and Gomory 1961): some fillings, as many as
    sizes, serve the demand; at the prices at which each of them costs 1 the dearest filling takes the place of the one
    that it uses up first, until none costs more than 1. Cheap approximations lose 0.05 to 0.3 points.
    """
    demand, fillings = np.array(wanted), np.diag([float(_WHOLE // size) for size in sizes])
    best, most = np.array(sizes) / _WHOLE, 0.0
    for _ in range(_ROUNDS):
        price = np.maximum(np.linalg.solve(fillings.T, np.ones(len(sizes))), 0.0)
        worth, filling = _filled(sizes, price.tolist())
        proven = float(demand @ price) / worth[-1]
        if proven > most:
            best, most = price / worth[-1], proven
        if worth[-1] <= 1 + _TINY:
            break
        cards, instead = np.linalg.solve(fillings, np.stack((demand, filling), axis=1)).T
        last = np.where(instead > _TINY, cards / np.maximum(instead, _TINY), np.inf)
        fillings[:, np.argmin(last)] = filling
    found: list[float] = best.tolist()
    return found


def _filled(sizes: list[int], price: list[float]) -> tuple[list[float], Floats]:
    """Each free part's best worth, [101], and how many of each size the best filling of a whole card has."""
    worth, last = [0.0] * (_WHOLE + 1), [-1] * (_WHOLE + 1)
    for i, (size, value) in enumerate(zip(sizes, price, strict=True)):
        for free in range(size, _WHOLE + 1):
            with_it = worth[free - size] + value
            if with_it > worth[free]:
                worth[free], last[free] = with_it, i
    filling, free = np.zeros(len(sizes)), _WHOLE
    while last[free] >= 0:
        filling[last[free]] += 1
        free -= sizes[last[free]]
    return worth, filling


_CARDS = 20
"""How much the values of cards count against the rest. 10 to 40 are alike on the traces."""


class Types:
    """T columns: types that differ in their models only share one. S sizes of a share, P pairs of size and number.

    size, cards: [P]; pair, cpu, memory: [T]. cpu and memory are at least 1, to be divided by.
    """

    def __init__(self, weighed: Sequence[Weighed]) -> None:
        merged: dict[Shape, list[Weighed]] = {}
        for one in weighed:
            merged.setdefault(one.shape._replace(models=()), []).append(one)
        self.shapes, self.members = tuple(merged), tuple(merged.values())
        self.sizes = sorted({(shape.core, shape.card_memory) for shape in merged})
        size = [self.sizes.index((shape.core, shape.card_memory)) for shape in merged]
        pairs = sorted({(s, shape.cards) for s, shape in zip(size, merged, strict=True)})
        self.size = np.array([s for s, _ in pairs], np.int64)
        self.cards = np.array([cards for _, cards in pairs], np.float64)
        self.pair = np.array([pairs.index((s, shape.cards)) for s, shape in zip(size, merged, strict=True)], np.int64)
        self.cpu = np.array([max(shape.cpu, 1) for shape in merged], np.float64)
        self.memory = np.array([max(shape.memory, 1) for shape in merged], np.float64)
        self._known: dict[NodeClass, Floats] = {}

    def needs(self, node: NodeClass) -> tuple[int, ...]:
        """[S]: milli of each size on such a node's cards, NEVER where they are too small."""
        return tuple(milli_or_never(Shape(0, 0, 1, *size), node) for size in self.sizes)

    def weights(self, classes: Sequence[NodeClass]) -> tuple[Ints, Floats, Floats]:
        """fit (per milli) and copy: [W, T], 0 where no type of the column may run; and [classes] which row holds."""
        rows = [self._weights_on(node) for node in classes]
        different = {row.tobytes(): row for row in rows}
        position = {key: w for w, key in enumerate(different)}
        both = np.array(list(different.values())).reshape(len(different), 2, len(self.shapes))
        return np.array([position[row.tobytes()] for row in rows], np.int64), both[:, 0], both[:, 1]

    def _weights_on(self, node: NodeClass) -> Floats:
        """[2, T]: a node's class comes in many sets of classes, and in a set of its own when its cards are chosen."""
        found = self._known.get(node)
        if found is None:
            here = [[one for one in members if milli_on(one.shape, node) is not None] for members in self.members]
            fit = [round(sum(one.fit for one in members) / CARD) for members in here]
            copy = [round(sum(one.copy for one in members)) for members in here]
            found = self._known[node] = np.array((fit, copy), np.float64)
        return found

    def values(self, needed_milli: Sequence[int]) -> Ints:
        """[1001]: what a card with so many milli free is worth."""
        wanted: dict[int, float] = {}
        for members, pair in zip(self.members, self.pair.tolist(), strict=True):
            milli, pods = needed_milli[self.size[pair]], sum(one.number for one in members)
            if milli <= CARD:
                wanted[grains(milli)] = wanted.get(grains(milli), 0.0) + members[0].shape.cards * pods
        values = np.rint(_CARDS * ONE * card_values(wanted)).astype(np.int64)
        return values[np.arange(CARD + 1) // GRAIN]


@dataclass(frozen=True, slots=True, eq=False)
class Cards:
    """For each kind of card, by what the sizes need of it, a block of 1001 rows: one per milli that may be free.

    block: needs → where its rows begin. room: [·, 3 S] for each size whether such a card has room for it, for how many,
    and then the milli free. value: [·] what the card is worth by itself.
    """

    block: Mapping[tuple[int, ...], int]
    room: NDArray[np.float32]
    value: Ints

    def with_needs(self, needed_milli: Sequence[tuple[int, ...]], types: Types) -> "Cards":
        """The same and blocks for those needs that it has none for."""
        new = sorted(set(needed_milli).difference(self.block))
        if not new:
            return self
        block = dict(self.block)
        for row in new:
            block[row] = len(block) * (CARD + 1)
        room = np.concatenate([self.room, *(_room(row) for row in new)])
        return Cards(block, room, np.concatenate([self.value, *(types.values(row) for row in new)]))


def no_cards(types: Types) -> Cards:
    return Cards({}, np.zeros((0, 3 * len(types.sizes)), np.float32), np.zeros(0, np.int64))


def _room(needed_milli: tuple[int, ...]) -> NDArray[np.float32]:
    free = np.arange(CARD + 1)[:, None]
    times = free // np.array(needed_milli, np.int64)
    return np.concatenate((times > 0, times, free * (times > 0)), axis=1).astype(np.float32)
