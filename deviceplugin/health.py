"""The agent's HTTP server, with `/healthz` and `/readyz` for the kubelet's probes, and `/metrics` for Prometheus.

`deviceplugin.main` starts the server. Tenants can flood the server's port: the probes of a pod may name any host, and
the kubelet sends them from the node's own address, so neither a NetworkPolicy nor a list of addresses stops them.
Therefore this server limits the number of connections, and the size and duration of each request. With
`prometheus_client.start_http_server`, which has no such limits, a tenant could exhaust the agent's memory
(docs/security.md).
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
"""How long a client may take to send its request, and to receive the answer. A thread waits for it meanwhile."""

REQUEST_BYTES = 16 << 10
"""The maximum size of a request. The kubelet and Prometheus send less than 2 KiB. http.client allows 100 lines of 64
KiB, which stay in memory until the last one has arrived; 35 such requests would exceed the agent's memory limit.
"""


class _Request(RawIOBase):
    """The stream of one request. The whole request has one deadline, since a client could send single bytes forever."""

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
"""The maximum number of connections. A further one replaces the oldest connection of the address that has the most.
That may be the node's own address, but the kubelet's probe of the agent is answered long before it is the oldest."""
_METRICS_SECONDS = 1.0
"""How long a page of metrics is cached."""


class _Server(ThreadingHTTPServer):
    """A server with one thread for each connection, and a limited number of connections."""

    daemon_threads = True
    request_queue_size = 2048  # with the default of 5 the kernel drops new connections during a flood

    def __init__(self, *arguments: Any) -> None:
        self._room: ConnectionLimit[Any] = ConnectionLimit(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        replaced = self._room.add(request, client_address[0])
        if replaced is not None:
            with suppress(OSError):
                # The thread of the replaced connection then reads the end of the request, and closes the connection.
                replaced.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._room.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except those of connections (OSError), such as a timeout or a connection that was closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _CachedPage:
    """A cache that keeps the result of `make` for `_METRICS_SECONDS`. Concurrent callers wait for the same result."""

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
    """A server that listens on all IPv4 and IPv6 addresses, since some clusters have IPv6 only."""

    address_family = AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 0)
        super().server_bind()


class HealthServer:
    """The agent's HTTP server, which runs from `start` to `stop`. It calls the functions on the threads of connections.

    Args:
        port: The port to listen on; 0 selects a free port.
        healthy: A function that returns why the agent is not healthy, or None. The answer to `/healthz` is 503 with
            the reason, or 200 and `ok`.
        ready: A function that returns why the agent is not ready, or None, for `/readyz` in the same way.
        host: The address to listen on; "" stands for all addresses.
        metrics: A function that returns the page `/metrics`; None if there is no such page.
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
                """Log nothing. There may be several probes per second."""

        kind = _Everywhere if not host and has_dualstack_ipv6() else _Server
        self._server = kind((host, port), Handler)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
