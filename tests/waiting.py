"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T | None], seconds: float = 60.0) -> T:
    """What `found` returns as soon as it is true; fails after `seconds`.

    The pauses grow to 50 ms: a look may cost milliseconds of the machine that it waits for.
    """
    began = time.monotonic()
    while not (value := found()):
        waited = time.monotonic() - began
        assert waited < seconds, "did not happen in time"
        time.sleep(min(max(0.005, waited / 10), 0.05))
    return value
