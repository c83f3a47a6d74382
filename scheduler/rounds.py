"""Work that a thread repeats until the process ends, such as that of the controllers of claims.

Controllers that react to events have a queue instead (`scheduler.work_queue`).
"""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def run_rounds(name: str, work: Callable[[], None], seconds: float, stop: threading.Event) -> None:
    """Call `work` until `stop` is set, with this pause after each call. Setting `stop` also ends the pause.

    Args:
        name: What is done, for the log.
    """
    while not stop.is_set():
        try:
            work()
        except Exception:
            # This is the outermost handler of the thread. An error with one object must not end the work for others.
            log.exception("%s: round failed", name)
        stop.wait(seconds)
