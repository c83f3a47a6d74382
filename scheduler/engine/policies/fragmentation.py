"""Card and node policy `fragmentation`: take as little as possible from the pods that are likely to come.

docs/design/fragmentation.md, "The algorithm", describes the idea and the measurements. Settings and pods select the
policy by name. `playground.simulate.openb` uses `Fragmentation` directly.

Every state of a node has a worth (`learning.kind_tables`), and a pod is placed where it lowers the worth the least. The
worth consists of the values of the cards (`card_tables`) and of what the expected types of pods can use. A type counts
with its fit weight for capacity that it can use now, and with its copy weight for each of its pods that fits.

The fewer nodes a type fits, the larger are its weights (`expected_pods`). If only the number of pods counted, pods that
fit every node would crowd out pods that fit few nodes.

Taking something from a node must never raise its worth. It does not, because no summand grows when less is free.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from scheduler.engine.card_policy import CardPolicy
from scheduler.engine.learning.card_tables import PodTypes
from scheduler.engine.learning.expected_pods import ONE, weigh_types
from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import Ints, NodeClass, NodeRows, Shape, fitting_rows, needed_milli
from scheduler.engine.learning.state_rating import StateRating
from scheduler.engine.policies.binpack import binpack, fullness

_LOSS_STEP = ONE // 100
"""Losses in the same step of this size count as equal. Among such nodes, the one with the least free milli is chosen.

On the traces, 1/200 to 1/25 of `ONE` give similar results."""

_MILLI_PER_LOSS_STEP = 1 << 20
"""A number larger than the milli of any node, so that keys compare losses before they compare what is left."""


class Fragmentation:
    """A judge (`node_board.Judge`)."""

    def __init__(self, counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> None:
        """Create a judge for pods such as those that were counted.

        Args:
            counts: The result of `Learner.counts`.
            classes: The number of nodes of each class.
        """
        self._rating = StateRating(PodTypes(weigh_types(counts, classes)))

    def worth(self, rows: NodeRows) -> Ints:
        """Return the worth of every row, [B]."""
        return self._rating.worth(rows)

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        return self.worth(after) - self.worth(before)

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        """Rate each node by its smallest loss of worth, in steps; among equal losses the fullest node comes first."""
        keys = np.full(len(rows.class_index), UNFIT, np.int64)
        need = needed_milli(rows, shape)
        fitting = fitting_rows(rows, shape, need)
        rows, need = rows.select(fitting), need[fitting]
        left = rows.free.sum(1) - shape.cards * need
        changes = self._rating.best_changes(rows, shape, need)
        keys[fitting] = changes // _LOSS_STEP * _MILLI_PER_LOSS_STEP - left
        return keys

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        if not shape.cards:
            return ()
        chosen, changes = self._rating.choices(rows, shape)
        return tuple(np.flatnonzero(chosen[np.argmax(changes)]).tolist())


POLICY = CardPolicy(binpack, fullness, Fragmentation)
