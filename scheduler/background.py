"""Pacing of background work, so that request threads get the interpreter in between.

Python runs one thread at a time. Work such as rendering the page would hold the interpreter for its whole time slice
again and again while calls of kube-scheduler wait.
"""

import time
from collections.abc import Callable

_PIECE_SECONDS = 0.002
_LONGEST_SECONDS = 0.005
"""A piece that took longer was itself waiting for other work of the machine; the pause does not grow with that."""


class Pace:
    """Call it between two steps of background work: it sleeps now and then. For one thread at a time.

    Attributes:
        rests: How many times as long as it has worked it sleeps; may be changed.
    """

    def __init__(self, rests: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self.rests = rests
        self._sleep = sleep
        self._since = time.monotonic()

    def __call__(self) -> None:
        """Sleep if the work since the last sleep has taken a piece's time."""
        worked = time.monotonic() - self._since
        if worked > _PIECE_SECONDS:
            self._sleep(self.rests * min(worked, _LONGEST_SECONDS))
            self._since = time.monotonic()
