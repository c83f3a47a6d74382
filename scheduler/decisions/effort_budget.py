"""Limits of the engine's effort per call and per namespace, so that no pod delays the pods of others.

A pod of many different containers can take thousands of times as long to place as an ordinary pod. Three rules bound
what that costs:

- A call (filter, decision, preemption) has a budget for all its nodes together. While it lasts, each node gets a full
  search, then a short one, and then none.
- Each namespace has an allowance that refills slowly. A namespace that has used it up gets short searches, and in the
  end hardly any, until it has some again. Small calls do not count. Pods of one container do not either, since the
  engine places them by a formula, without a search.
- Long calls run one at a time, pause in between, and end when their caller is gone.

Effort is counted in steps (`scheduler/engine/effort.py`) and not in seconds, so that the result of a search does not
depend on the clock. Only the choice of the limits does. The filter, the decider, the preemption and the partition
controller begin each call with `Rations.call`. The constants may be tuned; docs/attacks.md says what they keep out, and
`python -m bench hostile` measures it.
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
"""Steps that take about a second of CPU time."""

FULL_CALL = SECOND // 5
"""Steps of a call with full searches. The search that is under way when they are used up goes on to its own limit."""
SHORT_CALL = SECOND // 10
"""Steps of a call with short searches, once the steps for full searches are used up."""
FREE = SECOND // 100
"""Steps of each call that are not charged to its namespace."""
FREE_IN_DEBT = SECOND // 1000
"""Steps of a call of a namespace whose debt is used up too."""

ALLOWANCE = SECOND // 2
"""Steps that a namespace may use at once."""
DEBT = SECOND // 4
"""Steps that it may use beyond its allowance, in short searches."""
REFILL = 0.03
"""Seconds of effort that a namespace gets back per second."""
REFILL_OF_ALL = 0.15
"""Seconds of effort that all namespaces together get back per second."""

_WAITING = 8
"""Long calls that may wait for their turn; each occupies a thread of the server."""
_GONE_CHECK_SECONDS = 0.02
_RESTS = 0.5
"""How long a long call pauses, as a fraction of the time that it works. Pauses let other requests have the GIL."""

Gone = Callable[[], bool]
"""Tells whether the caller has given up: its deadline has passed, or its connection is closed."""


class Rationed(RetryLater):
    """The search ended because others need the time. The pod may fit; a later attempt can find out."""


def never() -> bool:
    """The `Gone` of work for which no connection waits."""
    return False


class Call:
    """The budget of one call for one pod. Not thread-safe.

    Attributes:
        effort: what the call has used so far.
        hard: a search of this call has ended without a proof. Searches on other nodes are likely to end so too, so
            there a quick search comes first, which at least tells whether the pod fits.
    """

    def __init__(self, limits: Limits, full: int, short: int, effort: Effort) -> None:
        self._limits = limits
        self._full = full
        self._short = short
        self.effort = effort
        self.hard = False

    def next_limits(self) -> Limits | None:
        """Return the limits for the next node, or None where the budget is used up and no node is to be examined."""
        spent = self.effort.spent
        if spent < self._full:
            return self._limits
        if spent < self._full + self._short:
            return min(self._limits, SHORT, key=lambda limits: limits.search)
        return None

    def next_budget(self) -> Budget:
        """Return the steps of one search on the next node; none where the budget is used up."""
        limits = self.next_limits()
        return Budget(self.effort, limits.search if limits else 0)

    def last_budget(self) -> Budget:
        """Return the steps of one search on a node that is chosen already: at least a few, whatever was used."""
        return Budget(self.effort, (self.next_limits() or LEAST).search)

    def allows(self, steps: int) -> bool:
        """Tell whether the call may do work of so many steps at once, which nothing can interrupt."""
        return steps <= FREE or self._limits is not LEAST

    @property
    def left(self) -> int:
        """Steps until the budget is used up."""
        return max(0, self._full + self._short - self.effort.spent)

    def must_have_limits(self) -> Limits:
        """Return the limits for the next node. Raises Rationed where the budget is used up."""
        limits = self.next_limits()
        if limits is None:
            raise Rationed(NOT_EXAMINED)
        return limits


NOT_EXAMINED = (
    "not examined: searches for cards for the containers of this pod, or of other pods of its namespace, take too "
    "long; whether they fit is not proven; the scheduler will retry"
)


def unlimited() -> Call:
    """Return the budget of a call in a process that serves no one else, such as a command or a simulation."""
    return Call(FULL, FULL_CALL, SHORT_CALL, Effort())


class Rations:
    """The allowances of all namespaces, and the lane of long calls. Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        allowance: int = ALLOWANCE,
    ) -> None:
        """allowance: steps that a namespace may use at once; 0 for work that does without full searches."""
        self._clock = clock
        self._sleep = sleep
        self._allowance = allowance
        self._lock = threading.Lock()
        self._lane = threading.Lock()
        self._waiting = 0
        self._taken: dict[str, tuple[float, float]] = {}

    @contextmanager
    def call(
        self, namespace: str, request: GpuRequest, gone: Gone = never, *, single_too: bool = False
    ) -> Iterator[Call]:
        """Give the budget of a call for a pod with this request, and charge the namespace afterwards.

        Within the context the engine raises Rationed where other long calls are waiting, and RetryLater where the
        caller is gone.

        Args:
            single_too: the work is long for a pod of one container as well (preemption).
        """
        if not single_too and len(request.containers) <= 1 and len(request.others) <= 1:
            yield Call(FULL, 1 << 62, 0, Effort())
            return
        turn = _Turn(self, gone)
        effort = Effort(turn.check)
        left = self.left(namespace)
        try:
            if left > 0:
                yield Call(FULL, FULL_CALL, SHORT_CALL, effort)
            elif left > -DEBT:
                yield Call(SHORT, SHORT_CALL, 0, effort)
            else:
                yield Call(LEAST, FREE_IN_DEBT, 0, effort)
        finally:
            turn.end()
            self._charge(namespace, effort.spent - FREE)

    def left(self, namespace: str) -> float:
        """Return the steps that the namespace may still use; negative where it is in debt."""
        with self._lock:
            return self._allowance - self._owed(namespace)

    def _owed(self, namespace: str) -> float:
        taken, at = self._taken.get(namespace, (0.0, 0.0))
        rate = min(REFILL, REFILL_OF_ALL / max(1, len(self._taken)))
        return max(0.0, taken - (self._clock() - at) * rate * SECOND)

    def _charge(self, namespace: str, steps: int) -> None:
        if steps <= 0:
            return
        with self._lock:
            # All debts are brought up to date at once: how fast they shrink depends on how many there are.
            owed = {name: self._owed(name) for name in (*self._taken, namespace)}
            owed[namespace] += steps
            now = self._clock()
            self._taken = {name: (steps, now) for name, steps in owed.items() if steps > 0}

    def enter(self, gone: Gone) -> None:
        """Wait until no other long call runs. Raises Rationed where too many wait, RetryLater if the caller is gone."""
        with self._lock:
            if self._waiting >= _WAITING:
                metrics.SEARCHES_ENDED.labels("busy").inc()
                raise Rationed("other long searches are under way; the scheduler will retry")
            self._waiting += 1
        try:
            while not self._lane.acquire(timeout=_GONE_CHECK_SECONDS):
                _check(gone)
        finally:
            with self._lock:
                self._waiting -= 1

    def leave(self) -> None:
        self._lane.release()

    def pace(self) -> Pace:
        return Pace(_RESTS, self._sleep)


class _Turn:
    """Turns a call into a long one once it has used its free steps."""

    def __init__(self, rations: Rations, gone: Gone) -> None:
        self._rations = rations
        self._gone = gone
        self._pace: Pace | None = None

    def check(self, spent: int) -> None:
        """Checkpoint, called by the engine every few thousand steps. Raises Rationed and RetryLater."""
        if spent < FREE:
            return
        _check(self._gone)
        if self._pace is None:
            self._rations.enter(self._gone)
            self._pace = self._rations.pace()
        self._pace()

    def end(self) -> None:
        if self._pace is not None:
            self._rations.leave()


def _check(gone: Gone) -> None:
    if gone():
        metrics.SEARCHES_ENDED.labels("gone").inc()
        raise RetryLater("the caller waits no longer; the search was ended")
