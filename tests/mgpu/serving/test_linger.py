"""A thread that has served a request waits a short time for the next request of the same connection."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn.workers import gthread

from mgpu.serving import worker
from mgpu.serving.worker import Worker


class Lane(SimpleNamespace):
    """A lane with one connection, and one thread that may stay with it."""

    def __init__(self) -> None:
        super().__init__(connections=set(), lingering=threading.Semaphore(1), requests=SimpleNamespace(waiting=[]))


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


def lingering(conn: Any, *, alive: bool = True, seconds: float = 0.02) -> bool:
    own = Worker.__new__(Worker)
    own.alive = alive
    return own._has_next_request(conn, seconds)


def served(conn: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many requests a thread serves before it leaves the connection."""
    count: list[Any] = []

    def handle(*arguments: Any) -> bool:
        count.append(arguments)
        return True

    monkeypatch.setattr(gthread.ThreadWorker, "handle", handle)
    own = Worker.__new__(Worker)
    own.alive = True
    free = conn.lane.lingering._value
    assert own.handle(conn)
    assert conn.lane.lingering._value == free
    return len(count)


Pair = tuple[socket.socket, socket.socket]


def test_request_that_follows_soon_is_served_by_the_same_thread(sockets: Pair) -> None:
    ours, theirs = sockets
    timer = threading.Timer(0.02, lambda: theirs.sendall(b"x"))
    timer.start()
    assert lingering(connection(ours), seconds=30.0)
    timer.join()


def test_connection_without_a_next_request_goes_back_to_the_event_loop(sockets: Pair) -> None:
    assert not lingering(connection(sockets[0]))


def test_thread_leaves_a_connection_that_sends_without_end(sockets: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sockets
    theirs.sendall(b"x")  # `handle` is replaced, so nobody reads it.
    conn = connection(ours)
    conn.lane.connections += [object()] * worker._LINGERING
    assert served(conn, monkeypatch) == 1 + worker._MOST_SERVED


@pytest.mark.parametrize(("others", "long"), [(0, True), (worker._LINGERING - 1, True), (worker._LINGERING, False)])
def test_thread_waits_longer_where_each_connection_may_keep_one(
    sockets: Pair, monkeypatch: pytest.MonkeyPatch, others: int, long: bool
) -> None:
    waits: list[float] = []
    conn = connection(sockets[0])
    conn.lane.connections += [object()] * others
    monkeypatch.setattr(Worker, "_has_next_request", lambda _, __, seconds: waits.append(seconds))
    assert served(conn, monkeypatch) == 1
    assert waits == [worker._LONG_LINGER_SECONDS if long else worker.LINGER_SECONDS]


def test_no_thread_stays_beyond_the_limit(sockets: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sockets
    theirs.sendall(b"x")
    conn = connection(ours)
    with conn.lane.lingering:
        assert served(conn, monkeypatch) == 1


def test_connection_that_was_replaced_meanwhile_is_closed(sockets: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    conn = connection(sockets[0])
    monkeypatch.setattr(Worker, "_has_next_request", lambda *_: conn.lane.connections.clear())
    monkeypatch.setattr(gthread.ThreadWorker, "handle", lambda *_: True)
    assert not Worker.__new__(Worker).handle(conn)


@pytest.mark.parametrize("case", ["stopping", "replaced", "read ahead", "others wait"])
def test_connection_is_not_read_if_it_may_not_keep_its_thread(sockets: Pair, case: str) -> None:
    ours, theirs = sockets
    theirs.sendall(b"x")
    conn = connection(ours, b"GET" if case == "read ahead" else b"")
    if case == "replaced":
        conn.lane.connections = []
    elif case == "others wait":
        conn.lane.requests.waiting.append(None)
    assert not lingering(conn, alive=case != "stopping")
