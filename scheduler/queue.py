"""What is to be looked at, and when: names for one thread, with growing pauses for those that did not work."""

import heapq
import threading
import time
from collections.abc import Callable

MAX_PAUSE = 30.0
_FIRST_PAUSE = 0.2


class Queue:
    """`add` may come from any thread and returns at once; the rest is one thread's. A name is in it once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._pauses: dict[str, float] = {}

    def add(self, name: str, after: float = 0.0) -> None:
        """Look at it in `after` seconds, or earlier if that was the plan already."""
        with self._changed:
            due = self._clock() + after
            if due < self._due.get(name, float("inf")):
                self._due[name] = due
                heapq.heappush(self._heap, (due, name))
                self._changed.notify()

    def add_again(self, name: str) -> None:
        """It did not work: later, and each time later still until it is `done`."""
        pause = self._pauses[name] = min(2 * self._pauses.get(name, _FIRST_PAUSE / 2), MAX_PAUSE)
        self.add(name, pause)

    def done(self, name: str) -> None:
        self._pauses.pop(name, None)

    def next(self) -> str | None:
        """What has been due longest; None: nothing is."""
        with self._changed:
            while self._heap and self._heap[0][0] <= self._clock():
                due, name = heapq.heappop(self._heap)
                if self._due.get(name) == due:
                    del self._due[name]
                    return name
            return None

    def run(self, look_at: Callable[[str], None], stop: threading.Event) -> None:
        """Look at what is due until `stop`, which must be followed by `wake`."""
        while not stop.is_set():
            name = self.next()
            if name is not None:
                look_at(name)
                continue
            with self._changed:
                pause = self._heap[0][0] - self._clock() if self._heap else None
                if (pause is None or pause > 0) and not stop.is_set():
                    self._changed.wait(pause)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
