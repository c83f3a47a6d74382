"""A listening socket that can hang up on everybody it has let in."""

import asyncio
import contextlib
import socket
import weakref
from typing import Any

_TURNS = 3


class Listener(socket.socket):
    """Knows its connections until they are closed: those too that shake hands still, or came in while the listening
    ended, and that no server on top of asyncio has heard of.

    `port` 0 takes a free one. Raises OSError where nobody can listen at the address.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._open = True
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind((host, port))
        except OSError:
            self.close()
            raise

    @property
    def port(self) -> int:
        return int(self.getsockname()[1])

    async def ended(self) -> None:
        """Lets nobody in from now on, and returns when all that came are being served.

        asyncio loses a connection that came in the turn in which its server closes, and aiohttp waits for a handler
        that has not begun as if it worked: one turn makes the transport, one the handler, and in one that begins.
        """
        self._open = False
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def accept(self) -> tuple[socket.socket, Any]:
        if not self._open:
            raise BlockingIOError
        connection, address = super().accept()
        self._accepted.add(connection)
        return connection, address

    def hang_up(self) -> None:
        """Nothing more is read from or written to a connection. Who serves it sees that it ended, and closes it."""
        for connection in set(self._accepted):
            with contextlib.suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)

    async def closed(self) -> None:
        """Waits until every connection is closed, after `hang_up`."""
        while any(connection.fileno() >= 0 for connection in set(self._accepted)):
            await asyncio.sleep(0.001)
