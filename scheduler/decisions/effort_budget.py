"""Who may take how much of the engine's effort, and when it ends.

A pod of many different containers can take thousands of times as long to place as an ordinary one. Three rules keep
such pods from delaying others:

- One call (a filter, a decision, a preemption) has a budget over all its nodes. First each node gets a full search,
  then a short one, then none.
- Each namespace has an allowance of effort that refills slowly. A namespace that has used it up gets short searches,
  and in the end hardly any, until it has some again. Calls that take little are not counted, and pods of a single
  container never are: for them the engine has a formula and does not search.
- Calls that take long go one at a time, rest in between, and end when their caller is gone.

The effort is counted in steps (`scheduler/engine/effort.py`), so that what a search finds does not depend on the
clock; only which of the limits a call gets does.
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
"""A call searches in full on its next node until it has taken so many steps."""
SHORT_CALL = SECOND // 10
"""And shortly on so many more."""
FREE = SECOND // 100
"""Steps of a call that are not counted."""
FREE_IN_DEBT = SECOND // 1000
"""All steps, but for those of the node where it gets there, of a call of a namespace that is deep in debt."""

ALLOWANCE = SECOND // 2
"""What a namespace may take at once."""
DEBT = SECOND // 4
"""What it may take beyond that, in short searches."""
REFILL = 0.03
"""Of the time, how much effort each namespace gets back."""
REFILL_OF_ALL = 0.15
"""And all that wait for some together."""

_WAITING = 8
"""Long calls that wait for their turn at once; a thread of the server waits with each."""
_LOOK_SECONDS = 0.02
_RESTS = 0.5
"""How long a long call rests, as a part of the time for which it works: others have the interpreter then."""

Gone = Callable[[], bool]
"""Whether the caller waits no more: its deadline has passed, or its connection is closed."""


class Rationed(RetryLater):
    """The search was ended because others need the time; the same may be found later."""


def never() -> bool:
    """Of work that nobody's connection waits for."""
    return False


class Call:
    """The effort of one call for one pod. Not thread-safe.

    hard: on a node of this call the search has ended without proof. It will on others, so there what comes first is
    whether the pod fits at all.
    """

    def __init__(self, limits: Limits, full: int, short: int, effort: Effort) -> None:
        self._limits = limits
        self._full = full
        self._short = short
        self.effort = effort
        self.hard = False

    def next_limits(self) -> Limits | None:
        """Those of the next node; None: the call has had its share, and the node is not looked at."""
        spent = self.effort.spent
        if spent < self._full:
            return self._limits
        return min(self._limits, SHORT, key=lambda limits: limits.search) if spent < self._full + self._short else None

    def next_budget(self) -> Budget:
        """Return the steps of one search on the next node; none where the call has had its share."""
        limits = self.next_limits()
        return Budget(self.effort, limits.search if limits else 0)

    def last_budget(self) -> Budget:
        """Return the steps of one search on a node that was chosen: few, where the call has had its share."""
        return Budget(self.effort, (self.next_limits() or LEAST).search)

    def allows(self, steps: int) -> bool:
        """Whether the call may do work of so many steps at once, which no checkpoint divides."""
        return steps <= FREE or self._limits is not LEAST

    @property
    def left(self) -> int:
        """Steps until the call has had its share."""
        return max(0, self._full + self._short - self.effort.spent)

    def must_have_limits(self) -> Limits:
        """The same. Raises Rationed in place of None."""
        limits = self.next_limits()
        if limits is None:
            raise Rationed(NOT_LOOKED_AT)
        return limits


NOT_LOOKED_AT = (
    "not looked at: searches for cards for this pod's containers, or for others of its namespace, take too long, and "
    "whether they fit is not proven; it is tried again"
)


def unlimited() -> Call:
    """For one's own process, which keeps nobody waiting."""
    return Call(FULL, FULL_CALL, SHORT_CALL, Effort())


class Rations:
    """Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        allowance: int = ALLOWANCE,
    ) -> None:
        """allowance: what a namespace may take at once; 0 for work that needs no full search."""
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
        """The effort of a call for a pod with this ask.

        single_too: work that is long for a pod of one container as well. The engine raises Rationed and, where the
        caller is gone, RetryLater.
        """
        if not single_too and len(request.containers) <= 1 and len(request.others) <= 1:
            yield Call(FULL, 1 << 62, 0, Effort())
            return
        turn = _Turn(self, gone)
        effort = Effort(turn.check)
        left = self.left(namespace)
        try:
            if left > 0:  # full searches
                yield Call(FULL, FULL_CALL, SHORT_CALL, effort)
            elif left > -DEBT:
                yield Call(SHORT, SHORT_CALL, 0, effort)
            else:
                yield Call(LEAST, FREE_IN_DEBT, 0, effort)
        finally:
            turn.end()
            self._charge(namespace, effort.spent - FREE)

    def left(self, namespace: str) -> float:
        """Steps that the namespace may still take; negative where it has taken more."""
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
            # What they owe is brought up to date together, since how fast it shrinks depends on how many there are.
            owed = {name: self._owed(name) for name in (*self._taken, namespace)}
            owed[namespace] += steps
            now = self._clock()
            self._taken = {name: (steps, now) for name, steps in owed.items() if steps > 0}

    def enter(self, gone: Gone) -> None:
        """Wait for the turn of a long call. Raises Rationed and RetryLater."""
        with self._lock:
            if self._waiting >= _WAITING:
                metrics.SEARCHES_ENDED.labels("busy").inc()
                raise Rationed("other searches that take long are under way; it is tried again")
            self._waiting += 1
        try:
            while not self._lane.acquire(timeout=_LOOK_SECONDS):
                _check(gone)
        finally:
            with self._lock:
                self._waiting -= 1

    def leave(self) -> None:
        self._lane.release()

    def pace(self) -> Pace:
        return Pace(_RESTS, self._sleep)


class _Turn:
    """Where a call stands: within what is free, or one of those that go one at a time."""

    def __init__(self, rations: Rations, gone: Gone) -> None:
        self._rations, self._gone = rations, gone
        self._pace: Pace | None = None

    def check(self, spent: int) -> None:
        """Now and then while the engine works. Raises Rationed and RetryLater."""
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
        raise RetryLater("whoever asked waits no more, and the search was ended")
