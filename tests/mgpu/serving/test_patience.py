"""Clients that do not finish, against a real server: what they take from others is little, and for a while."""

import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

import pytest

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, ensure_certificate
from mgpu.serving.patience import PatientSocket
from tests.mgpu.serving.process import DEADLINE, Client, Server
from tests.mgpu.serving.reviews import review

MANY = 100
THREADS = 8


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = CertificateFolder(tmp_path_factory.mktemp("certs"))
    ensure_certificate(folder, {"127.0.0.1"}, datetime.now(UTC))
    return folder.path / CA


def serving(ca: Path, *how: str) -> Iterator[Server]:
    server = Server("-m", "tests.mgpu.serving.sample", str(ca.parent), *how, addresses=3)
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(ca: Path) -> Iterator[Server]:
    yield from serving(ca)


@pytest.fixture(scope="module")
def impatient(ca: Path) -> Iterator[Server]:
    """It waits for a client for a second, and has room for 80 connections."""
    yield from serving(ca, "impatient")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Where clients stay connected until the test ends."""
    with ExitStack() as stack:
        yield stack


def connect(server: Server, ca: Path, *, tls: bool) -> Client:
    return Client(server.ports[0], ca) if tls else Client(server.ports[1])


def got(server: Server, ca: Path, *, tls: bool, path: str = "/healthz") -> bytes:
    """Tried again and again: a server as impatient may hang up on the test too where the machine is busy."""
    ends = time.monotonic() + DEADLINE
    while time.monotonic() < ends:
        with suppress(OSError, HTTPException), connect(server, ca, tls=tls) as client:
            client.send(b"", path, method="GET")
            return client.receive()[2]
    return b"nothing"


HALF_A_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01"
HALF_A_LINE = b"GET /hea"
HALF_THE_HEADERS = b"GET /healthz HTTP/1.1\r\nHost: "
HALF_A_BODY = b"POST /review HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"


@pytest.fixture
def pair() -> Iterator[tuple[PatientSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with PatientSocket(fileno=ours.detach()) as patient, theirs:
        yield patient, theirs


@pytest.mark.parametrize("wait", [lambda s: s.recv(1), lambda s: s.sendall(bytes(64 << 20))], ids=["recv", "sendall"])
def test_who_is_waited_for_in_vain_has_reset_the_connection(
    pair: tuple[PatientSocket, socket.socket], wait: Callable[[socket.socket], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gunicorn knows that, and makes no error of it."""
    monkeypatch.setattr("mgpu.serving.patience.PATIENCE_SECONDS", 0.05)
    pair[0].setblocking(True)
    with pytest.raises(ConnectionResetError) as caught:
        wait(pair[0])
    assert caught.value.errno == errno.ECONNRESET


@pytest.mark.parametrize(("port", "sent"), [(1, HALF_A_LINE), (0, HALF_A_HANDSHAKE)], ids=["plain", "TLS"])
def test_an_address_with_many_of_them_keeps_no_other_waiting(
    server: Server, ca: Path, held: ExitStack, port: int, sent: bytes
) -> None:
    for _ in range(MANY):
        held.enter_context(Client(server.ports[port])).wire.sendall(sent)
    assert {got(server, ca, tls=port == 1) for _ in range(20)} == {b"ok\n"}


def test_connections_made_for_later_need_no_threads(server: Server, ca: Path, held: ExitStack) -> None:
    made = [held.enter_context(connect(server, ca, tls=True)) for _ in range(3 * THREADS)]
    assert {client.request(review({"a": 1}), "/review")[0] for client in made} == {200}


HALVES = {
    f"{what}; {'a byte now and then' if more else 'nothing more'}": (sent, port, encrypted, more)
    for what, (sent, port, encrypted) in {
        "half a handshake": (HALF_A_HANDSHAKE, 0, False),
        "half a line": (HALF_A_LINE, 1, False),
        "half the headers": (HALF_THE_HEADERS, 1, False),
        "half a body": (HALF_A_BODY, 1, False),
        "half a line over TLS": (HALF_A_LINE, 0, True),
        "half the headers over TLS": (HALF_THE_HEADERS, 0, True),
        "half a body over TLS": (HALF_A_BODY, 0, True),
    }.items()
    for more in (b"", b" ")
}


def test_who_does_not_finish_is_hung_up_on(impatient: Server, ca: Path) -> None:
    def is_hung_up_on(what: str) -> bool:
        sent, port, encrypted, more = HALVES[what]
        ends = time.monotonic() + DEADLINE
        with (
            suppress(ConnectionError, ssl.SSLError),
            Client(impatient.ports[port], ca if encrypted else None) as client,
        ):
            client.wire.sendall(sent)
            client.wire.settimeout(0.1)
            while time.monotonic() < ends:
                try:
                    if not client.wire.recv(4096):
                        return True
                except TimeoutError:
                    client.wire.send(more)
            return False
        return True

    with ThreadPoolExecutor(len(HALVES)) as pool:
        assert dict(zip(HALVES, pool.map(is_hung_up_on, HALVES), strict=True)) == dict.fromkeys(HALVES, True)


def test_who_has_his_answer_and_stays_is_not_said_to_have_been_waited_for(ca: Path, held: ExitStack) -> None:
    server = held.enter_context(contextmanager(serving)(ca, "impatient"))  # no other test's clients
    answered = held.enter_context(Client(server.ports[1]))
    assert answered.request(review({"a": 1}, name="later"), "/review")[0] == 503
    told = ""
    for _ in range(3):  # a second each; gunicorn lingers for two
        half = held.enter_context(Client(server.ports[1])).wire
        half.sendall(HALF_A_LINE)
        while str(half.getsockname()) not in told:
            told += server.wait_for(b"not waited for: ").decode()
    assert str(answered.wire.getsockname()) not in told


def test_who_does_not_read_his_answer_holds_a_thread_for_a_while(impatient: Server, ca: Path, held: ExitStack) -> None:
    for tls in (True, False) * THREADS:
        with suppress(ConnectionError, ssl.SSLError):
            held.enter_context(connect(impatient, ca, tls=tls)).send(b"", "/large", method="GET")
    assert {got(impatient, ca, tls=tls) for tls in (True, False)} == {b"ok\n"}


def test_an_address_with_silent_connections_leaves_room_for_those_of_others(
    impatient: Server, ca: Path, held: ExitStack
) -> None:
    for _ in range(MANY):
        held.enter_context(Client(impatient.ports[1]))
    assert {got(impatient, ca, tls=True) for _ in range(20)} == {b"ok\n"}


def test_an_answer_that_takes_its_time_is_not_cut(impatient: Server, ca: Path) -> None:
    """The server's own time is none that it waits."""
    assert got(impatient, ca, tls=True, path="/slow") == b"first last"
