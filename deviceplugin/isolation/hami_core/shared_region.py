"""Reads and changes the file in which HAMi-core keeps the limits and the use of a container's processes.

The file is the structure `shared_region_t` of HAMi-core's src/multiprocess/multiprocess_memory_limit.h. Only the layout
of version 1.2 on 64-bit Linux is known here. The container can write anything into the file, so nothing in it is
trusted: amounts count only for the container's own cards, and the agent never follows a size or a number from the file.
"""

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAGIC = 19920718
VERSION = (1, 2)
DEVICES, SLOTS = 16, 1024
"""The numbers of cards and of processes for which the structure has room."""
SIZE = 2_008_952
_HEADER = struct.Struct("<iIIi")
_UUIDS, _UUID_BYTES = 64, 96
_LIMITS = 1600
_SM_LIMITS = 1728
_PROCESSES, _SLOT_BYTES = 1856, 1960
_COUNT = 2_008_896
_USED, _USED_BYTES, _TOTAL = 8, 64, 32
_UTILIZATION, _UTILIZATION_BYTES, _SM = 1160, 48, 16
_NUMBER = struct.Struct("<Q")
_PID = struct.Struct("<i")
"""Also the form of the number of processes."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """What the processes of a container use of one card, according to the library.

    Attributes:
        memory: The memory in bytes.
        sm: The percentage of the SMs.
        limit: The limit of the memory in bytes; 0 if there is none.
    """

    memory: int
    sm: int
    limit: int


class UnknownRegion(Exception):
    """The file is missing, is not initialized yet, or has a layout that is not known. The message says which."""


def read_region(file: Path) -> Mapping[str, CardUse]:
    """Return what is used of each card, by UUID. Raises UnknownRegion."""
    with _opened(file, os.O_RDONLY) as descriptor:
        content = os.pread(descriptor, SIZE, 0)
    _check(content)
    return {uuid: _use(content, i) for uuid, i in _cards(content)}


def write_limits(file: Path, limits: Mapping[str, int]) -> None:
    """Change the limits of the memory, in bytes by the UUID of the card. Raises UnknownRegion.

    The library reads a limit at each allocation. Each limit is one aligned word, which is written at once.
    """
    with _opened(file, os.O_RDWR) as descriptor:
        content = os.pread(descriptor, SIZE, 0)
        _check(content)
        places = dict(_cards(content))
        if missing := sorted(limits.keys() - places.keys()):
            raise UnknownRegion(f"the library has not seen card {missing[0]} yet")
        for uuid, limit in sorted(limits.items()):
            os.pwrite(descriptor, _NUMBER.pack(limit), _LIMITS + 8 * places[uuid])


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    """Open the file without following a link that the container has made. Raises UnknownRegion."""
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnknownRegion(f"the library's file cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnknownRegion("the library's file is not a regular file")
        yield descriptor
    except OSError as error:
        raise UnknownRegion(f"the library's file cannot be read or written: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _check(content: bytes) -> None:
    if len(content) < SIZE:
        raise UnknownRegion("no process has used the library yet, or its layout is not known")
    magic, *version, _ = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise UnknownRegion("no process has used the library yet")
    if tuple(version) != VERSION:
        known = ".".join(map(str, VERSION))
        raise UnknownRegion(f"the library's file has the layout {version[0]}.{version[1]}, and only {known} is known")


def _cards(content: bytes) -> Iterator[tuple[str, int]]:
    for i in range(DEVICES):
        start = _UUIDS + i * _UUID_BYTES
        text = content[start : start + _UUID_BYTES].partition(b"\0")[0]
        if text:
            yield text.decode("ascii", "replace"), i


def _use(content: bytes, card: int) -> CardUse:
    memory = sm = 0
    count = min(max(0, _PID.unpack_from(content, _COUNT)[0]), SLOTS)
    for slot in range(_PROCESSES, _PROCESSES + count * _SLOT_BYTES, _SLOT_BYTES):
        if _PID.unpack_from(content, slot)[0] > 0:
            memory += _number(content, slot + _USED + card * _USED_BYTES + _TOTAL)
            sm += _number(content, slot + _UTILIZATION + card * _UTILIZATION_BYTES + _SM)
    return CardUse(memory, sm, _number(content, _LIMITS + 8 * card))


def _number(content: bytes, at: int) -> int:
    return int(_NUMBER.unpack_from(content, at)[0])
