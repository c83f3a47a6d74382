"""The weighed types as arrays, for the classes of some nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.learning.card_values import GRAIN, card_values, grains
from scheduler.engine.learning.node_columns import Ints, milli_or_never
from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, milli_on
from scheduler.engine.learning.weights import ONE, Weighed

Floats = NDArray[np.float64]

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

    def values(self, needs: Sequence[int]) -> Ints:
        """[1001]: what a card with so many milli free is worth."""
        wanted: dict[int, float] = {}
        for members, pair in zip(self.members, self.pair.tolist(), strict=True):
            milli, pods = needs[self.size[pair]], sum(one.number for one in members)
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

    def with_needs(self, needs: Sequence[tuple[int, ...]], types: Types) -> "Cards":
        """The same and blocks for those needs that it has none for."""
        new = sorted(set(needs).difference(self.block))
        if not new:
            return self
        block = dict(self.block)
        for row in new:
            block[row] = len(block) * (CARD + 1)
        room = np.concatenate([self.room, *(_room(row) for row in new)])
        return Cards(block, room, np.concatenate([self.value, *(types.values(row) for row in new)]))


def no_cards(types: Types) -> Cards:
    return Cards({}, np.zeros((0, 3 * len(types.sizes)), np.float32), np.zeros(0, np.int64))


def _room(needs: tuple[int, ...]) -> NDArray[np.float32]:
    free = np.arange(CARD + 1)[:, None]
    times = free // np.array(needs, np.int64)
    return np.concatenate((times > 0, times, free * (times > 0)), axis=1).astype(np.float32)
