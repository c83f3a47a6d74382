"""Which pods are likely to come: those that came, the later the more."""

from scheduler.engine.learning.shapes import Shape

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
