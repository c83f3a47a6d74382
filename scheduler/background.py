"""Paces long work with short sleeps, so that other threads get the GIL in between.

The engine's long calls (`decisions.effort_budgets`), the web page, the metrics and gpushare's `/inspect` call a `Pace`
between the steps of their work. Without it, work such as rendering the page would hold the interpreter for its whole
time slice again and again while calls of kube-scheduler wait.
"""

import time
from collections.abc import Callable

_WORK_SECONDS = 0.002
"""The time for which work runs before a pause."""
_MAX_WORK_SECONDS = 0.005
"""The longest work that counts for the length of a pause. A step that took longer has waited for the CPU or the GIL."""


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
