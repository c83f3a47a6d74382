"""Stores nodes as arrays: one row for each node, and one column for each of its cards.

`scheduler.cluster.arrays` keeps the arrays up to date and creates a `NodeTable` for each call. The arrays of a table
never change. A node that the arrays cannot represent exactly is called odd. It has no cards in the arrays, and the
engine evaluates it by itself.

In the shapes of arrays, n is the number of nodes, `cards` the number of columns, and `fields` the number of constants
such as CORE_FREE.
"""

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

CORE_FREE, MEMORY_FREE, SHARES, HEALTH, CORE, MEMORY, RATIO_FREE, MINOR = FIELDS = range(8)
"""The fields of a card, in the units of `CardState`.

The value of HEALTH is UNHEALTHY or HEALTHY, or 0 for a column without a card. MINOR is used only for the key of a row:
on a node with other minors, the policy `minor` may choose another card, which leads to another score.
"""
UNHEALTHY, HEALTHY = 1, 2

ALL_CORE_USED, ALL_MEMORY_USED, ALL_CORE, ALL_MEMORY, COUNT = TOTALS = range(5)
"""The fields of a node: sums over its cards, and the number of cards."""

WIDTH = 16
"""The largest number of columns. A node with more cards is odd.

All rows are equally wide, so one node with many cards would multiply the memory and the time that all nodes cost.
"""

EXACT = 1 << 53
"""Calculations with amounts below this number are exact even with floats. No card has 8 PiB of memory."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class NodeArrays:
    """The cards of n nodes.

    Attributes:
        data: [fields, n, cards], the fields of each card.
        totals: [fields, n], the fields of each node.
        odd: [n], whether the arrays cannot represent the node, because of its amounts or the number of its cards.
        exclusion: [n, cards], the key in `exclusions` of the reason why the card is excluded for the pod, or 0 if it is
            not; None if no card is excluded.
        exclusions: The reasons why cards are excluded.
    """

    data: Ints
    totals: Ints
    odd: Mask
    exclusion: Ints | None = None
    exclusions: Mapping[int, Exclusion] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.odd)

    def one_size(self) -> Mask:
        """Return which nodes have cards of one size only."""
        equal = [self.data[field] == self.data[field, :, :1] for field in (CORE, MEMORY)]
        return np.asarray((np.logical_and(*equal) | (self.data[HEALTH] == 0)).all(axis=1))

    def key(self, position: int) -> bytes:
        """Return a key of the row. The engine has one answer for rows with equal keys, unless groups matter."""
        excluded = b"" if self.exclusion is None else self.exclusion[position].tobytes()
        return self.data[:, position].tobytes() + self.totals[:, position].tobytes() + excluded

    def cards(self, position: int) -> list[CardState]:
        """Return the cards of a node that is not odd, as far as the arrays contain them.

        The index of a card is its column. UUID, model, NUMA node, minor, groups and GPUID are missing.
        """
        of_cards = self.data[:, position, : self.totals[COUNT, position]].T.tolist()
        return [
            CardState(
                Card(column, "", "", size, core, health == HEALTHY),
                core - core_free,
                size - free,
                shares,
                ratio_used=WHOLE_RATIO - ratio_free,
            )
            for column, (core_free, free, shares, health, core, size, ratio_free, _) in enumerate(of_cards)
        ]

    def excluded(self, position: int) -> list[Exclusion | None]:
        count = self.totals[COUNT, position]
        codes = [0] * count if self.exclusion is None else self.exclusion[position, :count].tolist()
        return [self.exclusions[code] if code else None for code in codes]

    def select(self, positions: Places) -> "NodeArrays":
        return NodeArrays(
            self.data.take(positions, axis=1),
            self.totals.take(positions, axis=1),
            self.odd.take(positions),
            None if self.exclusion is None else self.exclusion.take(positions, axis=0),
            self.exclusions,
        )


class NodeTable(NamedTuple):
    """Arrays of nodes, the objects from which they were made, and the rows of the nodes of one call.

    Attributes:
        rows: The arrays, of all nodes or of those of the call.
        rows_of_names: The row of each node of the call.
        nodes: Each node, by its place.
        cards: The cards of each node, by its place.
        places: The place of each node of the call.
        unmet: By position in the call, the rejections of the nodes that do not meet a requirement of the request.
    """

    rows: NodeArrays
    rows_of_names: Places
    nodes: Sequence[Node]
    cards: Sequence[tuple[CardState, ...]]
    places: Places
    unmet: Mapping[int, Rejection]

    def compact(self) -> "NodeTable":
        """Return a table with the rows of the call only, in its order."""
        return self._replace(rows=self.rows.select(self.rows_of_names), rows_of_names=np.arange(len(self.places)))


def table_row(cards: Sequence[CardState]) -> tuple[Ints, Ints] | None:
    """Return the data, [fields, cards], and the totals, [fields], of a node's row; None for an odd node."""
    if len(cards) > WIDTH:
        return None
    table = [
        (s.core_free, s.memory_free, s.shares, 1 + s.card.healthy, s.card.core, s.card.memory, s.ratio_free, _minor(s))
        for s in cards
    ]
    used = [sum(s.core_taken for s in cards), sum(s.memory_taken for s in cards)]
    sizes = [sum(s.card.core for s in cards), sum(s.card.memory for s in cards)]
    if max((*used, *sizes)) >= EXACT or any(s.shares >= EXACT for s in cards):
        return None
    return np.array(table, np.int64).reshape(len(cards), len(FIELDS)).T, np.array([*used, *sizes, len(cards)], np.int64)


def _minor(state: CardState) -> int:
    return state.card.index if state.card.minor is None else state.card.minor
