"""Limits how long answers to Allocate may wait if the container runtime has no CDI.

`allocator_without_cdi` spends the budget; with CDI, Allocate answers at once. All resources share one budget.
"""

import time
from collections.abc import Callable

_LIMIT_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_REFILL = 0.1
"""How many seconds of waiting the budget regains in each second."""


class WaitBudget:
    """A budget of waiting time that refills over time. Use it on one event loop.

    The kubelet admits one pod at a time, so each answer that waits holds up the whole node. Without a shared budget,
    a user could block the node with pods that never get cards and are recreated as soon as the quota permits.

    Args:
        limit: The most seconds of waiting that the budget can hold, and its initial content.
        answer_limit: The most seconds that one answer may wait.
    """

    def __init__(
        self,
        limit: float = _LIMIT_SECONDS,
        answer_limit: float = _ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._answer_limit = answer_limit
        self._clock = clock
        self._remaining = limit
        self._updated = clock()

    def allowance(self) -> float:
        """Return how many seconds the next answer may wait."""
        return max(0.0, min(self._answer_limit, self._refill()))

    def spend(self, seconds: float) -> None:
        self._remaining = max(0.0, self._refill()) - seconds

    def _refill(self) -> float:
        now = self._clock()
        self._remaining = min(self._limit, self._remaining + _REFILL * (now - self._updated))
        self._updated = now
        return self._remaining
