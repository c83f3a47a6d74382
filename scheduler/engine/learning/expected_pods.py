"""The pods that are likely to come: counted as they come, and weighed by how few places there are for them.

`Learner` counts shapes of pods; `weigh` says how much each of them counts for the policy `fragmentation`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, milli_on

UNIT = 1000
"""What `counts` says of a pod that has just come."""

_MEMORY = 4000  # pods; 2,000 to 100,000 are alike on the traces, where the mix stays the same
_MOST = 4096  # shapes; more than are weighed, so that rare ones of a large cluster are not forgotten at once
_OFTEN = 1000  # pods. What comes first decides most: in the experiment nothing leaves
_APART = 500  # pods. Every 2,000 loses 0.2 points at 90 % on default


class Learner:
    """Counts shapes, each less by a `memory`th with every pod that comes later. Not thread-safe; bounded.

    By the number of pods and not by the clock, so that the same pods in the same order teach the same.
    """

    def __init__(self, memory: int = _MEMORY) -> None:
        self._decay = 1 - 1 / memory
        self._seen = 0
        self._weight: dict[Shape, tuple[int, float]] = {}
        self._next = 1

    def observe(self, shape: Shape) -> None:
        """A pod has come, whatever becomes of it."""
        self._seen += 1
        self._weight[shape] = (self._seen, self._now(shape) + 1)
        if len(self._weight) > _MOST:
            kept = sorted(self._weight, key=lambda s: (self._now(s), s), reverse=True)[: _MOST // 2]
            self._weight = {one: self._weight[one] for one in kept}

    def due(self) -> bool:
        """Whether so many have come since it was time for new tables that it is again: few at first. Asked once, it is
        not before the next time.
        """
        if self._seen < self._next:
            return False
        self._next = self._seen + (_APART if self._seen >= _OFTEN else max(1, self._seen // 2))
        return True

    def counts(self) -> tuple[tuple[Shape, int], ...]:
        """How often each shape has come, in thousandths (`UNIT`), by shape; without those that are forgotten."""
        found = ((shape, round(UNIT * self._now(shape))) for shape in sorted(self._weight))
        return tuple((shape, count) for shape, count in found if count)

    def _now(self, shape: Shape) -> float:
        at, weight = self._weight.get(shape, (self._seen, 0.0))
        return weight * self._decay ** (self._seen - at)


ONE = 1 << 30
"""Weights and worths are parts of this, per card: whole numbers, so that sums do not depend on their order."""

_KEPT = 256  # 96 lose half a point where many pods are bound to models; the traces have 151
_DOUBT = 2.0  # deviations. Without: 0.6 points less at 90 % on gpushare40, where 8-card pods come rarely and late
_SMOOTH = 50.0  # cards. 20 to 100 are alike; without, a pod that fits on one node only would outweigh all others
_UNSEEN = 15.0  # pods
_UNSEEN_UNTIL = 1000.0  # pods. Without any unseen 0.15 points less at 90 % on default; not fading, as much at 130 %


@dataclass(frozen=True, slots=True)
class Weighed:
    """A type of pod. number: of its pods that are expected, in any unit.

    fit: what a whole card's free milli are worth where the type fits now; copy: room for one more pod. In parts of ONE.
    """

    shape: Shape
    number: float
    fit: float
    copy: float


def copies(shape: Shape, node: NodeClass) -> int:
    """How many pods of this shape with cards the empty node takes."""
    milli = milli_on(shape, node)
    if not milli:
        return 0
    most = node.cards * (CARD // milli) // shape.cards
    return min(most, node.cpu // max(shape.cpu, 1), node.memory // max(shape.memory, 1))


def weigh(counts: Iterable[tuple[Shape, int]], classes: Mapping[NodeClass, int]) -> tuple[Weighed, ...]:
    """What counts most first. counts: as of `Learner.counts`; classes: how many nodes of each.

    A type counts with its number over the cards on which it could run, were all nodes empty, times its own size:
    popularity alone lets pods that can go anywhere crowd out those that can go to few nodes. The number is two standard
    deviations above what was seen, since a type that is rare by bad luck is what gets crowded out.
    """
    seen = [(shape, count / UNIT) for shape, count in counts if shape.cards]
    likely = [(shape, number + _DOUBT * number**0.5) for shape, number in seen]
    likely += _unseen(sum(number for _, number in seen), classes)
    rows = []
    for shape, number in likely:
        size = shape.cards * _part(shape, classes)
        room = size * sum(many * copies(shape, node) for node, many in classes.items())
        rows.append((number / (room + _SMOOTH), size, number, shape))
    rows.sort(key=lambda row: (-row[0] * row[1], row[3]))
    del rows[_KEPT:]
    if not rows:
        return ()
    all_fit, all_copy = sum(row[0] for row in rows), sum(row[0] * row[1] for row in rows)
    mean = sum(size * number for _, size, number, _ in rows) / sum(row[2] for row in rows)
    return tuple(
        Weighed(shape, number, ONE * rare / all_fit, ONE * mean * rare * size / all_copy)
        for rare, size, number, shape in rows
    )


def _unseen(seen: float, classes: Mapping[NodeClass, int]) -> list[tuple[Shape, float]]:
    """Until enough was seen: pods that want the whole of the largest node, which the first pods would take apart."""
    left = _UNSEEN * (1 - seen / _UNSEEN_UNTIL)
    if left <= 0 or not classes:
        return []
    node = max(classes, key=lambda node: (node.cards, classes[node], node))
    return [(Shape(node.cpu, node.memory, node.cards, CARD), left)] if node.cards else []


def _part(shape: Shape, classes: Mapping[NodeClass, int]) -> float:
    """Of a card, what the shape takes on most nodes that may run it."""
    by_part: dict[int, int] = {}
    for node, many in classes.items():
        if milli := milli_on(shape, node):
            by_part[milli] = by_part.get(milli, 0) + many
    return max(by_part, key=lambda milli: (by_part[milli], milli)) / CARD if by_part else max(shape.core, 1) / CARD
