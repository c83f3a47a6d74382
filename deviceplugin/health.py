"""The agent's HTTP server: `/healthz` and `/readyz` for the kubelet's probes, `/metrics` for Prometheus.

A tenant can flood this port. The probes of a pod may name any host, and the kubelet sends them from the node's own
address, so neither a NetworkPolicy nor a list of addresses keeps them away. Therefore connections, bytes and seconds
are bounded here; `prometheus_client.start_http_server`, which bounds none of them, would let a tenant exhaust the
agent's memory (docs/security.md). The standard library does the rest, since the agent has to stay small.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, RawIOBase
from socket import AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SHUT_RDWR, has_dualstack_ipv6, socket
from typing import Any

from mgpu.serving.connection_limit import ConnectionLimit

PATIENCE_SECONDS = 10.0
"""How long a client may take to send its request, and to take the answer: each connection holds a thread."""

REQUEST_BYTES = 16 << 10
"""How long a request may be. The kubelet and Prometheus send less than 2 KiB. http.client itself allows 100 lines of
64 KiB, which stay in memory until the last one has come: 35 such requests would exceed the agent's limit.
"""


class _Request(RawIOBase):
    """A request as it is read, with one deadline: a byte now and then would keep any limit for each read."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._bytes_left = REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if not self._bytes_left:
            raise ConnectionAbortedError("the request is too long")
        self._connection.settimeout(seconds)
        read = self._connection.recv_into(buffer, min(len(buffer), self._bytes_left))
        self._bytes_left -= read
        return read


MOST_CONNECTIONS = 256
"""How many connections there may be at a time. A further one replaces the oldest: the kubelet's own probe is answered
long before it is the oldest."""
_METRICS_SECONDS = 1.0
"""How long a page of metrics is served again without being made again."""


class _Server(ThreadingHTTPServer):
    """A thread for each connection, and a bounded number of connections."""

    daemon_threads = True
    request_queue_size = 2048  # with the default of 5 the kernel drops new connections during a flood

    def __init__(self, *arguments: Any) -> None:
        self._room: ConnectionLimit[Any] = ConnectionLimit(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        replaced = self._room.add(request, client_address[0])
        if replaced is not None:
            with suppress(OSError):
                replaced.shutdown(SHUT_RDWR)  # its thread reads the end of the request, and closes the connection
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._room.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break: a client that has gone is no error of this process."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _CachedPage:
    """Caches what `make` returns for `_METRICS_SECONDS`. Callers wait while it is being made."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page = b""
        self._expires = float("-inf")

    def __call__(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._expires:
                self._page = self._make()
                self._expires = time.monotonic() + _METRICS_SECONDS
            return self._page


class _Everywhere(_Server):
    """Listens on all addresses of both families, since there are clusters with IPv6 only."""

    address_family = AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 0)
        super().server_bind()


class HealthServer:
    """Serves on threads, from `start` to `stop`.

    Args:
        port: 0 takes a free one.
        healthy, ready: return why not (answered with 503 and the reason), or None (200 and `ok`).
        host: "" listens on all addresses.
        metrics: makes the page of metrics, of `content_type`; None serves none.

    Attributes:
        port: the port that the server listens on.
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
        page = None if metrics is None else _CachedPage(metrics)

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                super().setup()
                self.rfile = BufferedReader(_Request(self.connection))

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics" and page is not None:
                    self._answer(200, page(), content_type)
                    return
                if path not in checks:
                    self._answer(404, b"not found\n", "text/plain; charset=utf-8")
                    return
                reason = checks[path]()
                self._answer(503 if reason else 200, f"{reason or 'ok'}\n".encode(), "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.connection.settimeout(PATIENCE_SECONDS)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: there are several probes a second."""

        kind = _Everywhere if not host and has_dualstack_ipv6() else _Server
        self._server = kind((host, port), Handler)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
