"""Work that nobody's pod waits for, in pieces: the interpreter is one, and those who decide have it in between."""

import time
from collections.abc import Callable

_PIECE_SECONDS = 0.002
_LONGEST_SECONDS = 0.005
"""What took longer was kept waiting itself, by other work of the machine."""


class Pace:
    """Called between two steps of such work, whatever they take; it rests now and then. Of one thread at a time.

    rests: how many times as long as it has worked; may be changed.
    """

    def __init__(self, rests: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self.rests, self._sleep, self._since = rests, sleep, time.monotonic()

    def __call__(self) -> None:
        worked = time.monotonic() - self._since
        if worked > _PIECE_SECONDS:
            self._sleep(self.rests * min(worked, _LONGEST_SECONDS))
            self._since = time.monotonic()
