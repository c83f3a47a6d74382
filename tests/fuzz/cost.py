"""What a call costs, and the ordinary call that it is compared with.

Times are the thread's own CPU time and memory is what Python allocates, so that a busy machine changes neither much.
All assertions are ratios: no figure of this machine is in any test.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from tests.examples import SOAK

LARGE = 1 << 20 if SOAK else 1 << 16
"""Bytes of what is sent. An API server stores up to 1.5 MiB; disproportion shows at 64 KiB as well."""
_REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """seconds: of CPU, the least of a few calls. peak: bytes allocated at once, beyond what was there before."""

    seconds: float
    peak: int


def cost(call: Callable[[], object]) -> Cost:
    call()  # what is imported or cached at the first call is nobody's cost
    return Cost(min(_timed(call) for _ in range(_REPEATS)), _peak(call))


def _timed(call: Callable[[], object]) -> float:
    gc.collect()
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
