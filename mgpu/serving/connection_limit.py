"""Limits the number of connections, and shares it fairly between the addresses of the peers.

An attacker can open connections faster than any time limit ends them. So the number is limited, and a connection beyond
the limit replaces the oldest connection of the address that has the most connections. A peer with fewer connections
than another address keeps them. All IPv6 addresses of a /64 block count as one address.

A client behind the same NAT gateway as the attacker can still connect: its handshake takes milliseconds. To prevent the
handshake, the attacker would have to open as many connections in that time as the limit allows in total.
`mgpu.serving.worker` and the agent's HTTP server (`deviceplugin.health`) use this limit.
"""

import threading
from typing import Generic, TypeVar

from mgpu.model.addresses import Block, counting_block

T = TypeVar("T")


class ConnectionLimit(Generic[T]):
    """A set of at most `size` connections. It is thread-safe: `_lock` guards changes of both dicts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._block_of: dict[T, Block | None] = {}
        self._by_block: dict[Block | None, dict[T, None]] = {}

    def add(self, connection: T, peer: str) -> T | None:
        """Add a connection from the address `peer`, and return the connection that it replaces, or None.

        The caller must close the returned connection.
        """
        block = counting_block(peer)
        with self._lock:
            self._block_of[connection] = block
            self._by_block.setdefault(block, {})[connection] = None
            if len(self._block_of) <= self._size:
                return None
            largest = max(self._by_block, key=lambda block: len(self._by_block[block]))
            oldest = next(iter(self._by_block[largest]))
            self._remove(oldest)
            return oldest

    def discard(self, connection: T) -> None:
        with self._lock:
            if connection in self._block_of:
                self._remove(connection)

    def __contains__(self, connection: T) -> bool:
        return connection in self._block_of

    def __len__(self) -> int:
        return len(self._block_of)

    def _remove(self, connection: T) -> None:
        block = self._block_of.pop(connection)
        del self._by_block[block][connection]
        if not self._by_block[block]:
            del self._by_block[block]
