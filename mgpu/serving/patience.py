"""Sockets that wait for their peer for a while and no longer: who sends or reads slowly holds a thread for that while.

A limit for each read would be none, since a byte now and then meets it for ever. What counts is all the waiting of one
request, for what is sent and for what is read; the server's own work does not, so that long answers stay whole.
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
"""As long as the API server waits for a webhook that does not say otherwise."""


class PatientSocket(socket.socket):
    """Its timeout is what is left of the patience. gunicorn makes it blocking before each request: then it is whole.

    A peer that uses it up is taken for one that has reset the connection.
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
                "closed a connection: its client kept it waiting for %g s",
                PATIENCE_SECONDS,
                extra={"client": self.getpeername(), "address": self.getsockname()},
            )
            raise ConnectionResetError(errno.ECONNRESET, "the client was waited for in vain")
        self.settimeout(left)
        return result


class PatientTLS(PatientSocket, ssl.SSLSocket):
    """The same over TLS."""
