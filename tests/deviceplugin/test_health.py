"""The agent's HTTP server: probes, metrics, and clients that send too much or too slowly."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from deviceplugin import health
from deviceplugin.health import REQUEST_BYTES, HealthServer
from deviceplugin.metrics import REGISTRY
from mgpu.serving.metrics import CONTENT_TYPE, render_metrics
from tests.mgpu.serving.flooding import flooded
from tests.waiting import until

OK = (200, b"ok\n")


@pytest.fixture
def pages() -> list[bytes]:
    """The pages of metrics that were made."""
    return []


@pytest.fixture
def server(pages: list[bytes]) -> Iterator[HealthServer]:
    def page() -> bytes:
        pages.append(b"page")
        return pages[-1]

    server = HealthServer(0, healthy, healthy, host="127.0.0.1", metrics=page, content_type="text/plain")
    server.start()
    yield server
    server.stop()


def healthy() -> None:
    """Return no reason."""


def get(server: HealthServer, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def connect(server: HealthServer, timeout: float = 30) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=timeout)


def test_probe_is_answered_with_the_reason_or_ok() -> None:
    reasons: list[str] = ["no cards"]
    server = HealthServer(0, healthy, lambda: "".join(reasons), host="127.0.0.1")
    server.start()
    try:
        assert get(server, "/healthz") == OK
        assert get(server, "/readyz") == (503, b"no cards\n")
        reasons.clear()
        assert get(server, "/readyz?verbose") == OK
        assert get(server, "/metrics") == get(server, "/") == (404, b"not found\n")
    finally:
        server.stop()


def test_metrics_are_served_with_their_content_type() -> None:
    server = HealthServer(0, healthy, healthy, "127.0.0.1", partial(render_metrics, REGISTRY), CONTENT_TYPE)
    server.start()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert b'mgpu_build_info{part="deviceplugin",version="' in answer.read()
    server.stop()


def test_page_of_metrics_is_cached(server: HealthServer, pages: list[bytes]) -> None:
    for _ in range(50):
        assert get(server, "/metrics") == (200, b"page")
    assert len(pages) < 10


def test_page_of_metrics_is_made_again_after_the_cache_time(
    server: HealthServer, pages: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_METRICS_SECONDS", 0.0)
    for _ in range(3):
        get(server, "/metrics")
    assert len(pages) == 3


def test_connection_beyond_the_limit_replaces_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MOST_CONNECTIONS", 8)
    server = HealthServer(0, healthy, healthy, host="127.0.0.1")
    server.start()
    with ExitStack() as stack:
        stack.callback(server.stop)
        slow = [stack.enter_context(connect(server)) for _ in range(8)]
        assert get(server, "/healthz") == OK
        assert slow[0].recv(1) == b""
        assert get(server, "/healthz") == OK


def test_burst_of_connections_fits_into_the_backlog() -> None:
    """The server does not accept yet. A connection that does not fit is dropped and repeated after a second."""
    server = HealthServer(0, healthy, healthy, host="127.0.0.1")
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(server, 0.5))
    server._server.server_close()


def test_request_beyond_the_size_limit_is_closed_before_it_ends(server: HealthServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
        with suppress(ConnectionError):
            connection.sendall(REQUEST_BYTES * b"a")
            assert connection.recv(1) == b""
    assert get(server, "/healthz") == OK


def test_request_within_the_size_limit_is_answered(server: HealthServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx: " + (REQUEST_BYTES - 200) * b"a" + b"\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.0 200"


def waits_for_the_end(connection: socket.socket) -> bool:
    return connection.recv(1) == b""


def sends_single_bytes(connection: socket.socket) -> bool:
    connection.settimeout(0.02)
    try:
        connection.send(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("client", [waits_for_the_end, sends_single_bytes], ids=lambda client: client.__name__)
def test_unfinished_request_is_closed_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, server: HealthServer, client: Callable[[socket.socket], bool]
) -> None:
    monkeypatch.setattr(health, "PATIENCE_SECONDS", 0.1)
    with connect(server) as connection:
        until(lambda: client(connection))


def test_flood_of_unfinished_requests_delays_no_probe_and_needs_limited_threads(server: HealthServer) -> None:
    before = threading.active_count()
    with flooded(server.port, b"GET /healthz HTTP/1.1\r\nHost: "):
        for _ in range(5):
            began = time.monotonic()
            assert get(server, "/healthz") == OK
            assert time.monotonic() - began < health.PATIENCE_SECONDS / 2
        # Besides the server's threads there are the flood's own, and those of replaced connections that are ending.
        assert threading.active_count() - before < health.MOST_CONNECTIONS + 100


def test_probe_is_answered_over_ipv4_and_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = HealthServer(0, healthy, healthy)
    server.start()
    try:
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, server.port), timeout=30):
                pass
    finally:
        server.stop()
