"""Bounds the connections of unauthenticated peers, shared fairly between their addresses.

An attacker can open connections faster than any time limit ends them. So the limit is a number, and a full room closes
the oldest connection of the address that has the most. A peer with few connections keeps them, whatever another address
does. A newcomer from the attacker's own address, for example behind the same NAT gateway, still gets in: its handshake
takes milliseconds, and an attacker would have to open a whole room of connections within that time.
"""

import threading
from typing import Generic, TypeVar

from mgpu.model.addresses import Block, counting_block

T = TypeVar("T")


class ConnectionLimit(Generic[T]):
    """At most `size` connections. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._block: dict[T, Block | None] = {}
        self._of: dict[Block | None, dict[T, None]] = {}

    def add(self, connection: T, peer: str) -> T | None:
        """Take a connection of this peer. Returns the connection that must be closed in its place, if any.

        It is no longer in the room.
        """
        block = counting_block(peer)
        with self._lock:
            self._block[connection] = block
            self._of.setdefault(block, {})[connection] = None
            if len(self._block) <= self._size:
                return None
            largest = max(self._of, key=lambda block: len(self._of[block]))
            oldest = next(iter(self._of[largest]))
            self._remove(oldest)
            return oldest

    def discard(self, connection: T) -> None:
        """Remove a connection if it is here."""
        with self._lock:
            if connection in self._block:
                self._remove(connection)

    def __contains__(self, connection: T) -> bool:
        return connection in self._block

    def __len__(self) -> int:
        return len(self._block)

    def _remove(self, connection: T) -> None:
        block = self._block.pop(connection)
        del self._of[block][connection]
        if not self._of[block]:
            del self._of[block]
