"""Nodes as arrays: one row per node, one column per card by position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import CardState
from mgpu.model.pods import Node

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

CORE_FREE, MEMORY_FREE, SHARES, HEALTH, CORE, MEMORY = FIELDS = range(6)
"""Of a card. HEALTH: 0 for a column without a card."""
UNHEALTHY, HEALTHY = 1, 2

ALL_CORE_USED, ALL_MEMORY_USED, ALL_CORE, ALL_MEMORY, COUNT = TOTALS = range(5)
"""Of a node: the sums over its cards, and how many they are."""

EXACT = 1 << 53
"""Amounts below this are exact in every number that is made of them here. Nobody has cards of 8 PiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """n nodes. data: fields × n × cards. totals: fields × n. nodes, cards: what they were made of, at least n.

    bars: n × cards, 0 or the number in `bar_texts` of why the pod's wishes rule the card out; None: no card is out.
    odd: amounts that the arrays cannot hold; such a row has no cards here, and is for the engine to judge.
    """

    data: Ints
    totals: Ints
    odd: Mask
    nodes: Sequence[Node]
    cards: Sequence[tuple[CardState, ...]]
    bars: Ints | None = None
    bar_texts: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.odd)

    def one_size(self) -> Mask:
        """Where all cards are of one size."""
        sizes, has = self.data[[CORE, MEMORY]], self.data[HEALTH] > 0
        return np.asarray(((sizes == sizes[:, :, :1]) | ~has).all(axis=(0, 2)))

    def key(self, position: int) -> bytes:
        """Equal for nodes whose cards are equal in all that placing looks at, groups apart."""
        bars = b"" if self.bars is None else self.bars[position].tobytes()
        return self.data[:, position].tobytes() + self.totals[:, position].tobytes() + bars

    def some(self, positions: Places) -> "Rows":
        """A copy of these."""
        listed = positions.tolist()
        return Rows(
            self.data.take(positions, axis=1),
            self.totals.take(positions, axis=1),
            self.odd.take(positions),
            list(map(self.nodes.__getitem__, listed)),
            list(map(self.cards.__getitem__, listed)),
            None if self.bars is None else self.bars.take(positions, axis=0),
            self.bar_texts,
        )


def described(cards: Sequence[CardState]) -> tuple[Ints, Ints] | None:
    """A row's data (fields × cards) and totals; None: odd."""
    table = [(s.core_free, s.memory_free, s.shares, 1 + s.card.healthy, s.card.core, s.card.memory) for s in cards]
    used = [sum(s.core_used for s in cards), sum(s.memory_used for s in cards)]
    sizes = [sum(s.card.core for s in cards), sum(s.card.memory for s in cards)]
    if max((*used, *sizes)) >= EXACT or any(s.shares >= EXACT for s in cards):
        return None
    return np.array(table, np.int64).reshape(len(cards), len(FIELDS)).T, np.array([*used, *sizes, len(cards)], np.int64)
