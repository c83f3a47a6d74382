"""The C library's heap, set up for requests of very different sizes in many threads."""

import ctypes
import logging

_log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as in glibc's malloc.h
_LARGE = 1 << 20
_ARENAS = 2


def return_memory() -> None:
    """Have large blocks go back to the system when they are freed, and threads share heaps.

    By itself glibc keeps blocks of up to 32 MiB in the heap of the thread that freed them: 64 requests of 2 MiB each,
    one after the other, left 550 MiB behind in two processes. Other C libraries have no such settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        _log.debug("the C library has no mallopt; memory is returned as it sees fit")
        return
    for setting, value in ((_ARENA_MAX, _ARENAS), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE)):
        mallopt(setting, value)
