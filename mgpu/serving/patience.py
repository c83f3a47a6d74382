"""Sockets that bound how long a request waits for its client, because a slow client holds a thread.

A limit for each read is no limit: a client that sends a byte now and then meets it for ever. These sockets bound the
sum of all waiting of one request, for reads and writes. The server's own work does not count, so that answers that take
long to compute are complete.
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
"""The default time that the API server waits for a webhook."""


class PatientSocket(socket.socket):
    """A socket whose timeout is the rest of the request's patience.

    gunicorn makes a socket blocking before each request, which resets the patience. A peer that uses it up is treated
    as one that reset the connection.
    """

    def setblocking(self, flag: bool) -> None:
        self.settimeout(PATIENCE_SECONDS if flag else 0.0)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._patiently(super().recv, buflen, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        return self._patiently(super().send, data, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._patiently(super().sendall, data, flags)

    def _patiently(self, call: Callable[..., T], *arguments: Any) -> T:
        patience = self.gettimeout()
        if not patience:
            return call(*arguments)
        until = time.monotonic() + patience
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
