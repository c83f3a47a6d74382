"""Configures the heap of the C library for many threads with requests of very different sizes.

`mgpu.serving.server` calls the function before it forks the workers.
"""

import ctypes
import logging

_log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # the values in glibc's malloc.h
_LARGE = 1 << 20  # bytes
_ARENAS = 2


def configure_heap() -> None:
    """Make glibc return large blocks to the system when they are freed, and share heaps between threads.

    By default glibc keeps freed blocks of up to 32 MiB in the heap of the thread: after 64 consecutive requests of
    2 MiB, two processes still had 550 MiB. Call this function before the workers are forked. It has no effect with a C
    library without `mallopt`.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        _log.debug("the C library has no mallopt; its defaults apply")
        return
    for setting, value in ((_ARENA_MAX, _ARENAS), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE)):
        mallopt(setting, value)
