"""Peers that are not known yet: what they hold never delays a caller with a certificate, nor a probe.

The attack: an anonymous process keeps hundreds of unfinished connections open and replaces each one that is closed.
"""

import http.client
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, ensure_certificate
from mgpu.serving.connection_limit import ConnectionLimit
from tests.mgpu.serving.flooding import ATTACKER, flooded
from tests.mgpu.serving.process import Client, Server, client_certificate

CALLER = "127.0.0.1"
SECONDS = 2.0
"""Far above what a handshake takes and far below the 10 s for which an unfinished request is waited for."""
HALF_A_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"A" * 20
HALF_A_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    folder = CertificateFolder(tmp_path_factory.mktemp("certs"))
    ensure_certificate(folder, {"127.0.0.1"}, datetime.now(UTC))
    return folder


@pytest.fixture(scope="module")
def server(folder: CertificateFolder) -> Iterator[Server]:
    """Two addresses: one for clients with a certificate, and a plain one that every address may call."""
    server = Server("-m", "tests.mgpu.serving.sample", str(folder.path), "strangers", addresses=2)
    yield server
    server.close()


@pytest.fixture(scope="module")
def vouched(folder: CertificateFolder, tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder.path / CA))
    context.load_cert_chain(client_certificate(folder, tmp_path_factory.mktemp("client")))
    return context


def seconds_of_a_call(port: int, context: ssl.SSLContext | None, source: str) -> float:
    began = time.monotonic()
    with Client(port, context=context, source=source) as client:
        client.send(b"", "/healthz", method="GET")
        assert client.receive()[0] == 200
    return time.monotonic() - began


def seconds_until_a_call(port: int, context: ssl.SSLContext) -> float:
    """Of calls from an address that others flood: a handshake may lose its place to theirs, and is tried again."""
    began = time.monotonic()
    while True:
        try:
            seconds_of_a_call(port, context, CALLER)
        except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
            if time.monotonic() - began > SECONDS:
                raise
        else:
            return time.monotonic() - began


@pytest.mark.parametrize("sent", [HALF_A_HANDSHAKE, b""], ids=["half a handshake", "no byte"])
@pytest.mark.parametrize("source", [ATTACKER, CALLER], ids=["another address", "the caller's address"])
def test_unfinished_handshakes_do_not_delay_a_client_with_a_certificate(
    server: Server, vouched: ssl.SSLContext, sent: bytes, source: str
) -> None:
    with flooded(server.ports[0], sent, source):
        assert max(seconds_until_a_call(server.ports[0], vouched) for _ in range(5)) < SECONDS


@pytest.mark.parametrize("sent", [HALF_A_REQUEST, b"", b"GET /large HTTP/1.1\r\n\r\n"], ids=["half", "none", "unread"])
def test_unfinished_requests_at_an_open_address_do_not_delay_a_probe(server: Server, sent: bytes) -> None:
    with flooded(server.ports[1], sent):
        assert max(seconds_of_a_call(server.ports[1], None, "127.0.0.7") for _ in range(5)) < SECONDS


def test_a_client_with_a_certificate_keeps_its_connection_under_a_flood(
    server: Server, vouched: ssl.SSLContext
) -> None:
    """After its handshake a connection is no stranger's any more, and is never closed in favour of another."""
    with (
        Client(server.ports[0], context=vouched, source=ATTACKER) as client,
        flooded(server.ports[0], HALF_A_HANDSHAKE),
    ):
        client.send(b"", "/healthz", method="GET")
        assert client.receive()[0] == 200


def test_a_server_under_a_flood_ends_in_time(folder: CertificateFolder) -> None:
    server = Server("-m", "tests.mgpu.serving.sample", str(folder.path), "strangers", addresses=2)
    try:
        with flooded(server.ports[0], HALF_A_HANDSHAKE):
            began = time.monotonic()
            server.terminate()
            assert server.join() == 0
            assert time.monotonic() - began < 10
    finally:
        server.close()


def test_a_full_room_closes_the_oldest_connection_of_the_address_with_the_most() -> None:
    room: ConnectionLimit[str] = ConnectionLimit(4)
    assert [room.add(f"a{i}", "192.0.2.1") for i in range(3)] == [None] * 3
    assert room.add("b0", "192.0.2.2") is None
    assert room.add("c0", "192.0.2.3") == "a0"
    assert room.add("a3", "::ffff:192.0.2.1") == "a1"
    assert {"a2", "a3", "b0", "c0"} == {c for c in ("a0", "a1", "a2", "a3", "b0", "c0") if c in room}


def test_addresses_of_one_ipv6_block_count_together() -> None:
    room: ConnectionLimit[int] = ConnectionLimit(64)
    assert room.add(-1, "2001:db8:0:1::1") is None
    ended = [room.add(i, f"2001:db8:0:2:{i:x}::1") for i in range(200)]
    assert [e for e in ended if e is not None] == list(range(137))


def test_a_room_forgets_connections_that_ended() -> None:
    room: ConnectionLimit[int] = ConnectionLimit(2)
    for i in range(10):
        assert room.add(i, "192.0.2.1") is None
        room.discard(i)
    assert len(room) == 0
