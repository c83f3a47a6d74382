"""Paces long work with short sleeps, so that other threads get the GIL in between.

Long searches (`decisions.effort_budgets`), the web page, the metrics (`api.collector`) and `api.gpushare_compat` call a
`Pace` between the steps of their work. Without it, such work would hold the GIL for a whole switch interval again and
again, while calls of kube-scheduler wait.
"""

import time
from collections.abc import Callable

_WORK_SECONDS = 0.002
"""After this time of work, the next call of a Pace sleeps."""
_MAX_WORK_SECONDS = 0.005
"""The length of a pause is computed from at most this time of work.

Work that took longer has probably waited for the CPU or the GIL.
"""


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
        """Sleep if the last sleep ended more than `_WORK_SECONDS` ago."""
        worked = time.monotonic() - self._work_began
        if worked > _WORK_SECONDS:
            self._sleep(self.pause_ratio * min(worked, _MAX_WORK_SECONDS))
            self._work_began = time.monotonic()
