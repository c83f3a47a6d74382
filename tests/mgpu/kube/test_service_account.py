"""`ServiceAccount`: the API server of the own cluster, as a pod finds it."""

import ssl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mgpu.kube import Api, Unreachable
from mgpu.kube import client as kube_client
from mgpu.kube.service_account import ServiceAccount
from mgpu.model.errors import BadObject
from playground.apiserver.hosting import self_signed
from tests.clock import Clock

ENVIRON = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}


class Echo(BaseHTTPRequestHandler):
    """Answers each request with its credentials."""

    def do_GET(self) -> None:
        body = b'{"user": "%s"}' % (self.headers["Authorization"] or "").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the kubelet mounts, and beside it the server's certificate."""
    mounted = tmp_path / "serviceaccount"
    mounted.mkdir()
    (mounted / "ca.crt").write_text(Path(self_signed(tmp_path)[0]).read_text())
    (mounted / "token").write_text("first\n")
    return mounted


@pytest.fixture
def environ(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a pod whose API server is an `Echo`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder.parent / "apiserver.crt", folder.parent / "apiserver.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield ENVIRON | {"KUBERNETES_SERVICE_PORT": str(server.server_port)}
        server.shutdown()


def test_pod_connects_with_its_token_and_prints_nothing(
    folder: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kube_client, "ServiceAccount", partial(ServiceAccount, folder=folder))
    monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    api = Api.connect()
    assert api.get("/version") == {"user": "Bearer first"}
    api.close()
    assert capsys.readouterr() == ("", "")


def test_server_with_a_certificate_of_another_ca_is_refused(
    folder: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (folder / "ca.crt").write_text(Path(self_signed(other)[0]).read_text())
    api = Api(ServiceAccount(environ, folder))
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        api.get("/version")
    api.close()


def test_token_is_read_again_after_a_minute(folder: Path) -> None:
    clock = Clock()
    server = ServiceAccount(ENVIRON, folder, clock)
    (folder / "token").write_text("second")
    assert server.credentials() == {"Authorization": "Bearer first"}
    clock.now += 61
    assert server.credentials() == {"Authorization": "Bearer second"}


@pytest.mark.parametrize("reason", ["is empty", "No such file"])
def test_token_that_cannot_be_read_at_the_moment_is_no_answer(folder: Path, reason: str) -> None:
    clock = Clock()
    api = Api(ServiceAccount(ENVIRON, folder, clock))
    clock.now += 61
    (folder / "token").write_text("")
    if reason != "is empty":
        (folder / "token").unlink()
    with pytest.raises(Unreachable, match=reason):
        api.get("/version")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"a\r\nX-Evil: 1", b"a\0"])
def test_file_that_has_no_token_is_no_answer(folder: Path, text: bytes) -> None:
    """A ValueError would end the threads that read the API server."""
    clock = Clock()
    api = Api(ServiceAccount(ENVIRON, folder, clock))
    clock.now += 61
    (folder / "token").write_bytes(text)
    with pytest.raises(Unreachable, match="has no token"):
        api.get("/version")


@pytest.mark.parametrize("name", ["token", "ca.crt"])
@pytest.mark.parametrize("empty", [True, False])
def test_pod_without_token_or_ca_is_refused(folder: Path, name: str, *, empty: bool) -> None:
    (folder / name).write_text("")
    if not empty:
        (folder / name).unlink()
    with pytest.raises(BadObject, match=name):
        ServiceAccount(ENVIRON, folder)


@pytest.mark.parametrize("name", ENVIRON)
def test_process_outside_of_a_cluster_has_no_service_account(folder: Path, name: str) -> None:
    with pytest.raises(BadObject, match="KUBERNETES_SERVICE_HOST"):
        ServiceAccount(ENVIRON | {name: ""}, folder)


def test_address_of_ipv6_is_in_brackets(folder: Path) -> None:
    assert ServiceAccount(ENVIRON | {"KUBERNETES_SERVICE_HOST": "fd00::1"}, folder).url == "https://[fd00::1]:1"
