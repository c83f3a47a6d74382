"""Provides the listening socket of an API server, its certificate for loopback, and kubeconfigs for its clients.

`api_server` uses the socket; mainly `playground.cluster` and the tests use the rest.
"""

import asyncio
import base64
import contextlib
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from mgpu.serving.certificates import CA, CHAIN, KEY, renew_if_due

_LOOP_TURNS = 3


class Listener(socket.socket):
    """A listening socket that records its connections until they are closed, and can end all of them.

    The record is necessary because asyncio and aiohttp do not know the connections that are still in their TLS
    handshake, or that were accepted while the server was closing. If `port` is 0, the kernel chooses a free port.
    Raises OSError if the address cannot be bound.
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

    async def stop_accepting(self) -> None:
        """Accept no more connections, and return when each accepted one has a handler that has begun.

        asyncio loses a connection if its server closes in the turn of the event loop that accepted the connection, and
        aiohttp waits for a handler that has not begun as if it were serving a request. So this method waits for three
        turns: the first creates the transport, the second creates the handler, and in the third the handler begins.
        This depends on the internals of asyncio and aiohttp.
        """
        self._open = False
        for _ in range(_LOOP_TURNS):
            await asyncio.sleep(0)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection and remember it. Raises BlockingIOError after `stop_accepting`."""
        if not self._open:
            raise BlockingIOError
        connection, address = super().accept()
        self._accepted.add(connection)
        return connection, address

    def hang_up(self) -> None:
        """Shut down every connection. The server then reads the end of the stream and closes the connection."""
        for connection in set(self._accepted):
            with contextlib.suppress(OSError):  # the client closed it first
                connection.shutdown(socket.SHUT_RDWR)

    async def closed(self) -> None:
        """Wait until every connection is closed. Call `hang_up` first, since clients may keep connections open."""
        while any(connection.fileno() >= 0 for connection in set(self._accepted)):
            await asyncio.sleep(0.001)


def self_signed(folder: Path, names: tuple[str, ...] = ("localhost",)) -> tuple[str, str]:
    """Write a certificate for 127.0.0.1 and `names`, and its key, to `folder`.

    Return the paths of the certificate file and of the key file (PEM). The certificate file also contains the
    certificate of the CA, so clients can use the file as their CA bundle.
    """
    files = renew_if_due({}, ("127.0.0.1", *names), datetime.now(UTC))
    certificate, key = folder / "apiserver.crt", folder / "apiserver.key"
    certificate.write_bytes(files[CHAIN] + files[CA])
    key.touch(mode=0o600)
    key.write_bytes(files[KEY])
    return str(certificate), str(key)


def write_kubeconfig(path: Path, url: str, ca: bytes | None, token: str, *, name: str = "mgpu-playground") -> None:
    """Write a kubeconfig with one context. `ca` is the CA bundle (PEM) of the server; it is empty for plain HTTP."""
    cluster = {"server": url} | ({"certificate-authority-data": base64.b64encode(ca).decode()} if ca else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
