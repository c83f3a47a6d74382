"""Card policy `fragmentation`: take as little as possible from the pods that are likely to come.

Pods that are hard to place count most. Source: docs/design/fragmentation.md.

Every state of a node has a worth, and a pod is placed where it lowers the worth the least. Sums add whole numbers below
2^53 that are stored as floats. So they are exact, and the same on every machine, in any order and for any number of
nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.engine.card_policy import CardPolicy
from scheduler.engine.learning.card_tables import Cards, Floats, Types, no_cards
from scheduler.engine.learning.expected_pods import ONE, weigh
from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import (
    CARD,
    Bools,
    Ints,
    NodeClass,
    NodeRows,
    Shape,
    card_choices,
    fitting_rows,
    needed_milli,
)
from scheduler.engine.policies.binpack import binpack, fullness

_STEP = ONE // 100
"""Losses in the same step of this size count as equal, and the node with the least left is chosen.

On the traces, 1/200 to 1/25 of `ONE` give similar results."""

_LEFT = 1 << 20
"""More milli than a node has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Classes:
    """Tables of the expected types of pods for C classes of nodes.

    Attributes:
        cards: the tables of the cards.
        base: [C], the first row of the class's cards in `cards`.
        weights: [C], the row of `fit` and `copy` that applies to the class.
        fit: the worth per thousandth of a card where a pod of the type fits.
        copy: the worth per further pod of the type for which there is room.
    """

    cards: Cards
    base: Ints
    weights: Ints
    fit: Floats
    copy: Floats


class Fragmentation:
    """A judge (`node_board.Judge`). The tables for a set of node classes are computed when the set is first seen."""

    def __init__(self, counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> None:
        """counts: as `Learner.counts` returns them. classes: the number of nodes of each class."""
        self._types = Types(weigh(counts, classes))
        self._cards = no_cards(self._types)
        self._classes: dict[tuple[NodeClass, ...], _Classes] = {}
        self._on(tuple(classes))

    def worth(self, rows: NodeRows) -> Ints:
        """Return the worth of every row, [B]. Taking something from a node never raises its worth."""
        return self._worth(rows, self._hosted(rows.cpu, rows.memory))

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        return self.worth(after) - self.worth(before)

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        """Rate each node by the smallest loss of worth, in steps; of equal losses, the fullest node comes first."""
        keys = np.full(len(rows.class_index), UNFIT, np.int64)
        at = fitting_rows(rows, shape, needed_milli(rows, shape))
        if len(at):
            one, of = _distinct(rows.select(at))
            row, _, worths = self._ways(one, shape)
            best = np.maximum.reduceat(worths, np.flatnonzero(np.diff(row, prepend=-1)))
            left = one.free.sum(1) - shape.cards * needed_milli(one, shape)
            keys[at] = (best // _STEP * _LEFT - left)[of]
        return keys

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        _, chosen, worths = self._ways(rows, shape)
        return tuple(np.flatnonzero(chosen[np.argmax(worths)]).tolist())

    def _ways(self, rows: NodeRows, shape: Shape) -> tuple[Ints, Bools, Ints]:
        """Return the ways to place the pod: the row, the cards ([·, cards]) and the change of the worth of each."""
        need = needed_milli(rows, shape)
        row, chosen = card_choices(rows.free, need, shape.cards)
        cpu, memory = rows.cpu - shape.cpu, rows.memory - shape.memory
        after = NodeRows(
            rows.classes, rows.class_index[row], cpu[row], memory[row], rows.free[row] - chosen * need[row, None]
        )
        return row, chosen, self._worth(after, self._hosted(cpu, memory)[row]) - self.worth(rows)[row]

    def _hosted(self, cpu: Ints, memory: Ints) -> Floats:
        """Return how many pods of each type the cpu and memory of each row suffice for, [B, T]."""
        found: Floats = np.minimum(cpu[:, None] / self._types.cpu, memory[:, None] / self._types.memory)
        return np.floor(found, out=found)

    def _worth(self, rows: NodeRows, hosted: Floats) -> Ints:
        """Return the worth of every row, [B].

        It is the sum of what the cards are worth by themselves, of the free capacity that each type can use, and of the
        number of further pods of each type that fit.
        """
        types, on = self._types, self._on(rows.classes)
        at = on.base[rows.class_index][:, None] + np.clip(rows.free, 0, CARD)
        value: Ints = on.cards.value[at].sum(1)
        number, times, usable = np.split(on.cards.room[at].sum(1, dtype=np.float64), 3, axis=1)
        many = np.floor(times[:, types.size] / types.cards) * (number[:, types.size] >= types.cards)
        room = np.minimum(many[:, types.pair], hosted)
        usable = usable[:, types.size][:, types.pair] * (room > 0)
        found: Floats = usable @ on.fit.T + room @ on.copy.T
        return value + found[np.arange(len(found)), on.weights[rows.class_index]].astype(np.int64)

    def _on(self, classes: tuple[NodeClass, ...]) -> _Classes:
        found = self._classes.get(classes)
        if found is None:
            needed = [self._types.needs(node) for node in classes]
            cards = self._cards = self._cards.with_needs(needed, self._types)
            base = np.array([cards.block[row] for row in needed], np.int64)
            found = self._classes[classes] = _Classes(cards, base, *self._types.weights(classes))
        return found


def _distinct(rows: NodeRows) -> tuple[NodeRows, Ints]:
    """Return the distinct rows, and each row's position among them. The order of a node's cards does not matter."""
    if len(rows.class_index) == 1:
        return rows, np.zeros(1, np.int64)
    columns = np.column_stack((rows.class_index, rows.cpu, rows.memory, np.sort(rows.free, axis=1)))
    whole = columns.view(np.dtype((np.void, columns.itemsize * columns.shape[1]))).ravel()
    _, first, of = np.unique(whole, return_index=True, return_inverse=True)
    return rows.select(first), of


POLICY = CardPolicy(binpack, fullness, Fragmentation)
