"""Measures the time and the memory of a call, and compares them with those of an ordinary call.

Times are the thread's own CPU time and memory is what Python allocates, so that a busy machine changes neither much.
All assertions are ratios: no figure of this machine is in any test.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from tests.examples import SOAK

LARGE = 1 << 20 if SOAK else 1 << 15
"""Bytes of a large input. An API server stores up to 1.5 MiB; disproportion shows at 32 KiB as well."""
_REPEATS = 2
_AGAIN = 6
"""Another process may have delayed a call: it is measured as often before it counts as slow."""


@dataclass(frozen=True)
class Cost:
    """The cost of a call.

    seconds: the least CPU time of several calls.
    peak: the most bytes that were allocated at once during the call.
    """

    seconds: float
    peak: int


def cost(call: Callable[[], object], repeats: int = _REPEATS) -> Cost:
    """Return the cost of the cheapest of several calls, because the first one may import modules or fill caches."""
    seconds = min(_timed(call) for _ in range(repeats))
    return Cost(seconds, _peak(call))


def least(one: Cost, other: Cost) -> Cost:
    """Return the smaller values of two measurements of the same call."""
    return Cost(min(one.seconds, other.seconds), min(one.peak, other.peak))


def _timed(call: Callable[[], object]) -> float:
    gc.disable()
    try:
        began = time.thread_time()
        call()
        return time.thread_time() - began
    finally:
        gc.enable()


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def takes_at_most(call: Callable[[], object], seconds: float) -> None:
    """Assert that the call takes at most so much CPU time, once of several times."""
    least = _timed(call)
    for _ in range(_AGAIN):
        if least <= seconds:
            break
        least = min(least, _timed(call))
    assert least <= seconds, f"{least / seconds:.1f} times as long"


def in_proportion(call: Callable[[], object], to: Cost, time_factor: float, memory_factor: float) -> None:
    """Assert that neither time nor memory is more than so many times that of the other call."""
    takes_at_most(call, time_factor * to.seconds)
    peak = _peak(call)
    assert peak <= memory_factor * to.peak, f"{peak / to.peak:.1f} times the memory"
