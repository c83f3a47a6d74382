"""HAMi-core's shared file, made from a C structure with ctypes, so that the offsets are the compiler's.

The fields are those of src/multiprocess/multiprocess_memory_limit.h in HAMi-core (commit 8f3a89c6, June 2026); `sem_t`
has 32 bytes on 64-bit Linux with glibc.
"""

import ctypes
from ctypes import c_char, c_int, c_int32, c_size_t, c_uint32, c_uint64

MAGIC = 19920718


class _Memory(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("context", "module", "data", "offset", "total")] + [
        ("unused", c_uint64 * 3)
    ]


class _Utilization(ctypes.Structure):
    _fields_ = [("dec", c_uint64), ("enc", c_uint64), ("sm", c_uint64), ("unused", c_uint64 * 3)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", c_int32),
        ("hostpid", c_int32),
        ("used", _Memory * 16),
        ("monitorused", c_uint64 * 16),
        ("utilization", _Utilization * 16),
        ("status", c_int32),
        ("seqlock", c_uint64),
        ("unused", c_uint64 * 2),
    ]


class Region(ctypes.Structure):
    """The structure `shared_region_t`."""

    _fields_ = [
        ("initialized", c_int32),
        ("major", c_uint32),
        ("minor", c_uint32),
        ("sm_init", c_int32),
        ("owner", c_size_t),
        ("sem", c_char * 32),
        ("device_num", c_uint64),
        ("uuids", (c_char * 96) * 16),
        ("limit", c_uint64 * 16),
        ("sm_limit", c_uint64 * 16),
        ("procs", _Process * 1024),
        ("proc_num", c_int),
        ("utilization_switch", c_int),
        ("recent_kernel", c_int),
        ("priority", c_int),
        ("last_kernel_time", c_uint64),
        ("sem_postinit", c_char * 32),
    ]


def region(*uuids: str, limit: int = 0) -> Region:
    """Return the structure as the library initializes it for a container with these cards."""
    made = Region(initialized=MAGIC, major=1, minor=2, device_num=len(uuids))
    for i, uuid in enumerate(uuids):
        made.uuids[i].value = uuid.encode()
        made.limit[i] = limit
    return made


def add_process(made: Region, pid: int, card: int, memory: int, sm: int = 0) -> None:
    process = made.procs[made.proc_num]
    process.pid = pid
    process.used[card].total = memory
    process.utilization[card].sm = sm
    made.proc_num += 1
