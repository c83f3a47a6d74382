"""The server in a process of its own, with real sockets and real TLS."""

import json
import os
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mgpu.model.errors import BadObject
from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, CHAIN, KEY, ensure_certificate, renew_if_due
from mgpu.serving.request_head import HEAD_BYTES
from mgpu.serving.server import Listen, serve
from mgpu.serving.tls_context import ReloadingContext
from playground.processes import free_port
from tests.mgpu.serving.process import DEADLINE, Client, Server, client_certificate, sample
from tests.mgpu.serving.reviews import review

NAMES = {"127.0.0.1", "localhost"}


@pytest.fixture(scope="module")
def server(folder: CertificateFolder) -> Iterator[Server]:
    with sample(folder) as server:
        yield server


def connect(server: Server, folder: CertificateFolder, *, tls: bool) -> Client:
    return Client(server.ports[0], folder.path / CA) if tls else Client(server.ports[1])


@pytest.mark.parametrize("tls", [True, False])
def test_reply_is_sent_in_one_segment(server: Server, folder: CertificateFolder, tls: bool) -> None:
    with connect(server, folder, tls=tls) as client:
        client.request(review({"a": 1}), "/review")  # the handshake may send segments after it
        before = client.data_segments()
        for _ in range(20):
            assert client.request(review({"a": 1}), "/review")[1]["response"]["allowed"]
        assert client.data_segments() - before == 20


def test_each_address_serves_its_own_app(server: Server, client_context: ssl.SSLContext) -> None:
    assert _healthz(server.ports[2], client_context) == 200
    with Client(server.ports[2], context=client_context) as client:
        assert client.request(review({"a": 1}), "/review")[0] == 404


def test_two_addresses_with_one_port_serve_their_own_apps(folder: CertificateFolder) -> None:
    port = free_port()
    with sample(folder, str(port), addresses=2), Client(port) as client:
        assert client.request(review({"a": 1}), "/review")[0] == 200


def workers_of(server: Server) -> list[int]:
    """Return the process ids of gunicorn's workers."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def test_workers_end_and_free_the_port_at_once_when_only_their_parent_is_killed(folder: CertificateFolder) -> None:
    port = free_port()
    server = sample(folder, str(port), addresses=2)
    with Client(port) as client, select.epoll() as ended:
        assert client.request(review({"a": 1}), "/review")[0] == 200
        (worker,) = workers_of(server)
        ended.register(os.pidfd_open(worker), select.EPOLLIN)
        client.wire.sendall(b"GET /readyz HTTP/1.1\r\n")  # gunicorn's worker would wait for the rest
        server.process.kill()
        assert ended.poll(1.0), "the worker goes on without its parent"
        socket.create_server(("127.0.0.1", port)).close()
    server.close()


def test_port_that_another_process_gives_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr("mgpu.serving.server.time.sleep", lambda _: other.close())
        listen = Listen("127.0.0.1", other.getsockname()[1], lambda _, __: (), client_ca="no file")
        with pytest.raises(BadObject, match="no file: is not a file of certificates"):  # checked after the port
            serve([listen])


def test_port_of_another_process_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu.serving.server._PORT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        listen = Listen("127.0.0.1", port, lambda _, __: (), tls=False)
        with pytest.raises(BadObject, match=f"127.0.0.1:{port}: cannot listen: Address already in use"):
            serve([listen])


@pytest.mark.parametrize("signed", ["no certificate", "another CA"])
def test_client_without_a_trusted_certificate_is_not_answered(
    server: Server, folder: CertificateFolder, tmp_path: Path, signed: str
) -> None:
    context = ssl.create_default_context(cafile=str(folder.path / CA))
    if signed == "another CA":
        other = CertificateFolder(tmp_path)
        ensure_certificate(other, NAMES, datetime.now(UTC))
        context.load_cert_chain(client_certificate(other, tmp_path))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _healthz(server.ports[2], context)


def _healthz(port: int, context: ssl.SSLContext) -> int:
    with Client(port, context=context) as client:
        client.send(b"", "/healthz", method="GET")
        return client.receive()[0]


def test_start_is_called_before_the_first_request(server: Server) -> None:
    with Client(server.ports[1]) as client:
        client.send(b"", "/readyz", method="GET")
        assert client.receive()[0] == 200


@pytest.mark.parametrize("tls", [True, False])
def test_reply_to_retry_later_closes_the_connection(server: Server, folder: CertificateFolder, tls: bool) -> None:
    with connect(server, folder, tls=tls) as client:
        client.send(json.dumps(review({"a": 1}, name="later")).encode(), "/review")
        status, headers, _ = client.receive()
        assert (status, headers["Connection"]) == (503, "close")
        assert client.wire.recv(1) == b""


@pytest.mark.parametrize("tls", [True, False])
def test_header_lines_within_the_limit_are_read(server: Server, folder: CertificateFolder, tls: bool) -> None:
    with connect(server, folder, tls=tls) as client:
        client.wire.sendall(
            b"GET /healthz HTTP/1.1\r\n" + b"".join(b"x%d: %s\r\n" % (i, 8000 * b"a") for i in range(3))
        )
        client.wire.sendall(b"Host: here\r\n\r\n")
        assert client.receive()[0] == 200


@pytest.mark.parametrize("tls", [True, False])
def test_header_lines_above_the_limit_are_431_at_once(server: Server, folder: CertificateFolder, tls: bool) -> None:
    with connect(server, folder, tls=tls) as client:
        client.wire.sendall(b"GET /healthz HTTP/1.1\r\n" + HEAD_BYTES * b"a" + b"a")
        assert client.receive()[0] == 431


@pytest.mark.parametrize("request_line", [b"GET /healthz", b"POST /nothing", b"POST /healthz"])
@pytest.mark.parametrize("header", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
def test_request_with_an_unread_body_is_answered_and_its_connection_closed(
    server: Server, folder: CertificateFolder, request_line: bytes, header: bytes
) -> None:
    with connect(server, folder, tls=False) as client:
        client.wire.sendall(request_line + b" HTTP/1.1\r\nHost: here\r\n" + header + b"\r\n\r\n")
        status, headers, _ = client.receive()
        assert status in (200, 404, 405)
        assert headers["Connection"] == "close"


def test_request_with_a_read_body_keeps_its_connection(server: Server, folder: CertificateFolder) -> None:
    with connect(server, folder, tls=False) as client:
        text = json.dumps(review({"a": 1})).encode()
        headers = b"Host: here\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        for _ in range(2):
            client.wire.sendall(
                b"POST /review HTTP/1.1\r\n" + headers + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
            )
            assert client.receive()[0] in (200, 411)
            assert client.request(review({"a": 1}), "/review")[0] == 200


def test_clients_that_stay_connected_do_not_delay_others(server: Server) -> None:
    began = time.monotonic()
    rude = [Client(server.ports[1]) for _ in range(8)]
    for client in rude:
        client.wire.sendall(b"no HTTP\r\n\r\n")
        assert client.receive()[0] == 400
    with Client(server.ports[1]) as client:
        assert client.request(review({"a": 1}), "/review")[0] == 200
    assert time.monotonic() - began < 10  # in line, the server would linger 2 s for each
    for client in rude:
        client.wire.close()


def test_request_in_progress_is_answered_before_the_server_ends(folder: CertificateFolder) -> None:
    with sample(folder) as server:
        for _ in range(5):
            with Client(server.ports[0]) as gone:
                gone.wire.sendall(b"\x16\x03\x01\x02\x00\x01")  # half a handshake; gunicorn counts it out twice
        with connect(server, folder, tls=True) as client:
            client.request(review({"a": 1}), "/review")
            client.wire.sendall(b"GET /readyz HTTP/1.1\r\n")
            server.terminate()
            client.wire.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.wire.recv(1)
            client.wire.sendall(b"Host: x\r\n\r\n")
            client.wire.settimeout(DEADLINE)
            assert client.receive()[0] == 200
        assert server.wait_for(b"stopped")
        assert server.join() == 0


def test_server_accepts_connections_until_end_returns(folder: CertificateFolder) -> None:
    done = folder.path / "ended"
    with sample(folder, "ends") as server:
        with connect(server, folder, tls=True) as client:  # a worker that has not started yet just ends
            assert client.request(review({"a": 1}), "/review")[0] == 200
        server.terminate()
        server.wait_for(b"ends")
        (worker,) = workers_of(server)
        os.kill(worker, signal.SIGTERM)  # as a signal to the whole process group does
        for _ in range(2):
            with connect(server, folder, tls=True) as client:
                assert client.request(review({"a": 1}), "/review")[0] == 200
        done.touch()
        assert server.wait_for(b"stopped")
        assert server.join() == 0


def test_idle_connection_does_not_delay_the_end_of_the_server(folder: CertificateFolder) -> None:
    (folder.path / "ended").touch()
    with sample(folder, "ends") as server:
        with Client(server.ports[1]) as idle:
            for _ in range(10):
                with Client(server.ports[1]) as client:
                    assert client.request(review({"a": 1}), "/review")[0] == 200
            server.terminate()
            assert server.wait_for(b"stopped")
            assert idle.wire.recv(1) == b""
        assert server.join() == 0


def test_new_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    first = ensure_certificate(folder, NAMES, datetime.now(UTC))
    with sample(folder) as server, Client(server.ports[0], tmp_path / CA) as old:
        serial = old.serial()
        other = renew_if_due({CA: first[CA], "ca.key": first["ca.key"]}, NAMES, datetime.now(UTC))
        replace(folder.chain, other[CHAIN])
        with Client(server.ports[0], tmp_path / CA) as torn:
            assert torn.serial() == serial  # half of it is there: the last good one
        replace(folder.key, other[KEY])
        with Client(server.ports[0], tmp_path / CA) as new:
            assert new.serial() != serial
            assert new.request(review({"a": 1}), "/review")[0] == 200
        assert old.request(review({"a": 1}), "/review")[0] == 200


def replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def test_tls_before_1_2_is_rejected(folder: CertificateFolder) -> None:
    assert ReloadingContext(folder.chain, folder.key).current().minimum_version is ssl.TLSVersion.TLSv1_2
