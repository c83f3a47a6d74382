"""Paces background work, so that request threads get the GIL in between.

The extender's long calls, the web page and the metrics call a `Pace` between the steps of their work. Without it, work
such as rendering the page would hold the interpreter for its whole time slice again and again while calls of
kube-scheduler wait.
"""

import time
from collections.abc import Callable

_WORK_SECONDS = 0.002
_MAX_WORK_SECONDS = 0.005
"""The most work for which a pause compensates. A step that took longer was waiting for other work of the machine."""


class Pace:
    """Sleeps now and then when it is called. For one thread at a time.

    Attributes:
        pause_ratio: The duration of the pauses as a multiple of the work; may be changed.
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
