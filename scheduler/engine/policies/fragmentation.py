"""Card and node policy `fragmentation`: take as little as possible from the pods that are likely to come.

docs/design/fragmentation.md, "The algorithm", describes the idea and the measurements. Settings and pods select the
policy by name. `playground.simulate.openb` uses `Fragmentation` directly.

Every state of a node has a worth, and a pod is placed where it lowers the worth the least. The worth of a node is the
sum of

- the value of each of its cards (`card_tables`),
- for every expected type of pod that fits now, the free milli (thousandths of a card) that the type can use, times the
  type's fit weight,
- for every expected type, the number of pods of the type for which there is capacity, times the type's copy weight.

The fewer nodes a type fits, the larger are its weights (`expected_pods`). If only the number of pods counted, pods that
fit every node would crowd out pods that fit few nodes.

Two things must hold. Taking something from a node never raises its worth, because no summand grows when less is free.
The sums are exact, because they add whole numbers below 2^53 that are stored as floats. So they are the same on every
machine, in any order and for any number of nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.engine.card_policy import CardPolicy
from scheduler.engine.learning.card_tables import CardTables, Floats, PodTypes, empty_card_tables
from scheduler.engine.learning.expected_pods import ONE, weigh_types
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

_LOSS_STEP = ONE // 100
"""Losses in the same step of this size count as equal. Among such nodes, the one with the least free milli is chosen.

On the traces, 1/200 to 1/25 of `ONE` give similar results."""

_MILLI_PER_LOSS_STEP = 1 << 20
"""A number larger than the milli of any node, so that keys compare losses before they compare what is left."""


@dataclass(frozen=True, slots=True, eq=False)
class _ClassTables:
    """The tables of T expected types of pods for C classes of nodes.

    The dimensions of arrays are given in brackets, as in `learning.shapes`. There, B is the number of rows.

    Attributes:
        cards: The tables of the cards.
        first_row: [C], the first row of the class's cards in `cards`.
        weight_row: [C], the row of `fit_weights` and `copy_weights` that applies to the class.
        fit_weights: [·, T], the worth of each usable milli where a pod of the type fits.
        copy_weights: [·, T], the worth of capacity for one more pod of the type.
    """

    cards: CardTables
    first_row: Ints
    weight_row: Ints
    fit_weights: Floats
    copy_weights: Floats


class Fragmentation:
    """A judge (`node_board.Judge`). The tables for a set of node classes are computed when the set is first seen."""

    def __init__(self, counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> None:
        """Create a judge for pods such as those that were counted.

        Args:
            counts: The result of `Learner.counts`.
            classes: The number of nodes of each class.
        """
        self._types = PodTypes(weigh_types(counts, classes))
        self._cards = empty_card_tables(self._types)
        self._tables: dict[tuple[NodeClass, ...], _ClassTables] = {}
        self._tables_for(tuple(classes))

    def worth(self, rows: NodeRows) -> Ints:
        """Return the worth of every row, [B]."""
        return self._worth(rows, self._pods_hosted(rows.cpu, rows.memory))

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        return self.worth(after) - self.worth(before)

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        """Rate each node by its smallest loss of worth, in steps; among equal losses the fullest node comes first."""
        keys = np.full(len(rows.class_index), UNFIT, np.int64)
        fitting = fitting_rows(rows, shape, needed_milli(rows, shape))
        if len(fitting):
            distinct, position = _distinct(rows.select(fitting))
            row, _, changes = self._rate_choices(distinct, shape)
            best = np.maximum.reduceat(changes, np.flatnonzero(np.diff(row, prepend=-1)))
            left = distinct.free.sum(1) - shape.cards * needed_milli(distinct, shape)
            keys[fitting] = (best // _LOSS_STEP * _MILLI_PER_LOSS_STEP - left)[position]
        return keys

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        _, chosen, changes = self._rate_choices(rows, shape)
        return tuple(np.flatnonzero(chosen[np.argmax(changes)]).tolist())

    def _rate_choices(self, rows: NodeRows, shape: Shape) -> tuple[Ints, Bools, Ints]:
        """Return for each choice of cards its row, its cards ([·, cards of the node]) and the change of the worth."""
        need = needed_milli(rows, shape)
        row, chosen = card_choices(rows.free, need, shape.cards)
        cpu, memory = rows.cpu - shape.cpu, rows.memory - shape.memory
        free = rows.free[row] - chosen * need[row, None]
        after = NodeRows(rows.classes, rows.class_index[row], cpu[row], memory[row], free)
        return row, chosen, self._worth(after, self._pods_hosted(cpu, memory)[row]) - self.worth(rows)[row]

    def _pods_hosted(self, cpu: Ints, memory: Ints) -> Floats:
        """Return how many pods of each type the cpu and memory of each row suffice for, [B, T]."""
        hosted: Floats = np.minimum(cpu[:, None] / self._types.cpu, memory[:, None] / self._types.memory)
        return np.floor(hosted, out=hosted)

    def _worth(self, rows: NodeRows, hosted: Floats) -> Ints:
        types, tables = self._types, self._tables_for(rows.classes)
        card_row = tables.first_row[rows.class_index][:, None] + np.clip(rows.free, 0, CARD)
        value: Ints = tables.cards.value[card_row].sum(1)
        # For each size of a share: how many cards have capacity for at least one share, for how many shares all cards
        # have capacity, and how many milli are free on the cards that have capacity.
        cards, shares, usable = np.split(tables.cards.capacity[card_row].sum(1, dtype=np.float64), 3, axis=1)
        copies = np.floor(shares[:, types.pair_size] / types.pair_cards) * (
            cards[:, types.pair_size] >= types.pair_cards
        )
        copies = np.minimum(copies[:, types.pair], hosted)
        usable = usable[:, types.pair_size][:, types.pair] * (copies > 0)
        for_types: Floats = usable @ tables.fit_weights.T + copies @ tables.copy_weights.T
        return value + for_types[np.arange(len(for_types)), tables.weight_row[rows.class_index]].astype(np.int64)

    def _tables_for(self, classes: tuple[NodeClass, ...]) -> _ClassTables:
        tables = self._tables.get(classes)
        if tables is None:
            kinds = [self._types.milli_of_sizes(node) for node in classes]
            cards = self._cards = self._cards.with_kinds(kinds, self._types)
            first_row = np.array([cards.first_row[kind] for kind in kinds], np.int64)
            tables = self._tables[classes] = _ClassTables(cards, first_row, *self._types.weights(classes))
        return tables


def _distinct(rows: NodeRows) -> tuple[NodeRows, Ints]:
    """Return the distinct rows, and each row's position among them. The order of a node's cards does not matter."""
    if len(rows.class_index) == 1:
        return rows, np.zeros(1, np.int64)
    columns = np.column_stack((rows.class_index, rows.cpu, rows.memory, np.sort(rows.free, axis=1)))
    bytes_of_rows = columns.view(np.dtype((np.void, columns.itemsize * columns.shape[1]))).ravel()
    _, first, position = np.unique(bytes_of_rows, return_index=True, return_inverse=True)
    return rows.select(first), position


POLICY = CardPolicy(binpack, fullness, Fragmentation)
