"""Card and node policy `fgd`: fragmentation gradient descent as published, for comparison with `fragmentation`.

Source: Weng et al., "Beware of Fragmentation" (USENIX ATC'23); docs/design/fragmentation.md, "FGD as published". The
policy must stay as published, even where `fragmentation` is better. All sums add integers that are stored as floats,
and stay below 2^53. So they are exact, and the same on every machine and in any order. Settings and pods select the
policy by name. `playground.simulate.openb` uses `Fgd` directly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from scheduler.engine.card_policy import CardPolicy
from scheduler.engine.learning.kind_tables import Floats, Hosting
from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import (
    CARD,
    Ints,
    NodeClass,
    NodeRows,
    Shape,
    fitting_rows,
    milli_per_card,
    milli_per_card_or_never,
    needed_milli,
)
from scheduler.engine.learning.state_rating import StateRating
from scheduler.engine.policies.binpack import binpack, fullness

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


class _Types:
    """Typical pods that request cards, as `state_rating.Types`. The worth of a node is what they can use of it.

    The worth is in thousandths of a card, and the capacity counts once for each pod.
    """

    def __init__(self, typical: Sequence[TypicalPod]) -> None:
        self._typical = typical
        self._cpu = np.array([pod.shape.cpu for pod in typical], np.int64)
        self.cards = np.array([pod.shape.cards for pod in typical], np.int64)

    def milli(self, node: NodeClass) -> tuple[int, ...]:
        sizes = [Shape(0, 0, 1, pod.shape.core, pod.shape.card_memory) for pod in self._typical]
        return tuple(milli_per_card_or_never(size, node) for size in sizes)

    def weights(self, node: NodeClass) -> Floats:
        allowed = [milli_per_card(pod.shape, node) is not None for pod in self._typical]
        fit = [pod.number * may_run for pod, may_run in zip(self._typical, allowed, strict=True)]
        return np.array((fit, [0] * len(fit)), np.float64)

    def card_values(self, _milli: Sequence[int]) -> Ints:
        return np.zeros(CARD + 1, np.int64)

    def hosting(self, order: Ints) -> Hosting:
        """Return a function that tells whether the CPU suffices for one pod of each type. FGD ignores the memory."""
        cpu_of_types = self._cpu[order]
        return lambda cpu, _memory: (cpu[:, None] >= cpu_of_types).astype(np.int16)


class Fgd:
    """A judge (`node_board.Judge`) that makes as little free capacity as possible unusable for the typical pods."""

    def __init__(self, typical: tuple[TypicalPod, ...]) -> None:
        self.total = sum(pod.number for pod in typical)
        self._usable = StateRating(_Types([pod for pod in typical if pod.shape.cards]))

    def fragments(self, rows: NodeRows) -> Ints:
        """Return the fragmentation F_n of each of the B rows, in thousandths of a card multiplied by `total`.

        F_n = Σ p_m · F_n(m), where m is a kind of typical pod, and p_m is its proportion of all typical pods. F_n(m)
        is all free capacity of the node if m requests no card or does not fit. Otherwise it is the free capacity of
        those cards that are too full for m.
        """
        fragments: Ints = rows.free.sum(1) * self.total - self._usable.worth(rows)
        return fragments

    def scores(self, less: Ints) -> Ints:
        """Return the score, 0 to 99, of changes after which there are so much less `fragments`.

        The published algorithm rounds to integers. That matters: with float scores its results are worse
        (docs/design/fragmentation.md).
        """
        scores: Ints = np.searchsorted(_SCORE_STEPS * self.total, less, side="right").astype(np.int64)
        return scores

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        return self.scores(self.fragments(before) - self.fragments(after))

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        keys = np.full(len(rows.class_index), UNFIT, np.int64)
        need = needed_milli(rows, shape)
        fitting = fitting_rows(rows, shape, need)
        need = need[fitting]
        # No score is higher than that of the choice of cards after which most is usable.
        usable = self._usable.best_changes(rows.select(fitting), shape, need)
        keys[fitting] = self.scores(usable + self.total * shape.cards * need)
        return keys

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        chosen, usable = self._usable.choices(rows, shape)
        scores = self.scores(usable + self.total * shape.cards * needed_milli(rows, shape))
        return tuple(np.flatnonzero(chosen[np.argmax(scores)]).tolist())


def _from_counts(counts: tuple[tuple[Shape, int], ...], _classes: Mapping[NodeClass, int]) -> Fgd:
    return Fgd(typical_pods(dict(counts)))


POLICY = CardPolicy(binpack, fullness, _from_counts)
