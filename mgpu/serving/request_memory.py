"""Bounds the memory that all requests of a process hold together.

Every user who may create pods can make the API server send reviews of several MiB, and only the size of a body is known
before it is read. So a body is counted while it is read, and its size in memory is estimated before it is decoded: a
list of empty objects takes 24 times its text. A request that does not fit gets 503, so that the API server applies
`failurePolicy`. Ordinary reviews have a budget of their own, so that a flood of large ones does not delay them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from mgpu.model.errors import RetryLater

MIB = 1 << 20
ORDINARY = 2 * MIB
"""The largest estimated decoded size of an ordinary request: that of a review of 100 KiB."""
_FREE = 64 << 10
"""Bytes of each body that are not counted: 4 MiB for 64 threads."""
_CHUNK = 64 << 10
_NARROW = (b"\\u0026", b"\\u003c", b"\\u003e")
_PATIENCE = 1.0
"""Seconds that a request waits for memory. A large review takes 0.1 s; API servers wait 1 to 5 s for an answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in bytes.

    Attributes:
        body: one body. bodies: all bodies while they are read.
        ordinary: all ordinary requests together, decoded. large: all others together, decoded.
    """

    body: int
    bodies: int
    ordinary: int
    large: int


REVIEWS = Limits(body=8 * MIB, bodies=16 * MIB, ordinary=24 * MIB, large=80 * MIB)
"""The limits of admission. The API server accepts requests of up to 3 MiB and stores objects of up to 1.5 MiB; a
review contains two objects, as JSON and with defaults. Two pods of 600 containers and 1.6 MiB each are estimated at
60 MiB. The sum is 120 MiB: two processes, with their own memory, fit into the webhook's limit of 384 MiB.
"""

EXTENDER = Limits(body=256 * MIB, bodies=256 * MIB, ordinary=16 * MIB, large=640 * MIB)
"""The limits of the extender, which only kube-scheduler calls. With `nodeCacheCapable: false` each call has all
Nodes: 5,000 of them with 50 images each are 94 MiB. They take 240 MiB, since most keys repeat, and are estimated at
567 MiB.
"""


class TooLarge(Exception):
    """The body is larger than the limit."""


class Busy(RetryLater):
    """Other requests hold the memory that this one needs."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Room:
    """A number of bytes that requests share. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size
        self._freed = threading.Condition()

    def take(self, amount: int, patience: float) -> bool:
        with self._freed:
            if not self._freed.wait_for(lambda: self._free >= amount, patience):
                return False
            self._free -= amount
            return True

    def give(self, amount: int) -> None:
        with self._freed:
            self._free += amount
            self._freed.notify_all()


class RequestMemory:
    """The requests of one app that are in progress. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies, self._ordinary, self._large = map(_Room, (limits.bodies, limits.ordinary, limits.large))

    @contextmanager
    def body(self, stream: _Stream) -> Iterator[bytearray]:
        """Read the body in `stream` to its end, and reserve its decoded size until the block ends.

        Raises TooLarge and Busy.
        """
        found, counted = bytearray(), 0
        try:
            while chunk := stream.read(_CHUNK):
                found += chunk
                if len(found) > self._limits.body:
                    raise TooLarge(f"the body is larger than {self._limits.body} bytes")
                more = max(0, len(found) - _FREE) - counted
                # Do not wait here: a slow sender would hold the memory for which others wait.
                if more and not self._bodies.take(more, 0):
                    raise _busy()
                counted += more
            with self._decoding(found):
                yield found
        finally:
            self._bodies.give(counted)

    @contextmanager
    def _decoding(self, body: bytearray) -> Iterator[None]:
        amount = estimate_decoded_size(body)
        room = self._ordinary if amount <= ORDINARY else self._large
        if amount > room.size:
            raise TooLarge(f"the body takes {amount // MIB} MiB when it is decoded, more than {room.size // MIB} MiB")
        if not room.take(amount, _PATIENCE):
            raise _busy()
        try:
            yield
        finally:
            room.give(amount)


def estimate_decoded_size(body: bytes | bytearray) -> int:
    """Return an upper bound of the bytes that the JSON in `body` takes when decoded.

    Braces, quotes and commas within strings count as structure: to tell them apart would be to decode the text.
    """
    quotes, commas, colons = body.count(b'"'), body.count(b","), body.count(b":")
    # Go escapes &, < and >, which every shell script contains. They are ASCII: one byte each when decoded.
    wide = body.count(b"\\u") > sum(map(body.count, _NARROW)) or not body.isascii()
    lists, empty = body.count(b"["), body.count(b"{}")
    objects = body.count(b"{") - empty
    texts = len(body) * (4 if wide else 1) + 28 * quotes
    numbers = 32 * max(0, 1 + commas + colons - quotes // 2)
    return texts + numbers + 64 * empty + 190 * objects + 44 * colons + 72 * lists + 12 * commas


def _busy() -> Busy:
    return Busy("other requests hold the memory that this one needs; ask again")
