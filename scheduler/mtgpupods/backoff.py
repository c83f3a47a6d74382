"""How soon something may be made again that goes as soon as it is made: after pauses that grow. And which MtgpuPods are
put off, since their writes fail or take long.
"""

from collections.abc import Callable

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
_FEW = 100


class Paces:
    """By any key. What has been let alone for as long as the longest pause is as if it had never been made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paces: dict[tuple[str, ...], tuple[float, float]] = {}  # pause, and until when
        self._many = _FEW

    def left(self, *key: str) -> float:
        """How many seconds it is too early; 0 where it may be made."""
        _, until = self._paces.get(key, (0.0, 0.0))
        return max(0.0, until - self._clock())

    def slow(self, *key: str) -> None:
        """The next one is to wait longer than this one had to."""
        now = self._clock()
        before, until = self._paces.get(key, (0.0, 0.0))
        pause = FIRST_PAUSE if until <= now - LONGEST_PAUSE else min(max(2 * before, FIRST_PAUSE), LONGEST_PAUSE)
        self._paces[key] = pause, now + pause
        if len(self._paces) > self._many:
            self._paces = {k: pace for k, pace in self._paces.items() if pace[1] > now - LONGEST_PAUSE}
            self._many = 2 * len(self._paces) + _FEW

    def forget(self, *key: str) -> None:
        """It is well."""
        self._paces.pop(key, None)


SLOW = 1.0
"""Seconds: an ordinary write takes 5 to 10 ms. A tenant makes an MtgpuPod large enough that one takes longer."""
_RESTS = 2
"""A namespace rests for so many times the seconds of its slow write: slow writes take a third of the time at most."""


class Waits:
    """Which MtgpuPods are put off, by node and uid, and which namespaces rest.

    A write that fails puts off its own MtgpuPod, each time for longer. So does a slow one, and its namespace rests: the
    other MtgpuPods of a tenant may be as slow, and there is one thread for all namespaces.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paces = Paces(clock)
        self._rests: dict[str, float] = {}

    def left(self, node: str, namespace: str, uid: str) -> float:
        """Return for how many seconds the MtgpuPod is put off; 0 where it is not."""
        rest = self._rests.get(namespace, 0.0) - self._clock()
        return max(0.0, rest, self._paces.left(node, uid))

    def failed(self, node: str, namespace: str, uid: str, seconds: float) -> None:
        """seconds: that the write took."""
        self._paces.slow(node, uid)
        self._rest(namespace, seconds)

    def worked(self, node: str, namespace: str, uid: str, seconds: float) -> None:
        if seconds < SLOW:
            self._paces.forget(node, uid)
        else:
            self.failed(node, namespace, uid, seconds)

    def _rest(self, namespace: str, seconds: float) -> None:
        now = self._clock()
        self._rests = {name: until for name, until in self._rests.items() if until > now}
        if seconds >= SLOW:
            self._rests[namespace] = now + _RESTS * seconds
