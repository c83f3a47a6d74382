"""How long the answers of an agent together may wait while the kubelet does nothing else."""

import time
from collections.abc import Callable

_LIMIT_SECONDS = 2.0
_REFILL = 0.1
"""Seconds of waiting that are regained each second."""


class WaitBudget:
    """Seconds that may be waited, regained over time.

    The kubelet asks for one pod at a time, so each answer that waits holds up the whole node. Without a common budget a
    user could stop it with pods that never get cards, created again as fast as a quota lets failed ones go.

    Args:
        limit: seconds that may be waited at once.
        clock: seconds, never set back.
    """

    def __init__(self, limit: float = _LIMIT_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._remaining = limit
        self._updated = clock()

    def remaining(self) -> float:
        """Return how many seconds may be waited now."""
        now = self._clock()
        self._remaining = min(self._limit, self._remaining + _REFILL * (now - self._updated))
        self._updated = now
        return max(0.0, self._remaining)

    def spend(self, seconds: float) -> None:
        """Count seconds that were waited."""
        self._remaining = self.remaining() - seconds
