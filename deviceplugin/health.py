"""`/healthz`, `/readyz` and `/metrics` over plain HTTP, by the standard library alone: the agent has to stay small."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, RawIOBase
from socket import AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SHUT_RDWR, has_dualstack_ipv6, socket
from typing import Any

from mgpu.serving.room import Room

PATIENCE_SECONDS = 10.0
"""Who has not asked, or not taken the answer, within so long is hung up on: each connection holds a thread."""

REQUEST_BYTES = 16 << 10
"""What a client may send. The kubelet and Prometheus send less than 2 KiB. http.client by itself allows 100 lines of
64 KiB, all of which stay in memory until the last one: 35 such requests exceed the agent's limit.
"""


class _Request(RawIOBase):
    """What a client sends. A limit for each read would be none, since a byte now and then meets it for ever."""

    def __init__(self, connection: socket) -> None:
        self._connection, self._until = connection, time.monotonic() + PATIENCE_SECONDS
        self._left = REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if not self._left:
            raise ConnectionAbortedError("the request is too long")
        self._connection.settimeout(left)
        read = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= read
        return read


MOST_CONNECTIONS = 256
"""At a time. A tenant's probes may name any host, and the kubelet sends them from the node's own address, so neither
NetworkPolicies nor addresses keep them away. A further connection therefore replaces the oldest one: the kubelet's own
probe is answered long before it is the oldest.
"""
_METRICS_SECONDS = 1.0
"""For so long the page of metrics is answered as it was made."""


class _Server(ThreadingHTTPServer):
    """One thread for each connection, and no more connections than there is room for."""

    daemon_threads = True
    request_queue_size = 2048  # with the default of 5 the kernel drops new connections during a flood

    def __init__(self, *arguments: Any) -> None:
        self._room: Room[Any] = Room(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        replaced = self._room.add(request, client_address[0])
        if replaced is not None:
            with suppress(OSError):
                replaced.shutdown(SHUT_RDWR)  # its thread finds the end of the request, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._room.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is no error of this process."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Remembered:
    """What `make` returned, for `_METRICS_SECONDS`; whoever asks meanwhile waits while it is made."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._page, self._until = b"", float("-inf")

    def __call__(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._until:
                self._page, self._until = self._make(), time.monotonic() + _METRICS_SECONDS
            return self._page


class _Everywhere(_Server):
    """On all addresses of both families: there are clusters with IPv6 alone."""

    address_family = AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 0)
        super().server_bind()


class HealthServer:
    """`healthy` and `ready` say what is wrong, "" where nothing: then 200 and `ok`, else 503 and the reason.

    host: "" is every address. metrics: the page of this content type; None: there is none.
    """

    def __init__(
        self,
        port: int,
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
        host: str = "",
        metrics: Callable[[], bytes] | None = None,
        content_type: str = "",
    ) -> None:
        checks = {"/healthz": healthy, "/readyz": ready}
        page = None if metrics is None else _Remembered(metrics)

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                super().setup()
                self.rfile = BufferedReader(_Request(self.connection))

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics" and page is not None:
                    self._say(200, page(), content_type)
                    return
                check = checks.get(path)
                problem = "not found" if check is None else check()
                status = 404 if check is None else 503 if problem else 200
                self._say(status, f"{problem or 'ok'}\n".encode(), "text/plain; charset=utf-8")

            def _say(self, status: int, body: bytes, content_type: str) -> None:
                self.connection.settimeout(PATIENCE_SECONDS)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Probes are not worth a line each."""

        kind = _Everywhere if not host and has_dualstack_ipv6() else _Server
        self._server = kind((host, port), Handler)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
