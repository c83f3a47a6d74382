"""Defines limits, turns and pauses that keep the MtgpuPods of one namespace from delaying those of others.

`mtgpupod_controller` and `mtgpupod_writer` use this module. The thread of the MtgpuPod controller writes for all nodes
and namespaces, and tenants control how many MtgpuPods exist, how large they are, and whether the API server accepts
writes for them. docs/attacks.md describes the delays without these limits. Nothing in this module is thread-safe.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from scheduler.engine.round_robin import by_turns

T = TypeVar("T")

WRITES = 48
"""The number of writes after which an attempt on a node handles no further MtgpuPod.

A write takes 5 to 10 ms, so other nodes wait for about half a second.
"""
FINALIZER_WRITES = WRITES // 2
"""How many writes of an attempt may add finalizers to new MtgpuPods. The rest is for MtgpuPods with a finalizer."""
WRITE_SECONDS = 1.0
"""The total duration of writes after which an attempt handles no further MtgpuPod, even after fewer than `WRITES`."""
SLOW_SECONDS = 1.0
"""The duration from which a write counts as slow. A tenant can cause slow writes by a large MtgpuPod."""
_REST_FACTOR = 2
"""After a slow write, its namespace pauses for this many times the duration of the write.

So the slow writes of one namespace take at most a third of the thread's time.
"""
FIRST_PAUSE = 1.0
"""The first pause after a failed write, in seconds. Each further pause is twice as long, up to `LONGEST_PAUSE`."""
LONGEST_PAUSE = 60.0
_FEW = 100
"""The number of stored pauses above which those that ended long ago are removed for the first time."""


@dataclass(slots=True)
class AttemptBudget:
    """Counts the writes of one attempt on a node.

    Attributes:
        writes: The number of writes.
        seconds: The total duration of the writes.
        is_exceeded: Whether the attempt has reached a limit, so that another one must follow.
    """

    writes: int = 0
    seconds: float = 0.0
    is_exceeded: bool = False

    def is_used_up(self, writes: int = WRITES) -> bool:
        """Return whether the attempt has made this many writes, or used the corresponding share of `WRITE_SECONDS`.

        If it has, set `is_exceeded`.
        """
        used_up = self.writes >= writes or self.seconds >= WRITE_SECONDS * writes / WRITES
        self.is_exceeded |= used_up
        return used_up


def in_turn(items: Iterable[T], namespace: Callable[[T], str], after: str | None) -> Iterator[T]:
    """Return the items in an order in which the namespaces take turns.

    Args:
        namespace: The function that returns the namespace of an item.
        after: The namespace that was served last, or None. The namespaces after it in alphabetical order come first.
    """
    return by_turns(items, namespace, lambda name: (after is not None and name <= after, name))


class Backoffs:
    """Exponential backoff with a separate pause for each key.

    When `LONGEST_PAUSE` seconds have passed since the end of its last pause, a key starts again with `FIRST_PAUSE`.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: dict[tuple[str, ...], tuple[float, float]] = {}  # By key, the length of the pause and its end.
        self._cleanup_size = _FEW

    def remaining(self, *key: str) -> float:
        """Return the seconds until the pause of this key ends, or 0 if it is not paused."""
        _, until = self._pauses.get(key, (0.0, 0.0))
        return max(0.0, until - self._clock())

    def extend(self, *key: str) -> None:
        """Begin a pause. It is twice as long as the last one of this key, up to `LONGEST_PAUSE`."""
        now = self._clock()
        before, until = self._pauses.get(key, (0.0, 0.0))
        pause = FIRST_PAUSE if until <= now - LONGEST_PAUSE else min(max(2 * before, FIRST_PAUSE), LONGEST_PAUSE)
        self._pauses[key] = pause, now + pause
        if len(self._pauses) > self._cleanup_size:
            self._pauses = {k: row for k, row in self._pauses.items() if row[1] > now - LONGEST_PAUSE}
            self._cleanup_size = 2 * len(self._pauses) + _FEW

    def reset(self, *key: str) -> None:
        self._pauses.pop(key, None)


class WriteBackoffs:
    """The pauses of MtgpuPods whose writes fail or are slow, and of their namespaces.

    After a slow write the whole namespace pauses, because the writes for its other MtgpuPods may be as slow.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._backoffs = Backoffs(clock)
        self._rests: dict[str, float] = {}  # By namespace, the end of its pause after a slow write.

    def remaining(self, node: str, namespace: str, uid: str) -> float:
        """Return the seconds until the MtgpuPod may be written, or 0 if it may be written now."""
        rest = self._rests.get(namespace, 0.0) - self._clock()
        return max(0.0, rest, self._backoffs.remaining(node, uid))

    def failed(self, node: str, namespace: str, uid: str, seconds: float) -> None:
        """Record a write that failed, or was slow, and took this many seconds."""
        self._backoffs.extend(node, uid)
        if seconds < SLOW_SECONDS:
            return
        now = self._clock()
        self._rests = {name: until for name, until in self._rests.items() if until > now}
        self._rests[namespace] = now + _REST_FACTOR * seconds

    def succeeded(self, node: str, namespace: str, uid: str, seconds: float) -> None:
        """Record a write that succeeded and took this many seconds."""
        if seconds < SLOW_SECONDS:
            self._backoffs.reset(node, uid)
        else:
            self.failed(node, namespace, uid, seconds)
