"""Detecting clients that no longer wait, over real sockets."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mgpu.serving.app import new_app, serve_posts
from mgpu.serving.deadlines import watch_client
from mgpu.serving.review import Reply
from tests.clock import Clock


def watched(query: str = "", clock: Clock | None = None, connection: Any = None) -> Callable[[], bool]:
    """Return what `watch_client` returns in a view."""
    found: list[Callable[[], bool]] = []

    def view() -> Reply:
        found.append(watch_client(10.0, clock) if clock else watch_client(10.0))
        return Reply({})

    app = new_app()
    serve_posts(app, "/filter", view)
    app.test_client().post(f"/filter{query}", environ_overrides={"gunicorn.socket": connection})
    return found[0]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    server, _ = listening.accept()
    with listening, client, server:
        yield client, server


@pytest.mark.parametrize(
    ("query", "seconds"),
    [
        ("", 10.0),
        ("?timeout=5s", 5.0),
        ("?timeout=30s", 10.0),
        ("?timeout=x", 10.0),
        ("?a=b&timeout=5s", 5.0),
        ("?timeout=-1s", 10.0),
    ],
)
def test_client_is_gone_after_the_timeout_of_the_url_or_the_default(query: str, seconds: float) -> None:
    clock = Clock()
    over = watched(query, clock)
    clock.now += seconds - 0.1
    assert not over()
    clock.now += 0.2
    assert over()


def test_client_is_gone_after_it_closed_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    over = watched(connection=server)
    assert not over()
    client.sendall(b"the next request")
    assert not over()
    client.close()
    assert over()


def test_client_is_gone_after_the_server_closed_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, server = pair
    over = watched(connection=server)
    server.close()
    assert over()
