"""Nodes as arrays: one row per node, one column per card by position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import WHOLE_RATIO, Card, CardState
from mgpu.model.gpu_requests import Rejection
from mgpu.model.pods import Node
from scheduler.engine.card_constraints import Exclusion

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

CORE_FREE, MEMORY_FREE, SHARES, HEALTH, CORE, MEMORY, RATIO_FREE = FIELDS = range(7)
"""Of a card. HEALTH: 0 for a column without a card."""
UNHEALTHY, HEALTHY = 1, 2

ALL_CORE_USED, ALL_MEMORY_USED, ALL_CORE, ALL_MEMORY, COUNT = TOTALS = range(5)
"""Of a node: the sums over its cards, and how many they are."""

WIDTH = 16
"""Columns at most. A node with more cards is odd: were all rows as wide as the widest node, one node could multiply the
memory and the time that every other node costs."""

EXACT = 1 << 53
"""Amounts below this are exact in every number that is made of them here. Nobody has cards of 8 PiB."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class NodeArrays:
    """n nodes. data: fields × n × cards. totals: fields × n.

    exclusion: n × cards, 0 or the key in `exclusions` of why the card is excluded; None where no card is.
    odd: nodes that the arrays cannot hold, by their amounts or the number of their cards. Such a row has no cards here;
    the engine judges the node.
    """

    data: Ints
    totals: Ints
    odd: Mask
    exclusion: Ints | None = None
    exclusions: Mapping[int, Exclusion] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.odd)

    def one_size(self) -> Mask:
        """Where all cards are of one size."""
        alike = [self.data[field] == self.data[field, :, :1] for field in (CORE, MEMORY)]
        return np.asarray((np.logical_and(*alike) | (self.data[HEALTH] == 0)).all(axis=1))

    def key(self, position: int) -> bytes:
        """Equal for nodes whose cards are equal in all that placing looks at, groups apart."""
        excluded = b"" if self.exclusion is None else self.exclusion[position].tobytes()
        return self.data[:, position].tobytes() + self.totals[:, position].tobytes() + excluded

    def cards(self, position: int) -> list[CardState]:
        """The cards of a node that is not odd, without their names, groups and GPUIDs."""
        of_cards = self.data[:, position, : self.totals[COUNT, position]].T.tolist()
        return [
            CardState(
                Card(column, "", "", size, core, health == HEALTHY),
                core - core_free,
                size - free,
                shares,
                ratio_used=WHOLE_RATIO - ratio_free,
            )
            for column, (core_free, free, shares, health, core, size, ratio_free) in enumerate(of_cards)
        ]

    def excluded(self, position: int) -> list[Exclusion | None]:
        """Return for each card of the node why it is excluded, or None."""
        count = self.totals[COUNT, position]
        codes = [0] * count if self.exclusion is None else self.exclusion[position, :count].tolist()
        return [self.exclusions[code] if code else None for code in codes]

    def select(self, positions: Places) -> "NodeArrays":
        """A copy of these."""
        return NodeArrays(
            self.data.take(positions, axis=1),
            self.totals.take(positions, axis=1),
            self.odd.take(positions),
            None if self.exclusion is None else self.exclusion.take(positions, axis=0),
            self.exclusions,
        )


class NodeTable(NamedTuple):
    """Nodes as rows, what each row was made of, and which rows the nodes of one call are.

    at: the row of each of them. unmet: by position among them, why those are out that are not what the ask requires.
    """

    rows: NodeArrays
    nodes: Sequence[Node]
    cards: Sequence[tuple[CardState, ...]]
    at: Places
    unmet: Mapping[int, Rejection]


def described(cards: Sequence[CardState]) -> tuple[Ints, Ints] | None:
    """Return a row's data (fields × cards) and totals; None for an odd node."""
    if len(cards) > WIDTH:
        return None
    table = [
        (s.core_free, s.memory_free, s.shares, 1 + s.card.healthy, s.card.core, s.card.memory, s.ratio_free)
        for s in cards
    ]
    used = [sum(s.core_taken for s in cards), sum(s.memory_taken for s in cards)]
    sizes = [sum(s.card.core for s in cards), sum(s.card.memory for s in cards)]
    if max((*used, *sizes)) >= EXACT or any(s.shares >= EXACT for s in cards):
        return None
    return np.array(table, np.int64).reshape(len(cards), len(FIELDS)).T, np.array([*used, *sizes, len(cards)], np.int64)
