"""Clients that do not finish their requests or do not read their answers, against a real server."""

import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA
from mgpu.serving.patience import PatientSocket
from tests.mgpu.serving.process import DEADLINE, Client, Server, sample
from tests.mgpu.serving.reviews import review

MANY = 100
THREADS = 8


@pytest.fixture(scope="module")
def ca(folder: CertificateFolder) -> Path:
    return folder.path / CA


@pytest.fixture(scope="module")
def server(folder: CertificateFolder) -> Iterator[Server]:
    with sample(folder) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(folder: CertificateFolder) -> Iterator[Server]:
    """It waits one second for a client, and accepts 80 connections."""
    with sample(folder, "impatient") as server:
        yield server


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """A stack of clients that stay connected until the test ends."""
    with ExitStack() as stack:
        yield stack


def connect(server: Server, ca: Path, *, tls: bool) -> Client:
    return Client(server.ports[0], ca) if tls else Client(server.ports[1])


def got(server: Server, ca: Path, *, tls: bool, path: str = "/healthz") -> bytes:
    """Return the answer, after retries: on a busy machine an impatient server may disconnect this client too."""
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
def test_timeout_of_a_client_is_a_connection_reset(
    pair: tuple[PatientSocket, socket.socket], wait: Callable[[socket.socket], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gunicorn closes the connection silently on this error."""
    monkeypatch.setattr("mgpu.serving.patience.PATIENCE_SECONDS", 0.05)
    pair[0].setblocking(True)
    with pytest.raises(ConnectionResetError) as caught:
        wait(pair[0])
    assert caught.value.errno == errno.ECONNRESET


@pytest.mark.parametrize(("port", "sent"), [(1, HALF_A_LINE), (0, HALF_A_HANDSHAKE)], ids=["plain", "TLS"])
def test_many_unfinished_clients_of_one_address_do_not_delay_another(
    server: Server, ca: Path, held: ExitStack, port: int, sent: bytes
) -> None:
    for _ in range(MANY):
        held.enter_context(Client(server.ports[port])).wire.sendall(sent)
    assert {got(server, ca, tls=port == 1) for _ in range(20)} == {b"ok\n"}


def test_idle_connections_need_no_threads(server: Server, ca: Path, held: ExitStack) -> None:
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


def test_client_that_does_not_finish_is_disconnected(impatient: Server, ca: Path) -> None:
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


def test_answered_client_that_stays_connected_is_not_logged(folder: CertificateFolder, held: ExitStack) -> None:
    server = held.enter_context(sample(folder, "impatient"))  # without clients of other tests
    answered = held.enter_context(Client(server.ports[1]))
    assert answered.request(review({"a": 1}, name="later"), "/review")[0] == 503
    logged = ""
    for _ in range(3):  # a second each; gunicorn lingers for two
        half = held.enter_context(Client(server.ports[1])).wire
        half.sendall(HALF_A_LINE)
        while str(half.getsockname()) not in logged:
            logged += server.wait_for(b"not waited for: ").decode()
    assert str(answered.wire.getsockname()) not in logged


def test_client_that_does_not_read_its_answer_is_disconnected(impatient: Server, ca: Path, held: ExitStack) -> None:
    for tls in (True, False) * THREADS:
        with suppress(ConnectionError, ssl.SSLError):
            held.enter_context(connect(impatient, ca, tls=tls)).send(b"", "/large", method="GET")
    assert {got(impatient, ca, tls=tls) for tls in (True, False)} == {b"ok\n"}


def test_silent_connections_of_one_address_leave_connections_for_another(
    impatient: Server, ca: Path, held: ExitStack
) -> None:
    for _ in range(MANY):
        held.enter_context(Client(impatient.ports[1]))
    assert {got(impatient, ca, tls=True) for _ in range(20)} == {b"ok\n"}


def test_slow_answer_is_complete(impatient: Server, ca: Path) -> None:
    """The time that the server takes does not count."""
    assert got(impatient, ca, tls=True, path="/slow") == b"first last"
