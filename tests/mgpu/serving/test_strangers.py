"""Unauthenticated peers, which keep hundreds of unfinished connections open, do not delay callers and probes."""

import http.client
import ssl
import time
from collections.abc import Iterator

import pytest

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.connection_limit import ConnectionLimit
from tests.mgpu.serving.flooding import ATTACKER, flooded
from tests.mgpu.serving.process import Client, Server, sample

CALLER = "127.0.0.1"
SECONDS = 5.0
"""Far longer than a handshake takes on a busy machine, and half of the 10 s after which an unfinished request ends."""
HALF_A_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"A" * 20
HALF_A_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: "


@pytest.fixture(scope="module")
def server(folder: CertificateFolder) -> Iterator[Server]:
    """Two addresses: one for clients with a certificate, and a plain one that every address may call."""
    with sample(folder, "strangers", addresses=2) as server:
        yield server


def seconds_of_a_call(port: int, context: ssl.SSLContext | None, source: str) -> float:
    began = time.monotonic()
    with Client(port, context=context, source=source) as client:
        client.send(b"", "/healthz", method="GET")
        assert client.receive()[0] == 200
    return time.monotonic() - began


def seconds_until_a_call(port: int, context: ssl.SSLContext) -> float:
    """Return the seconds until a call succeeds from an address that is flooded too: a handshake may be replaced."""
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
    server: Server, client_context: ssl.SSLContext, sent: bytes, source: str
) -> None:
    with flooded(server.ports[0], sent, source):
        assert max(seconds_until_a_call(server.ports[0], client_context) for _ in range(3)) < SECONDS


@pytest.mark.parametrize("sent", [HALF_A_REQUEST, b"", b"GET /large HTTP/1.1\r\n\r\n"], ids=["half", "none", "unread"])
def test_unfinished_requests_at_an_open_address_do_not_delay_a_probe(server: Server, sent: bytes) -> None:
    with flooded(server.ports[1], sent):
        assert max(seconds_of_a_call(server.ports[1], None, "127.0.0.7") for _ in range(3)) < SECONDS


def test_connection_with_a_client_certificate_survives_a_flood(server: Server, client_context: ssl.SSLContext) -> None:
    """After its handshake a connection is never replaced."""
    with (
        Client(server.ports[0], context=client_context, source=ATTACKER) as client,
        flooded(server.ports[0], HALF_A_HANDSHAKE),
    ):
        client.send(b"", "/healthz", method="GET")
        assert client.receive()[0] == 200


def test_server_under_a_flood_ends_in_time(folder: CertificateFolder) -> None:
    with sample(folder, "strangers", addresses=2) as server, flooded(server.ports[0], HALF_A_HANDSHAKE):
        began = time.monotonic()
        server.terminate()
        assert server.join() == 0
        assert time.monotonic() - began < 10


def test_connection_above_the_limit_replaces_the_oldest_of_the_largest_address() -> None:
    limit: ConnectionLimit[str] = ConnectionLimit(4)
    assert [limit.add(f"a{i}", "192.0.2.1") for i in range(3)] == [None] * 3
    assert limit.add("b0", "192.0.2.2") is None
    assert limit.add("c0", "192.0.2.3") == "a0"
    assert limit.add("a3", "::ffff:192.0.2.1") == "a1"
    assert {"a2", "a3", "b0", "c0"} == {c for c in ("a0", "a1", "a2", "a3", "b0", "c0") if c in limit}


def test_connections_of_one_ipv6_block_count_together() -> None:
    limit: ConnectionLimit[int] = ConnectionLimit(64)
    assert limit.add(-1, "2001:db8:0:1::1") is None
    ended = [limit.add(i, f"2001:db8:0:2:{i:x}::1") for i in range(200)]
    assert [e for e in ended if e is not None] == list(range(137))


def test_closed_connections_do_not_count() -> None:
    limit: ConnectionLimit[int] = ConnectionLimit(2)
    for i in range(10):
        assert limit.add(i, "192.0.2.1") is None
        limit.discard(i)
    assert len(limit) == 0
