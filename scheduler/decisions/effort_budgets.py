"""Limits the engine's effort per call and per namespace, so that one pod does not delay the pods of others.

A pod of many different containers can take thousands of times as long to place as an ordinary pod. Three rules limit
that cost:

- A call (filter, decision, preemption) has a budget for all its nodes together. The first nodes get a full search, the
  next ones a short search, and the last ones none.
- Each namespace has an allowance that refills slowly. A namespace that has used it up gets short searches, and later
  very short ones, until the allowance has refilled. Small calls are not charged.
- Long calls run one at a time, pause regularly, and end when their caller has gone.

Filters, scores and decisions for a pod with one container have no budget and are not charged, because the engine places
such a pod by a formula, without a search.

Effort is counted in steps (`scheduler/engine/effort.py`) and not in seconds, so that the result of a search does not
depend on the clock. Only the choice of the limits depends on it. `scheduler.runtime` creates one `EffortBudgets`, which
the filter, the decider, the preemption and the partition controller share. docs/attacks.md says what the constants
protect against, and `python -m bench.hostile` measures it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import GpuRequest
from scheduler import metrics
from scheduler.background import Pace
from scheduler.engine import FULL, LEAST, SHORT, Effort, Limits
from scheduler.engine.effort import STEPS_PER_MILLISECOND, Budget

SECOND = 1000 * STEPS_PER_MILLISECOND
"""The steps that take about a second of CPU time."""

FULL_CALL = SECOND // 5
"""The steps after which a call begins no more full searches. A running search continues to its own limit."""
SHORT_CALL = SECOND // 10
"""The further steps that a call may use for short searches after its full searches."""
FREE = SECOND // 100
"""The steps of each call that are not charged to its namespace."""
FREE_IN_DEBT = SECOND // 1000
"""The steps after which a call begins no more searches if its namespace has used up its allowance and its debt."""

ALLOWANCE = SECOND // 2
"""The steps that a namespace may use for full searches before its allowance has to refill."""
DEBT = SECOND // 4
"""The steps that a namespace may use beyond its allowance, for short searches."""
REFILL = 0.03
"""How fast the allowance of a namespace refills, in seconds of effort per second."""
REFILL_OF_ALL = 0.15
"""How fast the allowances of all namespaces together refill at most, in seconds of effort per second."""

_MAX_WAITING = 8
"""The maximum number of long calls that wait for their turn. Each occupies a thread of the server."""
_CALLER_CHECK_SECONDS = 0.02
"""The interval at which a call that waits for its turn checks whether its caller has given up."""
_PAUSE_RATIO = 0.5
"""The length of a pause of a long call, as a multiple of the work before it. Other threads get the GIL meanwhile."""

CallerGone = Callable[[], bool]
"""Returns whether the caller has given up: its deadline has passed, or its connection is closed."""


class EffortExceeded(RetryLater):
    """The search ended because other pods need the time. The pod may fit, and a later attempt may find cards."""


def never() -> bool:
    """Return False. This is the `CallerGone` of work that has no waiting caller."""
    return False


class Call:
    """The budget of one call for one pod. Not thread-safe.

    Args:
        limits: The limits of each of the first searches.
        full: The steps after which the limits of a search are at most SHORT.
        short: The further steps after which there are no more searches.

    Attributes:
        effort: The effort that the call has used so far.
        quick_first: Whether a search of this call has reached its limits, so that its result is not proven. Searches on
            other nodes are likely to end in the same way. So a quick search on each node comes first, which may at
            least find a placement.
    """

    def __init__(self, limits: Limits, full: int, short: int, effort: Effort) -> None:
        self._limits = limits
        self._full = full
        self._short = short
        self.effort = effort
        self.quick_first = False

    def next_limits(self) -> Limits | None:
        """Return the limits for the next node, or None if the budget is used up."""
        spent = self.effort.spent
        if spent < self._full:
            return self._limits
        if spent < self._full + self._short:
            return min(self._limits, SHORT, key=lambda limits: limits.search)
        return None

    def next_budget(self) -> Budget:
        """Return the budget of one search on the next node. It is empty if the budget of the call is used up."""
        limits = self.next_limits()
        return Budget(self.effort, limits.search if limits else 0)

    def last_budget(self) -> Budget:
        """Return the budget of one search on a node that has already been chosen. It is never empty."""
        return Budget(self.effort, (self.next_limits() or LEAST).search)

    def allows(self, steps: int) -> bool:
        """Return whether the call may begin work of this many steps that cannot be interrupted.

        If the namespace has used up its allowance and its debt, the call may begin only small work.
        """
        return steps <= FREE or self._limits is not LEAST

    @property
    def remaining(self) -> int:
        """The number of steps until the budget is used up."""
        return max(0, self._full + self._short - self.effort.spent)

    def require_limits(self) -> Limits:
        """Return the limits for the next node. Raises EffortExceeded if the budget is used up."""
        limits = self.next_limits()
        if limits is None:
            raise EffortExceeded(NOT_EXAMINED)
        return limits


NOT_EXAMINED = (
    "not examined: searches for cards for the containers of this pod, or of other pods of its namespace, take too "
    "long; whether they fit is not proven; the scheduler will retry"
)


def unlimited() -> Call:
    """Return the budget of a call in a process that serves no other caller, such as a command or a simulation."""
    return Call(FULL, FULL_CALL, SHORT_CALL, Effort())


class EffortBudgets:
    """The allowances of all namespaces, and the lock under which long calls run. Thread-safe.

    A long call holds `_long_call_lock`. `_lock` guards what the namespaces have used and the number of waiting calls.

    Args:
        allowance: The steps that a namespace may use for full searches. With 0, only calls without a budget get full
            searches.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        allowance: int = ALLOWANCE,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._allowance = allowance
        self._lock = threading.Lock()
        self._long_call_lock = threading.Lock()
        self._waiting = 0
        self._used: dict[str, tuple[float, float]] = {}  # By namespace, the steps that it owed at a time, and the time.

    @contextmanager
    def call(
        self, namespace: str, request: GpuRequest, gone: CallerGone = never, *, charge_single: bool = False
    ) -> Iterator[Call]:
        """Yield the budget of a call for a pod with this request, and charge the namespace afterwards.

        Within the context the engine raises EffortExceeded if too many other long calls wait, and RetryLater if the
        caller has gone.

        Args:
            charge_single: Whether to limit and charge the call even for a pod with one container, because the work
                may take long, as in a preemption.
        """
        if not charge_single and len(request.containers) <= 1 and len(request.others) <= 1:
            yield Call(FULL, 1 << 62, 0, Effort())
            return
        turn = _Turn(self, gone)
        effort = Effort(turn.check)
        remaining = self.remaining(namespace)
        try:
            if remaining > 0:
                yield Call(FULL, FULL_CALL, SHORT_CALL, effort)
            elif remaining > -DEBT:
                yield Call(SHORT, SHORT_CALL, 0, effort)
            else:
                yield Call(LEAST, FREE_IN_DEBT, 0, effort)
        finally:
            turn.end()
            self._charge(namespace, effort.spent - FREE)

    def remaining(self, namespace: str) -> float:
        """Return the steps that the namespace may still use; negative if it is in debt."""
        with self._lock:
            return self._allowance - self._owed(namespace)

    def _owed(self, namespace: str) -> float:
        steps, charged_at = self._used.get(namespace, (0.0, 0.0))
        rate = min(REFILL, REFILL_OF_ALL / max(1, len(self._used)))
        return max(0.0, steps - (self._clock() - charged_at) * rate * SECOND)

    def _charge(self, namespace: str, steps: int) -> None:
        if steps <= 0:
            return
        with self._lock:
            # All debts are updated together, because the rate at which they shrink depends on their number.
            owed = {name: self._owed(name) for name in (*self._used, namespace)}
            owed[namespace] += steps
            now = self._clock()
            self._used = {name: (steps, now) for name, steps in owed.items() if steps > 0}

    def enter(self, gone: CallerGone) -> None:
        """Wait until this call is the only long call that runs.

        Raises:
            EffortExceeded: Too many long calls wait already.
            RetryLater: The caller has gone.
        """
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                metrics.SEARCHES_ENDED.labels("busy").inc()
                raise EffortExceeded("other long searches are under way; the scheduler will retry")
            self._waiting += 1
        try:
            while not self._long_call_lock.acquire(timeout=_CALLER_CHECK_SECONDS):
                _check(gone)
        finally:
            with self._lock:
                self._waiting -= 1

    def leave(self) -> None:
        self._long_call_lock.release()

    def pace(self) -> Pace:
        return Pace(_PAUSE_RATIO, self._sleep)


class _Turn:
    """Makes a call a long call as soon as it has used its free steps (`FREE`)."""

    def __init__(self, budgets: EffortBudgets, gone: CallerGone) -> None:
        self._budgets = budgets
        self._gone = gone
        self._pace: Pace | None = None

    def check(self, spent: int) -> None:
        """Wait for the turn of a call that has become long, and later pause when a pause is due.

        The engine calls this every few thousand steps. It raises the same errors as `EffortBudgets.enter`.
        """
        if spent < FREE:
            return
        _check(self._gone)
        if self._pace is None:
            self._budgets.enter(self._gone)
            self._pace = self._budgets.pace()
        self._pace()

    def end(self) -> None:
        if self._pace is not None:
            self._budgets.leave()


def _check(gone: CallerGone) -> None:
    if gone():
        metrics.SEARCHES_ENDED.labels("gone").inc()
        raise RetryLater("the caller has given up, so the search was ended")
