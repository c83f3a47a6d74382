"""Defines sockets that limit how long a request waits for its client, because a slow client occupies a thread.

A timeout for each read is not enough: a client that sends a byte now and then never exceeds it. These sockets limit the
total time for which the reads and writes of one request wait. The time that the server takes to compute an answer does
not count. `mgpu.serving.worker` and, with TLS, `mgpu.serving.tls_context` use these sockets.
"""

import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE_SECONDS = 10.0
"""The longest time that the reads and writes of one request wait, in total. The API server waits equally long for a
webhook whose configuration sets no `timeoutSeconds`."""


_MOST_HELD = 1 << 16
"""The most bytes that a socket collects before it sends them."""


class PatientSocket(socket.socket):
    """A socket whose timeout is the part of PATIENCE_SECONDS that is left for the current request.

    gunicorn calls `setblocking(True)` before each request, which sets the timeout to PATIENCE_SECONDS again. When the
    time is up, the socket raises ConnectionResetError, as if the peer had reset the connection. gunicorn closes such a
    connection silently.
    """

    _held: bytearray | None = None

    def hold(self) -> None:
        """Collect what is sent from now on until `release`."""
        self._held = bytearray()

    def release(self) -> None:
        """Send what was collected, and collect no more."""
        held, self._held = self._held, None
        if held:
            self.sendall(held)

    def setblocking(self, flag: bool) -> None:
        self.settimeout(PATIENCE_SECONDS if flag else 0.0)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._limit(super().recv, buflen, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        return self._limit(super().send, data, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        if self._held is not None and len(self._held) + len(data) <= _MOST_HELD:
            self._held += data
            return
        self.release()
        self._limit(super().sendall, data, flags)

    def _limit(self, call: Callable[..., T], *arguments: Any) -> T:
        timeout = self.gettimeout()
        if not timeout:
            return call(*arguments)
        until = time.monotonic() + timeout
        try:
            result = call(*arguments)
        except TimeoutError:
            left = 0.0
        else:
            left = until - time.monotonic()
        if left <= 0:
            _log.info(
                "Closing a connection: its client kept a request waiting for %g s",
                PATIENCE_SECONDS,
                extra={"client": self.getpeername(), "address": self.getsockname()},
            )
            raise ConnectionResetError(errno.ECONNRESET, "the client did not send or read in time")
        self.settimeout(left)
        return result


class PatientTLS(PatientSocket, ssl.SSLSocket):
    """A PatientSocket with TLS."""
