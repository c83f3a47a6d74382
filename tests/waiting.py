"""Waits for what another thread or process does. Tests of every package use it."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T | None], seconds: float = 60.0) -> T:
    """Call `found` until its result is true, and return the result. Fails after `seconds`.

    The pauses grow with the time waited, up to 100 ms: a call of the API server takes milliseconds of CPU, on the
    machine whose processes must do what the test waits for.
    """
    began = time.monotonic()
    while not (value := found()):
        waited = time.monotonic() - began
        assert waited < seconds, "did not happen in time"
        time.sleep(min(max(0.01, waited / 4), 0.1))
    return value
