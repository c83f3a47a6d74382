"""Detecting clients that no longer wait, over real sockets."""

import socket
from collections.abc import Iterator

import pytest
from flask import Flask

from mgpu.serving.deadlines import watch_client
from tests.clock import Clock

APP = Flask(__name__)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    server, _ = listening.accept()
    with listening, client, server:
        yield client, server


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("", 10.0), ("?timeout=5s", 5.0), ("?timeout=30s", 10.0), ("?timeout=x", 10.0), ("?timeout=-1s", 10.0)],
)
def test_client_is_gone_after_the_timeout_of_the_url_or_the_default(query: str, seconds: float) -> None:
    clock = Clock()
    with APP.test_request_context(f"/bind-admission{query}"):
        over = watch_client(10.0, clock)
    clock.now += seconds - 0.1
    assert not over()
    clock.now += 0.2
    assert over()


def test_client_is_gone_after_it_closed_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    with APP.test_request_context("/filter", environ_overrides={"gunicorn.socket": server}):
        over = watch_client(10.0)
    assert not over()
    client.sendall(b"the next request")
    assert not over()
    client.close()
    assert over()


def test_client_is_gone_after_the_server_closed_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, server = pair
    with APP.test_request_context("/filter", environ_overrides={"gunicorn.socket": server}):
        over = watch_client(10.0)
    server.close()
    assert over()
