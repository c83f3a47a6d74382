"""Limits the memory that all requests of an app use together.

Every user who may create pods can make the API server send reviews of several MiB, and the size of a decoded body is
not known before it is decoded: a list of empty objects takes 24 times the size of its text. So the bytes of a body are
counted while it is read, and its decoded size is estimated. The estimate must never be lower than the real size.

A request gets 503 if there is too little memory because of other requests, and 413 if it would not fit alone. In both
cases the API server applies `failurePolicy`. Ordinary requests have a limit of their own, so that a flood of large ones
does not delay them. `mgpu.serving.app` reads every body through `RequestMemory`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from mgpu.model.errors import RetryLater

MIB = 1 << 20
ORDINARY = 2 * MIB
"""The largest estimated decoded size of an ordinary request, in bytes. A review of about 100 KiB has this size."""
_UNCOUNTED = 64 << 10
"""The number of bytes at the beginning of each body that do not count towards `Limits.bodies`. The bodies of 64 threads
have at most 4 MiB of such bytes together."""
_CHUNK = 64 << 10
_ASCII_ESCAPES = (b"\\u0026", b"\\u003c", b"\\u003e")
_WAIT_SECONDS = 1.0
"""The longest time that a request waits for memory. A large review takes 0.1 s, and the webhook configurations let the
API server wait 1 to 5 s for an answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an app, in bytes.

    Attributes:
        body: the most bytes of one body.
        bodies: the most bytes of the bodies of all requests together. A body counts until its request ends.
        ordinary: the most bytes of all ordinary requests together, when they are decoded.
        large: the most bytes of all other requests together, when they are decoded.
    """

    body: int
    bodies: int
    ordinary: int
    large: int


REVIEWS = Limits(body=8 * MIB, bodies=16 * MIB, ordinary=24 * MIB, large=80 * MIB)
"""The limits of admission. The API server accepts requests of up to 3 MiB and stores objects of up to 1.5 MiB. The
review of an update contains the old and the new object. Both are JSON, in which the API server has filled in the
defaults, so they are larger than they were in the request. Two pods of 600 containers and 1.6 MiB each are estimated at
60 MiB. All limits together are 120 MiB, so that two worker processes fit into the webhook's memory limit of 384 MiB.
"""

EXTENDER = Limits(body=256 * MIB, bodies=256 * MIB, ordinary=16 * MIB, large=640 * MIB)
"""The limits of the extender, which kube-scheduler calls. With `nodeCacheCapable: false` each call contains all
Nodes. 5,000 Nodes with 50 images each are 94 MiB of JSON. Decoded they take 240 MiB, since most keys repeat, and they
are estimated at 567 MiB.
"""


class TooLarge(Exception):
    """The body is larger than a limit, so it would not fit even without other requests."""


class Busy(RetryLater):
    """Other requests use the memory that this request needs."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Budget:
    """An amount of memory that requests share. It is thread-safe: `_freed` guards the free amount."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size
        self._freed = threading.Condition()

    def take(self, amount: int, seconds: float) -> bool:
        """Take the amount, and return True. If it is not free within `seconds`, return False."""
        with self._freed:
            if not self._freed.wait_for(lambda: self._free >= amount, seconds):
                return False
            self._free -= amount
            return True

    def give_back(self, amount: int) -> None:
        with self._freed:
            self._free += amount
            self._freed.notify_all()


class RequestMemory:
    """The memory of the requests of one app. It is thread-safe, because its budgets are."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies = _Budget(limits.bodies)
        self._ordinary = _Budget(limits.ordinary)
        self._large = _Budget(limits.large)

    def check_length(self, length: int) -> None:
        """Raise TooLarge if a body of this length, in bytes, exceeds the limit."""
        if length > self._limits.body:
            raise TooLarge(f"the body is larger than {self._limits.body} bytes")

    @contextmanager
    def read(self, stream: _Stream) -> Iterator[bytearray]:
        """Read the body in `stream` to its end, and reserve its decoded size until the `with` block ends.

        Raises TooLarge if the body alone exceeds a limit, and Busy if other requests use the memory.
        """
        body = bytearray()
        counted = 0
        try:
            while chunk := stream.read(_CHUNK):
                body += chunk
                self.check_length(len(body))
                more = max(0, len(body) - _UNCOUNTED) - counted
                # Do not wait here: a slow sender would hold the memory for which others wait.
                if more and not self._bodies.take(more, 0):
                    raise _busy()
                counted += more
            with self._reserve_decoded(body):
                yield body
        finally:
            self._bodies.give_back(counted)

    @contextmanager
    def _reserve_decoded(self, body: bytearray) -> Iterator[None]:
        amount = estimate_decoded_size(body)
        budget = self._ordinary if amount <= ORDINARY else self._large
        if amount > budget.size:
            raise TooLarge(f"the body takes {amount // MIB} MiB when it is decoded, more than {budget.size // MIB} MiB")
        if not budget.take(amount, _WAIT_SECONDS):
            raise _busy()
        try:
            yield
        finally:
            budget.give_back(amount)


def estimate_decoded_size(body: bytes | bytearray) -> int:
    """Return an upper bound of the memory that the JSON in `body` takes when decoded.

    Braces, quotes and commas within strings count as structure, because only decoding could distinguish them. The
    factors are the sizes of CPython's objects.
    """
    quotes, commas, colons = body.count(b'"'), body.count(b","), body.count(b":")
    # CPython stores a text with at most 4 bytes per character, but with one byte if all characters are ASCII. Go's
    # encoder writes &, < and >, which are ASCII, as \u0026, \u003c and \u003e, so these escapes do not count as wide.
    wide = body.count(b"\\u") > sum(map(body.count, _ASCII_ESCAPES)) or not body.isascii()
    lists, empty = body.count(b"["), body.count(b"{}")
    objects = body.count(b"{") - empty
    texts = len(body) * (4 if wide else 1) + 28 * quotes
    numbers = 32 * max(0, 1 + commas + colons - quotes // 2)
    return texts + numbers + 64 * empty + 190 * objects + 44 * colons + 72 * lists + 12 * commas


def _busy() -> Busy:
    return Busy("other requests use the memory that this request needs; try again")
