"""Counts the pods that arrive, and weighs the types of pods that are therefore expected.

`scheduler.cluster.forecast` feeds a `Learner` and gives its counts to the learning policies; `weigh_types` says how
much each type counts for the policy `fragmentation`. The constants were tuned on the traces of
docs/design/fragmentation.md; "points" below are percent of the GPUs allocated there. The result must depend on nothing
but the order of the pods: no clock, no randomness, no order of dictionaries.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, milli_per_card

UNIT = 1000
"""The count of a pod that has just arrived."""

_MEMORY = 4000  # pods; 2,000 to 100,000 give similar results on the traces, where the mix of pods does not change
_MAX_SHAPES = 4096  # more than `weigh_types` uses, so that rare shapes of a large cluster are not forgotten at once
_FREQUENT_UNTIL = 1000  # pods; the first placements matter most
_INTERVAL = 500  # pods; an interval of 2,000 loses 0.2 points at 90 % on the default trace


class Learner:
    """Counts the shapes of pods. Every pod that arrives reduces the earlier counts by a 4,000th. Not thread-safe.

    Counts fade with the number of pods rather than with time, so that the same pods in the same order give the same
    result. At most `_MAX_SHAPES` shapes are stored, because tenants decide how many different ones arrive.
    """

    def __init__(self) -> None:
        self._decay = 1 - 1 / _MEMORY
        self._seen = 0
        self._weight: dict[Shape, tuple[int, float]] = {}
        self._next_due = 1

    def observe(self, shape: Shape) -> None:
        """Count a pod that has arrived, whether or not it will be placed."""
        self._seen += 1
        self._weight[shape] = (self._seen, self._weight_now(shape) + 1)
        if len(self._weight) > _MAX_SHAPES:
            heaviest = sorted(self._weight, key=lambda s: (self._weight_now(s), s), reverse=True)[: _MAX_SHAPES // 2]
            self._weight = {kept: self._weight[kept] for kept in heaviest}

    def due(self) -> bool:
        """Return whether enough pods have arrived since the last True to compute new tables; at first a few suffice."""
        if self._seen < self._next_due:
            return False
        self._next_due = self._seen + (_INTERVAL if self._seen >= _FREQUENT_UNTIL else max(1, self._seen // 2))
        return True

    def counts(self) -> tuple[tuple[Shape, int], ...]:
        """Return the count of each shape in units of 1 / `UNIT`, sorted by shape, without those that round to 0."""
        rounded = ((shape, round(UNIT * self._weight_now(shape))) for shape in sorted(self._weight))
        return tuple((shape, count) for shape, count in rounded if count)

    def _weight_now(self, shape: Shape) -> float:
        last_seen, weight = self._weight.get(shape, (self._seen, 0.0))
        return weight * self._decay ** (self._seen - last_seen)


ONE = 1 << 30
"""The unit of weights and values, per card. They are whole numbers, so that sums do not depend on the order."""

_MAX_TYPES = 256  # 96 lose half a point where many pods are bound to card models; the traces have 151 types
_DEVIATIONS = 2.0  # 0 loses 0.6 points at 90 % on gpushare40, where pods with 8 cards arrive rarely and late
_SMOOTHING = 50.0  # cards; 20 to 100 give similar results. With 0 a type that fits one node would outweigh all others
_UNSEEN_PODS = 15.0  # 0 loses 0.15 points at 90 % on the default trace
_UNSEEN_UNTIL = 1000.0  # pods; a prior that never fades loses 0.15 points at 130 %


@dataclass(frozen=True, slots=True)
class WeightedType:
    """A type of pod with its weights, in parts of `ONE`.

    Attributes:
        number: How many of its pods are expected, relative to the other types.
        fit_weight: The worth of the free milli of a whole card on a node that the type fits now.
        copy_weight: The worth of free capacity for one more pod of the type.
    """

    shape: Shape
    number: float
    fit_weight: float
    copy_weight: float


def pods_per_empty_node(shape: Shape, node: NodeClass) -> int:
    """Return how many pods of this shape the empty node takes; 0 for a shape without cards."""
    milli = milli_per_card(shape, node)
    if not milli:
        return 0
    by_cards = node.cards * (CARD // milli) // shape.cards
    return min(by_cards, node.cpu // max(shape.cpu, 1), node.memory // max(shape.memory, 1))


def weigh_types(counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> tuple[WeightedType, ...]:
    """Return the types of pods that count most, heaviest first.

    The weight of a type is its number, divided by the number of cards that it could use if all nodes were empty, times
    the size of its pods. By number alone, pods that could go anywhere would crowd out pods that fit few nodes. The
    number is two standard deviations above the count, because a type that is rare by chance is the one that is crowded
    out.

    Args:
        counts: As `Learner.counts` returns them.
        classes: The number of nodes of each class.
    """
    seen = [(shape, count / UNIT) for shape, count in counts if shape.cards]
    expected = [(shape, number + _DEVIATIONS * number**0.5) for shape, number in seen]
    expected += _unseen(sum(number for _, number in seen), classes)
    rows = []
    for shape, number in expected:
        size = shape.cards * _fraction_of_card(shape, classes)
        usable = size * sum(nodes * pods_per_empty_node(shape, node) for node, nodes in classes.items())
        rows.append((number / (usable + _SMOOTHING), size, number, shape))
    rows.sort(key=lambda row: (-row[0] * row[1], row[3]))
    del rows[_MAX_TYPES:]
    if not rows:
        return ()
    total_fit, total_copy = sum(row[0] for row in rows), sum(row[0] * row[1] for row in rows)
    mean_size = sum(size * number for _, size, number, _ in rows) / sum(row[2] for row in rows)
    return tuple(
        WeightedType(shape, number, ONE * scarcity / total_fit, ONE * mean_size * scarcity * size / total_copy)
        for scarcity, size, number, shape in rows
    )


def _unseen(seen: float, classes: Mapping[NodeClass, int]) -> list[tuple[Shape, float]]:
    """Expect pods that request a whole node of the largest class, until enough pods were seen.

    Otherwise the first pods of a new cluster would be spread over nodes that a later pod needs whole.
    """
    number = _UNSEEN_PODS * (1 - seen / _UNSEEN_UNTIL)
    if number <= 0 or not classes:
        return []
    node = max(classes, key=lambda node: (node.cards, classes[node], node))
    return [(Shape(node.cpu, node.memory, node.cards, CARD), number)] if node.cards else []


def _fraction_of_card(shape: Shape, classes: Mapping[NodeClass, int]) -> float:
    """Return the fraction of a card that the shape takes on most of the nodes that may run it."""
    nodes_by_milli: dict[int, int] = {}
    for node, number in classes.items():
        if milli := milli_per_card(shape, node):
            nodes_by_milli[milli] = nodes_by_milli.get(milli, 0) + number
    if not nodes_by_milli:
        return max(shape.core, 1) / CARD
    return max(nodes_by_milli, key=lambda milli: (nodes_by_milli[milli], milli)) / CARD
