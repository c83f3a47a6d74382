"""Card and node policy `fgd`: fragmentation gradient descent as published, for comparison with `fragmentation`.

Source: Weng et al., "Beware of Fragmentation" (USENIX ATC'23); docs/design/fragmentation.md, "FGD as published". The
policy must stay as published, even where `fragmentation` is better. All sums add integers that are stored as floats,
and stay below 2^53. So they are exact, and the same on every machine and in any order. Settings and pods select the
policy by name. `playground.simulate.openb` uses `Fgd` directly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.card_policy import CardPolicy
from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import (
    Bools,
    Ints,
    NodeClass,
    NodeRows,
    Shape,
    card_choices,
    fitting_rows,
    milli_per_card,
    milli_per_card_or_never,
    needed_milli,
)
from scheduler.engine.policies.binpack import binpack, fullness

Floats = NDArray[np.float64]

_PERCENT_OF_PODS = 95
_MAX_TYPES = 256
"""The maximum number of typical pods, as in the policy `fragmentation`.

The openb traces (docs/policies.md) have 151.
"""
_SCORE_STEPS = np.array([1000 * log(k / (100 - k)) for k in range(1, 100)])
"""The thresholds of the score: int(100 · sigmoid(x / 1000)) is the number of thresholds that are at most x."""


@dataclass(frozen=True, slots=True)
class TypicalPod:
    """A shape and its count. `shape.memory` is 0, because FGD ignores the memory of nodes."""

    shape: Shape
    number: int


def typical_pods(counts: Mapping[Shape, int], percent: int = _PERCENT_OF_PODS) -> tuple[TypicalPod, ...]:
    """Return the most frequent shapes, as many as are needed to make up `percent` of all pods.

    Of equally frequent shapes the larger comes first. There are at most `_MAX_TYPES`, because the work for each pod and
    node grows with their number, and tenants decide how many different shapes there are.
    """
    merged: dict[Shape, int] = {}
    for shape, number in counts.items():
        key = shape._replace(memory=0)
        merged[key] = merged.get(key, 0) + number
    order = sorted(merged, key=lambda s: (merged[s], s.cpu, s.core, s.cards, s.card_memory, s.models), reverse=True)
    typical: list[TypicalPod] = []
    covered = 0
    for shape in order:
        if 100 * covered >= percent * sum(merged.values()) or len(typical) == _MAX_TYPES:
            break
        typical.append(TypicalPod(shape, merged[shape]))
        covered += merged[shape]
    return tuple(typical)


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """What T typical pods that request cards need on C classes of nodes. Their shares have G different sizes.

    Attributes:
        milli: [C, G], the thousandths of a card that a share of this size takes on a node of the class.
        size_index: [T], the position of the pod's size in `milli`.
        allowed: [C, T], whether the pod may run on the class.
    """

    milli: Ints
    size_index: Ints
    allowed: Bools


class Fgd:
    """A judge (`node_board.Judge`) that makes as little free capacity as possible unusable for the typical pods."""

    def __init__(self, typical: tuple[TypicalPod, ...]) -> None:
        with_cards = [pod for pod in typical if pod.shape.cards]
        self._shapes = tuple(pod.shape for pod in with_cards)
        self._weight = np.array([pod.number for pod in with_cards], np.float64)
        self._cards = np.array([shape.cards for shape in self._shapes], np.int64)
        self._cpu = np.array([shape.cpu for shape in self._shapes], np.int64)
        self.total = sum(pod.number for pod in typical)

    def fragments(self, rows: NodeRows) -> Floats:
        """Return the fragmentation F_n of each of the B rows, in thousandths of a card multiplied by `total`.

        The results are whole numbers.

        F_n = Σ p_m · F_n(m), where m is a kind of typical pod, and p_m is its proportion of all typical pods. F_n(m)
        is all free capacity of the node if m requests no card or does not fit. Otherwise it is the free capacity of
        those cards that are too full for m.
        """
        tables = _tables(self._shapes, rows.classes)
        enough = rows.free[:, :, None] >= tables.milli[rows.class_index][:, None, :]
        number = enough.sum(1)[:, tables.size_index]
        usable = np.einsum("bk,bkg->bg", rows.free.astype(np.float64), enough)[:, tables.size_index]
        fits = (number >= self._cards) & (rows.cpu[:, None] >= self._cpu) & tables.allowed[rows.class_index]
        idle: Floats = rows.free.sum(1) * float(self.total)
        used: Floats = (usable * fits) @ self._weight
        return idle - used

    def scores(self, before: Floats, after: Floats) -> Ints:
        """Return the score, 0 to 99, of a change from `before` to `after`, which are results of `fragments`.

        The published algorithm rounds to integers. That matters: with float scores its results are worse
        (docs/design/fragmentation.md).
        """
        return np.searchsorted(_SCORE_STEPS * self.total, before - after, side="right").astype(np.int64)

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        return self.scores(self.fragments(before), self.fragments(after))

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        keys = np.full(len(rows.class_index), UNFIT, np.int64)
        need = needed_milli(rows, shape)
        fitting = fitting_rows(rows, shape, need)
        if len(fitting):
            row, _, scores = self._rate_choices(rows.select(fitting), shape, need[fitting])
            keys[fitting] = np.maximum.reduceat(scores, np.flatnonzero(np.diff(row, prepend=-1)))
        return keys

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        _, chosen, scores = self._rate_choices(rows, shape, needed_milli(rows, shape))
        return tuple(np.flatnonzero(chosen[np.argmax(scores)]).tolist())

    def _rate_choices(self, rows: NodeRows, shape: Shape, need: Ints) -> tuple[Ints, Bools, Ints]:
        """Return three arrays with an element for each choice of cards: its row, which cards it has, and its score.

        The second array has a column for each card of the node.
        """
        row, chosen = card_choices(rows.free, need, shape.cards)
        free = rows.free[row] - chosen * need[row, None]
        after = NodeRows(rows.classes, rows.class_index[row], rows.cpu[row] - shape.cpu, rows.memory[row], free)
        return row, chosen, self.scores(self.fragments(rows)[row], self.fragments(after))


@lru_cache(maxsize=8)
def _tables(shapes: tuple[Shape, ...], classes: tuple[NodeClass, ...]) -> _Tables:
    sizes = sorted({(shape.core, shape.card_memory) for shape in shapes})
    milli = [[milli_per_card_or_never(Shape(0, 0, 1, *size), node) for size in sizes] for node in classes]
    size_index = [sizes.index((shape.core, shape.card_memory)) for shape in shapes]
    allowed = [[milli_per_card(shape, node) is not None for shape in shapes] for node in classes]
    return _Tables(
        np.array(milli, np.int64).reshape(len(classes), len(sizes)),
        np.array(size_index, np.int64),
        np.array(allowed, np.bool_).reshape(len(classes), len(shapes)),
    )


def _from_counts(counts: tuple[tuple[Shape, int], ...], _classes: Mapping[NodeClass, int]) -> Fgd:
    return Fgd(typical_pods(dict(counts)))


POLICY = CardPolicy(binpack, fullness, _from_counts)
