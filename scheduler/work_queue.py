"""Provides the work queue of a controller: names to reconcile, with growing pauses between attempts that fail.

The queue must stay fair between groups, such as namespaces, so that one tenant cannot delay others by many names. The
late binding decisions and the MtgpuPod controller each have a queue.
"""

import heapq
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

MAX_PAUSE = 30.0
"""The longest pause before a name is retried, in seconds."""
_FIRST_PAUSE = 0.2


class Queue:
    """A queue for one consumer thread. Any thread may call `add` and `wake`, which return at once.

    Each name is in the queue at most once. `next` takes turns between the groups that have names due. `_changed` guards
    the names and their times. Only the consumer thread uses the pauses.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str, str]] = []
        self._ready: OrderedDict[str, deque[tuple[float, str]]] = OrderedDict()
        self._pauses: dict[str, float] = {}

    def add(self, name: str, after: float = 0.0, group: str = "") -> None:
        """Queue the name for `after` seconds from now, unless it is queued for an earlier time."""
        with self._changed:
            due = self._clock() + after
            if due < self._due.get(name, float("inf")):
                self._due[name] = due
                heapq.heappush(self._heap, (due, name, group))
                self._changed.notify()

    def add_again(self, name: str, group: str = "") -> None:
        """Queue a name again after a failure. The pause doubles each time, up to MAX_PAUSE, until `done` resets it."""
        pause = self._pauses[name] = min(2 * self._pauses.get(name, _FIRST_PAUSE / 2), MAX_PAUSE)
        self.add(name, pause, group)

    def done(self, name: str) -> None:
        self._pauses.pop(name, None)

    def next(self) -> str | None:
        """Remove and return the oldest due name of the group whose turn it is; None if no name is due."""
        with self._changed:
            while self._heap and self._heap[0][0] <= self._clock():
                due, name, group = heapq.heappop(self._heap)
                self._ready.setdefault(group, deque()).append((due, name))
            while self._ready:
                group, names = self._ready.popitem(last=False)
                due, name = names.popleft()
                if names:
                    self._ready[group] = names
                if self._due.get(name) == due:
                    del self._due[name]
                    return name
            return None

    def run(self, reconcile: Callable[[str], None], stop: threading.Event) -> None:
        """Reconcile the names that are due until `stop` is set. Call `wake` after setting it."""
        while not stop.is_set():
            name = self.next()
            if name is not None:
                reconcile(name)
                continue
            with self._changed:
                pause = self._heap[0][0] - self._clock() if self._heap else None
                if (pause is None or pause > 0) and not stop.is_set():
                    self._changed.wait(pause)

    def wake(self) -> None:
        """Make `run` check its stop event."""
        with self._changed:
            self._changed.notify_all()
