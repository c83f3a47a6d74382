"""What the requests of a process may hold in memory together, whoever sends them.

Any user who may create pods has the API server send reviews of several MiB, and nothing but its size is known of a body
before it is read. So a body is counted while it is read, and what it becomes when it is decoded is estimated before
that: a list of empty objects takes 24 times its text. What does not fit is answered with 503, so that the API server
applies `failurePolicy`. Ordinary reviews have room of their own, which large ones cannot take: a flood of large ones
does not delay them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from mgpu.model.errors import RetryLater

MIB = 1 << 20
ORDINARY = 2 * MIB
"""Bytes that an ordinary request takes at most when it is decoded, as `decoded` estimates: a review of 100 KiB."""
_FREE = 64 << 10
"""Bytes of each body that are not counted: with 64 threads they are 4 MiB in all."""
_CHUNK = 64 << 10
_NARROW = (b"\\u0026", b"\\u003c", b"\\u003e")
_PATIENCE = 1.0
"""Seconds that a request waits for room. A large review takes 0.1 s; API servers wait 1 to 5 s for an answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, in this order: of one body; of all bodies while they are read; of ordinary requests once they are decoded,
    together; of the others, together.
    """

    body: int
    bodies: int
    ordinary: int
    large: int


REVIEWS = Limits(body=8 * MIB, bodies=16 * MIB, ordinary=24 * MIB, large=80 * MIB)
"""Of admission. The API server takes requests of up to 3 MiB and stores objects of up to 1.5 MiB; a review holds both,
as JSON and with defaults filled in. `decoded` estimates 60 MiB for two pods of 600 containers and 1.6 MiB each. 120 MiB
in all: with what the processes themselves take, two of them fit into the webhook's limit of 384 MiB.
"""

EXTENDER = Limits(body=256 * MIB, bodies=256 * MIB, ordinary=16 * MIB, large=640 * MIB)
"""Of the extender, which only kube-scheduler can ask. With `nodeCacheCapable: false` each call brings all Nodes: 5,000
of them with 50 images each are 94 MiB. They take 240 MiB, since most keys repeat; `decoded` estimates 567 MiB.
"""


class TooLarge(Exception):
    """The body is larger than any may be."""


class Busy(RetryLater):
    """Other requests hold what this one needs."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Room:
    """So many bytes. Thread-safe."""

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


class InFlight:
    """The requests of one app that are being answered. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies, self._ordinary, self._large = map(_Room, (limits.bodies, limits.ordinary, limits.large))

    @contextmanager
    def body(self, stream: _Stream) -> Iterator[bytearray]:
        """The body in `stream`, read to its end; until the block ends, what it may become is reserved.

        Raises TooLarge and Busy.
        """
        found, counted = bytearray(), 0
        try:
            while chunk := stream.read(_CHUNK):
                found += chunk
                if len(found) > self._limits.body:
                    raise TooLarge(f"the body is larger than {self._limits.body} bytes")
                more = max(0, len(found) - _FREE) - counted
                # Nobody waits here: who sends slowly would hold the room for which others wait.
                if more and not self._bodies.take(more, 0):
                    raise _busy()
                counted += more
            with self._decoding(found):
                yield found
        finally:
            self._bodies.give(counted)

    @contextmanager
    def _decoding(self, body: bytearray) -> Iterator[None]:
        amount = decoded(body)
        room = self._ordinary if amount <= ORDINARY else self._large
        if amount > room.size:
            raise TooLarge(f"the body takes {amount // MIB} MiB when it is decoded, more than {room.size // MIB} MiB")
        if not room.take(amount, _PATIENCE):
            raise _busy()
        try:
            yield
        finally:
            room.give(amount)


def decoded(body: bytes | bytearray) -> int:
    """The bytes that the JSON in `body` takes at most once it is decoded: of its texts, and of the objects around them.

    Braces, quotes and commas within texts count too: to tell them apart is to decode it.
    """
    quotes, commas, colons = body.count(b'"'), body.count(b","), body.count(b":")
    # Go writes &, < and > as escapes, in every shell script for example. They are ASCII: one byte each, as the rest.
    wide = body.count(b"\\u") > sum(map(body.count, _NARROW)) or not body.isascii()
    lists, empty = body.count(b"["), body.count(b"{}")
    objects = body.count(b"{") - empty
    texts = len(body) * (4 if wide else 1) + 28 * quotes
    numbers = 32 * max(0, 1 + commas + colons - quotes // 2)
    return texts + numbers + 64 * empty + 190 * objects + 44 * colons + 72 * lists + 12 * commas


def _busy() -> Busy:
    return Busy("other requests hold the memory that this one needs; ask again")
