"""Limits the total time for which an agent's answers to Allocate wait: the kubelet does nothing else meanwhile."""

import time
from collections.abc import Callable

_LIMIT_SECONDS = 2.0
_REFILL = 0.1
"""Seconds of waiting that are regained each second."""


class WaitBudget:
    """A budget of waiting time that refills over time.

    The kubelet asks for one pod at a time, so each answer that waits holds up the whole node. Without a shared budget,
    a user could block the node with pods that never get cards and are recreated as soon as the quota permits.

    Args:
        limit: the most seconds that the budget holds.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, limit: float = _LIMIT_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._remaining = limit
        self._updated = clock()

    def remaining(self) -> float:
        """Return how many seconds of waiting are left."""
        now = self._clock()
        self._remaining = min(self._limit, self._remaining + _REFILL * (now - self._updated))
        self._updated = now
        return max(0.0, self._remaining)

    def spend(self, seconds: float) -> None:
        """Deduct this many seconds of waiting."""
        self._remaining = self.remaining() - seconds
