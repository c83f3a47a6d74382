"""Counts the pods that arrive, and gives weights to the types of pods that are therefore expected.

`scheduler.cluster.forecast` reports pods to a `Learner` and gives its counts to the learning policies. The policy
`fragmentation` calls `weigh_types`. `playground.simulate.openb` uses `Learner` for its experiments. The results must
depend only on the pods and their order, and not on the time, on chance or on the order of dictionaries.

The constants were tuned on the traces of docs/design/fragmentation.md. Below, a value of a constant "loses" a point if
one percent less of the GPUs of a trace is allocated with it. A percentage such as "at 90 %" means the time at which the
pods that have arrived request that part of the GPUs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, milli_per_card

UNIT = 1000
"""The count of a pod that has just arrived."""

_MEMORY = 4000
"""The number of pods after which a count has faded to 1/e.

2,000 to 100,000 pods give similar results on the traces, where the mix of pods does not change.
"""
_MAX_SHAPES = 4096
"""The maximum number of shapes that are stored. It is larger than the number that `weigh_types` uses, so that
rare shapes are not forgotten."""
_FREQUENT_UNTIL = 1000
"""Until this number of pods, the policies compute new tables (`card_tables`) more often than every `_INTERVAL` pods,
because the first placements matter most."""
_INTERVAL = 500
"""The number of pods between new tables. An interval of 2,000 loses 0.2 points at 90 % on the default trace."""


class Learner:
    """Counts the shapes of pods. Every pod that arrives reduces the earlier counts by 1/4,000. Not thread-safe.

    At most `_MAX_SHAPES` shapes are stored, because tenants decide how many different ones arrive.
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
        """Return whether so many pods have arrived since the last call that returned True that new tables are due."""
        if self._seen < self._next_due:
            return False
        self._next_due = self._seen + (_INTERVAL if self._seen >= _FREQUENT_UNTIL else max(1, self._seen // 2))
        return True

    def counts(self) -> tuple[tuple[Shape, int], ...]:
        """Return the count of each shape multiplied by `UNIT`, sorted by shape, without those that round to 0."""
        rounded = ((shape, round(UNIT * self._weight_now(shape))) for shape in sorted(self._weight))
        return tuple((shape, count) for shape, count in rounded if count)

    def _weight_now(self, shape: Shape) -> float:
        last_seen, weight = self._weight.get(shape, (self._seen, 0.0))
        return weight * self._decay ** (self._seen - last_seen)


ONE = 1 << 30
"""The number that stands for 1 in weights and values.

`card_tables` rounds them to whole numbers, so that sums do not depend on the order.
"""

_MAX_TYPES = 256
"""The maximum number of types. The traces have 151.

With 96, half a point is lost on traces in which many pods require certain card models.
"""
_DEVIATIONS = 2.0
"""The number of standard deviations by which the expected number of pods exceeds the count.

0 loses 0.6 points at 90 % on the trace gpushare40, where pods with 8 cards arrive rarely and late.
"""
_SMOOTHING = 50.0
"""Added to the number of cards that a type could use. 20 to 100 give similar results.

With 0, a type that fits only one node would outweigh all others.
"""
_UNSEEN_PODS = 15.0
"""How many pods that request a whole node are expected as long as no pod has arrived.

0 loses 0.15 points at 90 % on the default trace.
"""
_UNSEEN_UNTIL = 1000.0
"""The number of GPU pods after whose arrival no further pods are expected to request a whole node.

Expecting them forever loses 0.15 points at 130 %.
"""


@dataclass(frozen=True, slots=True)
class WeightedType:
    """A type of pod with its weights, whose unit is 1 / `ONE`.

    Attributes:
        shape: What pods of the type request.
        number: How many pods of the type are expected, relative to the other types.
        fit_weight: The worth of an empty card on a node on which a pod of the type fits now.
        copy_weight: The worth of free capacity for one more pod of the type.
    """

    shape: Shape
    number: float
    fit_weight: float
    copy_weight: float


def pods_per_empty_node(shape: Shape, node: NodeClass) -> int:
    """Return how many pods of this shape fit on the empty node; 0 for a shape without cards."""
    milli = milli_per_card(shape, node)
    if not milli:
        return 0
    by_cards = node.cards * (CARD // milli) // shape.cards
    return min(by_cards, node.cpu // max(shape.cpu, 1), node.memory // max(shape.memory, 1))


def weigh_types(counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> tuple[WeightedType, ...]:
    """Return the types of pods with the highest copy weights, at most `_MAX_TYPES`, the highest weight first.

    The fit weight of a type is proportional to the expected number of its pods, divided by the number of cards that the
    type could use if all nodes were empty. If only the number of pods counted, pods that fit every node would crowd out
    pods that fit few nodes. The copy weight is also proportional to the size of one pod. The expected number is two
    standard deviations above the count, so that a type that is rare by chance is not crowded out.

    Args:
        counts: The result of `Learner.counts`.
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
    """Return a shape that requests a whole node of the largest class, and the expected number of its pods.

    Without this shape, the first pods of a new cluster would be spread over nodes that later pods need as a whole. The
    list is empty once `_UNSEEN_UNTIL` pods have arrived, and if no node has cards.
    """
    number = _UNSEEN_PODS * (1 - seen / _UNSEEN_UNTIL)
    if number <= 0 or not classes:
        return []
    node = max(classes, key=lambda node: (node.cards, classes[node], node))
    return [(Shape(node.cpu, node.memory, node.cards, CARD), number)] if node.cards else []


def _fraction_of_card(shape: Shape, classes: Mapping[NodeClass, int]) -> float:
    """Return the fraction of each of its cards that a pod of the shape takes.

    The fraction may differ between nodes. The one that applies to the largest number of nodes is returned.
    """
    nodes_by_milli: dict[int, int] = {}
    for node, number in classes.items():
        if milli := milli_per_card(shape, node):
            nodes_by_milli[milli] = nodes_by_milli.get(milli, 0) + number
    if not nodes_by_milli:
        return max(shape.core, 1) / CARD
    return max(nodes_by_milli, key=lambda milli: (nodes_by_milli[milli], milli)) / CARD
