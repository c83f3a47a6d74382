"""The agent's HTTP server beside clients that ask too much: a tenant's probes reach it through the kubelet."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from deviceplugin import health
from deviceplugin.health import REQUEST_BYTES, HealthServer


@contextmanager
def serving(made: list[int]) -> Iterator[HealthServer]:
    def page() -> bytes:
        made.append(1)
        return b"page"

    server = HealthServer(0, str, str, host="127.0.0.1", metrics=page, content_type="text/plain")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(server: HealthServer, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
        body: bytes = answer.read()
        return body


def test_the_page_of_metrics_is_made_once_a_second_however_often_it_is_asked_for() -> None:
    made: list[int] = []
    with serving(made) as server:
        for _ in range(50):
            assert get(server, "/metrics") == b"page"
    assert len(made) < 10


def test_the_page_of_metrics_is_made_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_METRICS_SECONDS", 0.0)
    made: list[int] = []
    with serving(made) as server:
        for _ in range(3):
            get(server, "/metrics")
    assert len(made) == 3


def test_connections_beyond_the_bound_replace_the_oldest_and_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MOST_CONNECTIONS", 8)
    with serving([]) as server, ExitStack() as open_ones:
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(8)]
        for connection in slow:
            open_ones.enter_context(connection)
        assert get(server, "/healthz") == b"ok\n"
        assert slow[0].recv(1) == b""
        assert get(server, "/healthz") == b"ok\n"


def test_a_burst_of_connections_fits_into_the_backlog() -> None:
    """Nobody accepts yet: what does not fit into the backlog is dropped, and tried again after a second."""
    server = HealthServer(0, str, str, host="127.0.0.1")
    with ExitStack() as open_ones:
        for _ in range(100):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=0.5))
    server._server.server_close()


def test_request_longer_than_the_bound_is_hung_up_on_before_it_ends() -> None:
    """http.client keeps 100 header lines of 64 KiB until the last one has come."""
    with serving([]) as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
        with suppress(ConnectionError):
            connection.sendall(REQUEST_BYTES * b"a")
            assert connection.recv(1) == b""
        assert get(server, "/healthz") == b"ok\n"


def test_request_within_the_bound_is_answered() -> None:
    with serving([]) as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx: " + (REQUEST_BYTES - 200) * b"a" + b"\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.0 200"
