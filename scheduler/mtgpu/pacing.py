"""How soon something may be made again that goes as soon as it is made: after pauses that grow."""

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
