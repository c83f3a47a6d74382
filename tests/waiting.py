"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T | None], seconds: float = 60.0) -> T:
    """What `found` returns as soon as it is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)
    return value
