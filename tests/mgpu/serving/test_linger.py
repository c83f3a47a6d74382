"""A thread that has served a request waits a short time for the next request of the same connection."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu.serving import worker
from mgpu.serving.worker import Worker


class Lane(SimpleNamespace):
    """A lane with one connection, of which one thread may wait for a next request."""

    def __init__(self) -> None:
        super().__init__(connections=set(), lingering=threading.Semaphore(1))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def connection(sock: socket.socket, read_ahead: bytes = b"") -> Any:
    buffer = SimpleNamespace(getvalue=lambda: read_ahead)
    conn = SimpleNamespace(sock=sock, lane=Lane(), parser=SimpleNamespace(unreader=SimpleNamespace(buf=buffer)))
    conn.lane.connections = [conn]
    return conn


def lingering(conn: Any, *, alive: bool = True) -> bool:
    """Return what the worker's method returns, and check that no thread counts as waiting afterwards."""
    own = Worker.__new__(Worker)
    own.alive = alive
    free = conn.lane.lingering._value
    result = own._has_next_request(conn)
    assert conn.lane.lingering._value == free
    return result


Pair = tuple[socket.socket, socket.socket]


def test_request_that_follows_soon_is_served_by_the_same_thread(sockets: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sockets
    monkeypatch.setattr(worker, "LINGER_SECONDS", 30.0)
    timer = threading.Timer(0.02, lambda: theirs.sendall(b"x"))
    timer.start()
    assert lingering(connection(ours))
    timer.join()


def test_connection_without_a_next_request_goes_back_to_the_event_loop(sockets: Pair) -> None:
    assert not lingering(connection(sockets[0]))


def test_no_thread_waits_beyond_the_limit(sockets: Pair) -> None:
    ours, theirs = sockets
    theirs.sendall(b"x")
    conn = connection(ours)
    with conn.lane.lingering:
        assert not lingering(conn)
    assert lingering(conn)


@pytest.mark.parametrize("case", ["stopping", "replaced", "read ahead", "closed"])
def test_connection_is_not_read_if_it_may_not_be_used(sockets: Pair, case: str) -> None:
    ours, theirs = sockets
    theirs.sendall(b"x")
    conn = connection(ours, b"GET" if case == "read ahead" else b"")
    if case == "replaced":
        conn.lane.connections = []
    elif case == "closed":
        ours.close()
    assert not lingering(conn, alive=case != "stopping")
