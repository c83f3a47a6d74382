"""Rates the states of thousands of nodes for the policies `fragmentation` and `fgd`.

What must hold: the rating of a state depends on nothing but the state and the pod, because `node_board` caches it.

Most of the work does not depend on the cards, or is the same for many states. So equal states are rated once, and
states of one kind of nodes are rated in blocks, sorted by CPU and memory. `kind_tables` computes the worth of a block.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from scheduler.engine.learning.kind_tables import Floats, HostedStates, Hosting, KindTables, runs
from scheduler.engine.learning.shapes import (
    NEVER,
    Bools,
    Ints,
    NodeClass,
    NodeRows,
    Shape,
    card_choices,
    fullest_cards,
    needed_milli,
)

_STATES_PER_BLOCK = 256
"""The most states that are rated at a time, so that the arrays stay in the processor's cache.

Blocks of 128 to 512 states take about as long."""

_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, 64)], np.uint64).astype(np.int64)
"""Odd numbers that look random. A board has fewer columns."""


class Types(Protocol):
    """T types of pods with their weights."""

    @property
    def cards(self) -> Ints:
        """The number of cards that a pod of the type requests, [T]."""

    def milli(self, node: NodeClass) -> tuple[int, ...]:
        """Return how many milli of a card of such a node each type takes, [T]; NEVER if the card is too small."""

    def weights(self, node: NodeClass) -> Floats:
        """Return the fit weights, for each milli, and the copy weights on such a node, [2, T]."""

    def card_values(self, milli: Sequence[int]) -> Ints:
        """Return the value of a card by its free milli, [1001], on nodes with this result of `milli`."""

    def hosting(self, order: Ints) -> Hosting:
        """Return the `Hosting` for the types in this order."""


class StateRating:
    """Rates states for these types. The tables of a class of nodes are computed when the class is first seen."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._kind_of_class: dict[NodeClass, KindTables] = {}
        self._kinds: dict[tuple[tuple[int, ...], bytes], KindTables] = {}
        self._card_values: dict[tuple[int, ...], Ints] = {}

    def worth(self, rows: NodeRows) -> Ints:
        """Return the worth of every row, [B]."""
        worth = np.zeros(len(rows.class_index), np.int64)
        for kind, at in self._groups(rows, np.zeros_like(rows.class_index)):
            for block in _blocks(at):
                worth[block] = kind.worth(_states(kind, rows.cpu[block], rows.memory[block]), rows.free[block])
        return worth

    def best_changes(self, rows: NodeRows, shape: Shape, need: Ints) -> Ints:
        """Return the best change of the worth that the pod causes on each row, [B]. The pod must fit on all rows.

        A pod that requests several cards, or none, gets the fullest cards.

        Args:
            need: The result of `needed_milli`.
        """
        if not len(need):
            return need
        first, position = _distinct(rows)
        rows, need = rows.select(first), need[first]
        if shape.cards == 1:
            return self._changes_of_share(rows, shape, need)[position]
        chosen = fullest_cards(rows.free, rows.free >= need[:, None], shape.cards)
        return (self.worth(_with_pod(rows, shape, chosen * need[:, None])) - self.worth(rows))[position]

    def choices(self, node: NodeRows, shape: Shape) -> tuple[Bools, Ints]:
        """Return the choices of cards on the only node of `node`, on which the pod must fit.

        Returns:
            The cards of each choice, [choices, cards of the node], and the change of the worth, [choices].
        """
        need = needed_milli(node, shape)
        row, chosen = card_choices(node.free, need, shape.cards)
        return chosen, self.worth(_with_pod(node.select(row), shape, chosen * need)) - self.worth(node)

    def _changes_of_share(self, rows: NodeRows, shape: Shape, need: Ints) -> Ints:
        best = np.zeros(len(need), np.int64)
        for kind, at in self._groups(rows, need):
            share = kind.share(int(need[at[0]]), rows.free[at])
            for block in _blocks(at):
                cpu, memory = rows.cpu[block], rows.memory[block]
                before = after = _states(kind, cpu, memory)
                if shape.cpu or shape.memory:
                    after = _states(kind, cpu - shape.cpu, memory - shape.memory)
                best[block] = kind.changes(share, before, after, rows.free[block]).max(1)
        return best

    def _kind_of(self, node: NodeClass) -> KindTables:
        kind = self._kind_of_class.get(node)
        if kind is None:
            types, milli, weights = self._types, self._types.milli(node), self._types.weights(node)
            if milli not in self._card_values:
                self._card_values[milli] = types.card_values(milli)
            key = milli, weights.tobytes()
            if key not in self._kinds:
                sizes, values = np.array(milli, np.int64), self._card_values[milli]
                self._kinds[key] = KindTables(types.cards, sizes, weights, values, types.hosting)
            kind = self._kind_of_class[node] = self._kinds[key]
        return kind

    def _groups(self, rows: NodeRows, need: Ints) -> Iterator[tuple[KindTables, Ints]]:
        """Yield the rows of each kind of nodes where the pod takes the same milli, sorted by CPU and memory."""
        if len(need) == 1:
            yield self._kind_of(rows.classes[rows.class_index[0]]), np.zeros(1, np.int64)
            return
        kinds = [self._kind_of(node) for node in rows.classes]
        number_of = {kind: number for number, kind in enumerate(kinds)}
        group = np.array([number_of[kind] for kind in kinds], np.int64)[rows.class_index] * (NEVER + 1) + need
        order = np.lexsort((rows.memory, rows.cpu, group))
        ends = [*(np.flatnonzero(np.diff(group[order])) + 1).tolist(), len(order)]
        for start, end in pairwise((0, *ends)):
            at = order[start:end]
            yield kinds[group[at[0]] // (NEVER + 1)], at


def _blocks(at: Ints) -> Iterator[Ints]:
    return (at[start : start + _STATES_PER_BLOCK] for start in range(0, len(at), _STATES_PER_BLOCK))


def _states(kind: KindTables, cpu: Ints, memory: Ints) -> HostedStates:
    """Return states with this free CPU and memory, of which equal pairs must be next to one another."""
    first, pair = runs(np.stack((cpu, memory), axis=1))
    return HostedStates(kind.hosting(cpu[first], memory[first]), pair)


def _with_pod(rows: NodeRows, shape: Shape, taken: Ints) -> NodeRows:
    return NodeRows(rows.classes, rows.class_index, rows.cpu - shape.cpu, rows.memory - shape.memory, rows.free - taken)


def _distinct(rows: NodeRows) -> tuple[Ints, Ints]:
    """Return the first row of each state, and the position of each row's state. The order of cards does not matter."""
    if len(rows.cpu) == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    columns = np.column_stack((rows.class_index, rows.cpu, rows.memory, np.sort(rows.free, axis=1)))
    # Numbers are sorted ten times as fast as rows. If two states got the same number, all rows count as distinct.
    numbers = columns @ _FACTORS[: columns.shape[1]]
    _, first, position = np.unique(numbers, return_index=True, return_inverse=True)
    if len(first) == len(columns) or (columns != columns[first[position]]).any():
        first = position = np.arange(len(columns))
    return first, position
