"""Paces long work with short sleeps, so that other threads get the GIL in between.

Mainly long searches (`decisions.effort_budgets`) and the web page call a `Pace` between the steps of their work.
Without it, such work would hold the GIL for a whole switch interval again and again, while calls of kube-scheduler
wait.
"""

import time
from collections.abc import Callable

_WORK_SECONDS = 0.002
"""The time for which work runs before a pause."""
_MAX_WORK_SECONDS = 0.005
"""The longest work that counts for the length of a pause. A longer step has probably waited for the CPU or the GIL."""


class Pace:
    """A function that sleeps in some of its calls. Only one thread at a time may call it.

    Attributes:
        pause_ratio: The duration of a pause as a multiple of the work before it. It may be changed between two calls.
    """

    def __init__(self, pause_ratio: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self.pause_ratio = pause_ratio
        self._sleep = sleep
        self._work_began = time.monotonic()

    def __call__(self) -> None:
        """Sleep if the work since the last sleep has taken long enough."""
        worked = time.monotonic() - self._work_began
        if worked > _WORK_SECONDS:
            self._sleep(self.pause_ratio * min(worked, _MAX_WORK_SECONDS))
            self._work_began = time.monotonic()
