"""Limits of the callers: which peers may call, and what strangers get."""

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mgpu.model.addresses import Block, cover_everything, read_block
from mgpu.serving.callers import Callers, read_callers, restrict_callers
from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, ensure_certificate
from mgpu.settings import load_settings
from tests.mgpu.serving.process import Client, Server, sample
from tests.mgpu.serving.reviews import review

API_SERVER, STRANGER = "127.0.0.5", "127.0.0.6"
"""Source addresses on loopback. The sample server in mode `door` admits only the first."""


def blocks(*texts: str) -> tuple[Block, ...]:
    return tuple(map(read_block, texts))


@pytest.mark.parametrize(
    ("allowed", "peer", "admitted"),
    [
        (["192.0.2.0/24"], "192.0.2.7", True),
        (["192.0.2.0/24"], "192.0.3.7", False),
        (["192.0.2.7"], "192.0.2.7", True),
        (["192.0.2.7"], "192.0.2.70", False),
        (["192.0.2.0/24"], "::ffff:192.0.2.7", True),
        (["192.0.2.0/24"], "::192.0.2.7", False),
        (["::/0"], "192.0.2.7", False),
        (["::/0"], "::ffff:192.0.2.7", False),
        (["0.0.0.0/0"], "2001:db8::1", False),
        (["0.0.0.0/0"], "::ffff:192.0.2.7", True),
        (["fe80::/64"], "fe80::1%eth0", True),
        (["2001:db8::/32"], "2001:db8:1::1", True),
        ([], "127.0.0.1", False),
        (["192.0.2.0/24"], "127.0.0.1", False),
        (["0.0.0.0/0", "::/0"], "", False),
        (["0.0.0.0/0", "::/0"], "/run/a.sock", False),
    ],
)
def test_callers_admit_only_addresses_of_their_blocks(allowed: list[str], peer: str, admitted: bool) -> None:
    assert Callers("webhook.apiServers", blocks(*allowed)).admits(peer) is admitted


@pytest.mark.parametrize(
    ("allowed", "is_open"),
    [
        (["0.0.0.0/0"], True),
        (["::/0"], True),
        (["0.0.0.0/1", "128.0.0.0/1"], True),
        (["192.0.2.0/24", "8000::/1", "::/1"], True),
        (["0.0.0.0/1", "8000::/1"], False),
        (["10.0.0.0/8"], False),
        ([], False),
    ],
)
def test_blocks_with_every_address_are_open(allowed: list[str], is_open: bool) -> None:
    assert cover_everything(blocks(*allowed)) is is_open


@pytest.mark.parametrize("key", ["webhook", "scheduler"])
def test_endpoint_without_settings_admits_only_loopback(key: str) -> None:
    callers = read_callers(getattr(load_settings(), key), key)
    assert callers
    assert callers.admits("127.0.0.1")
    assert callers.admits("::1")
    assert callers.admits("::ffff:127.0.0.1")
    assert not callers.admits("10.244.1.9")


@pytest.mark.parametrize("key", ["webhook", "scheduler"])
def test_endpoint_with_client_ca_admits_every_address_unless_blocks_are_set(key: str) -> None:
    certificate = load_settings(flags={f"{key}.clientCa": "ca.crt"})
    assert read_callers(getattr(certificate, key), key) is None
    both = load_settings(flags={f"{key}.clientCa": "ca.crt", f"{key}.apiServers": "192.0.2.1"})
    callers = read_callers(getattr(both, key), key)
    assert callers == Callers(f"{key}.apiServers", blocks("192.0.2.1"))


@pytest.fixture(scope="module")
def server(folder: CertificateFolder) -> Iterator[Server]:
    with sample(folder, "door", addresses=2) as server:
        yield server


def connect(server: Server, folder: CertificateFolder, source: str, *, tls: bool = True) -> Client:
    return Client(server.ports[0 if tls else 1], folder.path / CA if tls else None, source=source)


@pytest.mark.parametrize("tls", [True, False])
def test_api_server_is_answered(server: Server, folder: CertificateFolder, tls: bool) -> None:
    with connect(server, folder, API_SERVER, tls=tls) as client:
        for _ in range(3):
            assert client.request(review({"a": 1}), "/review")[0] == 200


@pytest.mark.parametrize("tls", [True, False])
def test_stranger_gets_403_with_its_address_and_the_setting(
    server: Server, folder: CertificateFolder, tls: bool
) -> None:
    with connect(server, folder, STRANGER, tls=tls) as client:
        client.send(b'{"a": 1}', "/review")
        status, headers, text = client.receive()
    assert (status, headers["Content-Type"]) == (403, "text/plain; charset=utf-8")
    assert headers["Connection"] == "close"
    assert (
        f"does not accept calls from {STRANGER}: the setting test.apiServers lists only {API_SERVER}/32".encode()
        in (text)
    )


def test_stranger_without_body_gets_403_at_once(server: Server, folder: CertificateFolder) -> None:
    """The server does not wait for the body, which could cost memory and time."""
    with connect(server, folder, STRANGER) as client:
        client.send(b"x" * (8 << 20), "/review", part=1)
        began = time.monotonic()
        assert client.receive()[0] == 403
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "header",
    [
        f"X-Forwarded-For: {API_SERVER}",
        f"X-Real-IP: {API_SERVER}",
        f"Forwarded: for={API_SERVER}",
        f"Remote-Addr: {API_SERVER}",
        "X-Forwarded-Proto: https",
    ],
)
def test_header_with_the_address_of_a_caller_is_ignored(server: Server, folder: CertificateFolder, header: str) -> None:
    with connect(server, folder, STRANGER) as client:
        head = f"POST /review HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: 0\r\n\r\n"
        client.wire.sendall(head.encode())
        assert client.receive()[0] == 403


def test_line_of_the_proxy_protocol_is_ignored(server: Server, folder: CertificateFolder) -> None:
    with connect(server, folder, STRANGER, tls=False) as client:
        client.wire.sendall(f"PROXY TCP4 {API_SERVER} 127.0.0.1 4444 80\r\n".encode())
        client.wire.sendall(b"POST /review HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert client.receive()[0] in (400, 403)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probe_of_a_stranger_is_answered(server: Server, folder: CertificateFolder, path: str) -> None:
    with connect(server, folder, STRANGER) as client:
        client.send(b"", path, method="GET")
        assert client.receive()[0] == 200


@pytest.mark.parametrize("path", ["/healthz", "//review", "/review/", "/%72eview", "/"])
def test_stranger_gets_403_for_every_spelling_of_a_path(server: Server, folder: CertificateFolder, path: str) -> None:
    with connect(server, folder, STRANGER) as client:
        client.send(b"{}", path)
        assert client.receive()[0] == 403


def test_strangers_with_unfinished_handshakes_do_not_delay_the_api_server(
    server: Server, folder: CertificateFolder
) -> None:
    """Strangers have threads and connections of their own."""
    with ExitStack() as stack:
        for _ in range(60):
            rude = socket.create_connection(("127.0.0.1", server.ports[0]), 10, (STRANGER, 0))
            stack.callback(rude.close)
            rude.sendall(b"\x16\x03\x01\x02\x00\x01")  # half a handshake
        client = stack.enter_context(connect(server, folder, API_SERVER))
        began = time.monotonic()
        assert client.request(review({"a": 1}), "/review")[0] == 200
        assert time.monotonic() - began < 5


def test_client_certificate_does_not_replace_a_permitted_address() -> None:
    """If both are set, both are necessary."""
    callers = Callers("test.apiServers", blocks(API_SERVER))
    seen: list[str] = []

    def app(_environ: Any, _start: Any) -> list[bytes]:
        seen.append("asked")
        return []

    def start(status: str, *_: Any) -> Any:
        seen.append(status)

    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/review", "gunicorn.socket": _Peer(STRANGER)}
    list(restrict_callers(app, callers)(environ | {"SSL_CLIENT_VERIFY": "SUCCESS"}, start))
    assert seen == ["403 Forbidden"]
    list(restrict_callers(app, callers)(environ | {"gunicorn.socket": _Peer(API_SERVER)}, start))
    assert seen == ["403 Forbidden", "asked"]


class _Peer:
    def __init__(self, address: str) -> None:
        self._address = address

    def getpeername(self) -> tuple[str, int]:
        return (self._address, 4444)


def test_strangers_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    app = restrict_callers(lambda *_: [], Callers("test.apiServers", ()))
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            list(app({"REQUEST_METHOD": "POST", "gunicorn.socket": _Peer(STRANGER)}, lambda *_: None))  # type: ignore[arg-type]
    (record,) = caplog.records
    assert vars(record)["client"] == STRANGER


def test_client_that_does_not_trust_the_certificate_is_logged_with_the_remedy(
    folder: CertificateFolder, tmp_path: Path
) -> None:
    """The process may not read webhook configurations, so only a rejected handshake shows a missing bundle."""
    ensure_certificate(CertificateFolder(tmp_path), {"127.0.0.1"}, datetime.now(UTC))
    with sample(folder, "open", addresses=0) as server:
        port = int(server.wait_for(b"serving ").rpartition(b":")[2])
        for _ in range(3):
            with pytest.raises(ssl.SSLCertVerificationError):
                Client(port, tmp_path / CA)
        assert b"run manifests/certificates.sh" in server.wait_for(b"said: A client does not trust")
        with Client(port, folder.path / CA) as client:
            assert client.request(review({"a": 1}), "/review")[0] == 200


def test_server_with_an_open_endpoint_logs_a_warning(folder: CertificateFolder) -> None:
    with sample(folder, "open", addresses=0) as server:
        assert b"lets every address call this endpoint" in server.wait_for(b"said: ")
        port = int(server.wait_for(b"serving ").rpartition(b":")[2])
        with Client(port, folder.path / CA, source=STRANGER) as client:
            assert client.request(review({"a": 1}), "/review")[0] == 200
