"""`Api` over real HTTP: pages, watches that break or are ended, refusals."""

import gzip
import os
import socket
import ssl
import tempfile
import threading
import tracemalloc
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from kubernetes import client
from kubernetes.config import ConfigException

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.client import PAGE, PAGE_BYTES
from mgpu.kube.kubeconfig import Configured, context_names
from mgpu.model.errors import BadObject
from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, ensure_certificate
from tests.mgpu.serving.process import client_certificate

ITEMS: list[dict[str, Any]] = [{"n": 1}, {"n": 2}, {"n": 3}]
LARGE = 9
BOMB = 64 << 20
"""The length of an answer that is packed into less than a hundredth."""
PACKED = gzip.compress(bytes(BOMB), 1)
DEEP = b'{"f:a":' * 2000 + b"{}" + b"}" * 2000


class Handler(BaseHTTPRequestHandler):
    """/pages: three items on two pages · /large, /deep: objects that a user made so · /watch/…: streams ·
    /refused, /text, /half: bad answers.
    """

    protocol_version = "HTTP/1.1"
    release = threading.Event()
    asked: ClassVar[list[int]] = []
    """The limits of the pages of /large."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        match url.path:
            case "/pages":
                more = "continue" not in query
                meta = {"resourceVersion": "7", **({"continue": "more"} if more else {})}
                self._say(200, {"metadata": meta, "items": ITEMS[:2] if more else ITEMS[2:]})
            case "/large":
                start, limit = int(query.get("continue", ["0"])[0]), int(query["limit"][0])
                self.asked.append(limit)
                large = {"resourceVersion": "7", "continue": str(start + limit) if start + limit < LARGE else ""}
                items = [{"n": i, "text": "x" * (PAGE_BYTES // 3)} for i in range(start, min(start + limit, LARGE))]
                self._say(200, {"metadata": large, "items": items})
            case "/deep":
                self._send(200, b'{"metadata":{"resourceVersion":"7"},"items":[{"a":' + DEEP + b'},{"n":2}]}')
            case "/refused":
                self._say(409, {"kind": "Status", "reason": "Conflict", "message": "no"})
            case "/text":
                self._send(502, b"bad gateway")
            case "/bomb" | "/refused-bomb":
                self.send_response(200 if url.path == "/bomb" else 502)
                self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(PACKED)))
                self.end_headers()
                self.wfile.write(PACKED)
            case "/slow" | "/slow-refusal":
                self.send_response(200 if url.path == "/slow" else 502)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                while not self.release.wait(0.01):
                    self.wfile.write(b"x")
            case "/elsewhere":
                self.send_response(302)
                self.send_header("Location", "/who")
                self.send_header("Content-Length", "0")
                self.end_headers()
            case "/half":
                self._send(200, b'{"a": ')
            case "/who":
                self._say(200, {"authorization": self.headers["Authorization"]})
            case _:
                self._stream(url.path)

    def _stream(self, path: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        gone = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
        if path == "/watch/deep":
            self._chunk(b'{"type":"ADDED","object":{"metadata":{"name":"deep","managedFields":' + DEEP + b"}}}\n")
        event = orjson.dumps({"type": "ADDED", "object": {"metadata": {"name": "ü" * 3}}}) + b"\n"
        self._chunk(event[:20])
        self._chunk(event[20:])
        if path == "/watch/gone":
            self._chunk(orjson.dumps(gone) + b"\n")
        elif path == "/watch/open":
            self.release.wait(30)
        if path == "/watch/broken":
            self.close_connection = True
        else:
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _say(self, status: int, body: object) -> None:
        self._send(status, orjson.dumps(body))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[Api]:
    Handler.release.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        configuration = client.Configuration(
            host=f"http://127.0.0.1:{server.server_port}", api_key={"authorization": "Bearer secret"}
        )
        made = Api(Configured(configuration), timeout=30)
        yield made
        Handler.release.set()
        made.close()
        server.shutdown()


def test_a_list_is_all_its_pages(api: Api) -> None:
    assert api.list("/pages") == (ITEMS, "7")
    assert [([*page], version) for page, version in api.pages("/pages")] == [(ITEMS[:2], "7"), (ITEMS[2:], "7")]


def test_a_page_of_large_objects_is_asked_for_in_parts_that_are_small(api: Api) -> None:
    """A page of 500 Pods of a user, 1 MiB each, takes several GiB once it is decoded."""
    Handler.asked.clear()
    pages = [[item["n"] for item in page] for page, _ in api.pages("/large")]
    assert [n for page in pages for n in page] == list(range(LARGE))
    assert max(map(len, pages)) < 3
    assert Handler.asked[0] == PAGE
    assert len(Handler.asked) < LARGE + 6


def test_an_object_that_is_nested_too_deeply_hides_no_other(api: Api) -> None:
    """The API server admits a Pod whose `managedFields` have 10,000 levels. It must not stop all lists and watches."""
    assert api.list("/deep")[0][1] == {"n": 2}
    watch = api.watch("/watch/deep", "1")
    assert [item["metadata"]["name"] for _, item in watch] == ["deep", "üüü"]
    watch.close()


def test_the_token_goes_with_every_request(api: Api) -> None:
    assert api.get("/who") == {"authorization": "Bearer secret"}


def test_a_refusal_has_status_reason_and_message(api: Api) -> None:
    with pytest.raises(ApiError) as refused:
        api.get("/refused")
    assert (refused.value.status, refused.value.reason, refused.value.message) == (409, "Conflict", "no")


def test_a_refusal_that_is_no_status(api: Api) -> None:
    with pytest.raises(ApiError, match="502 : bad gateway"):
        api.get("/text")


@pytest.mark.parametrize(("path", "error"), [("/bomb", Unreachable), ("/refused-bomb", ApiError)])
def test_an_answer_that_unpacks_to_too_much_is_not_read_whole(
    api: Api, path: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server behind the API server's proxy must not fill the memory of a user's machine."""
    monkeypatch.setattr("mgpu.kube.client._LARGEST_ANSWER", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(error):
            api.fetch(path, {"Accept-Encoding": "gzip"}, seconds=30)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < BOMB // 2


def test_a_small_answer_is_read_within_a_deadline_and_a_limit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node behind the API server's proxy must not keep a user's command busy by sending byte after byte."""
    monkeypatch.setattr("mgpu.kube.client._REFUSAL_SECONDS", 0.1)
    assert api.fetch_within("/who", seconds=30, most=1000) == b'{"authorization":"Bearer secret"}'
    for path, seconds, most in (("/slow", 0.1, 2000), ("/bomb", 30, 1000)):
        with pytest.raises(Unreachable, match=f"more than {seconds:g} s or {most:,} bytes"):
            api.fetch_within(path, seconds=seconds, most=most)
    with pytest.raises(ApiError, match=r"502 : x+$"):
        api.fetch_within("/slow-refusal", seconds=30, most=1000)


def test_a_redirection_is_not_followed(api: Api) -> None:
    """A server behind the API server's proxy could otherwise have the user's command call any path of it."""
    assert api.fetch("/elsewhere", {}, seconds=30)[0] == b""


def test_half_an_answer_is_none(api: Api) -> None:
    with pytest.raises(Unreachable):
        api.get("/half")


def test_what_is_no_list(api: Api) -> None:
    with pytest.raises(Unreachable, match="is not a list"):
        api.list("/who")


def test_events_in_pieces_are_put_together(api: Api) -> None:
    watch = api.watch("/watch/whole", "1")
    assert [(kind, item["metadata"]["name"]) for kind, item in watch] == [("ADDED", "üüü")]
    watch.close()


def test_a_server_that_went_without_a_word_is_noticed_by_a_watch(api: Api) -> None:
    watch = api.watch("/watch/open", "1")
    connection: Any = watch._response.connection
    alive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
    assert [connection.sock.getsockopt(*option) for option in alive] == [1, 30]
    watch.close()


@pytest.mark.parametrize(("path", "error"), [("/watch/gone", ApiError), ("/watch/broken", Unreachable)])
def test_a_watch_that_ends_badly(api: Api, path: str, error: type[Exception]) -> None:
    watch = api.watch(path, "1")
    events = iter(watch)
    assert next(events)[0] == "ADDED"
    with pytest.raises(error):
        next(events)
    watch.close()


def test_a_watch_is_ended_by_another_thread(api: Api) -> None:
    watch = api.watch("/watch/open", "1")
    events = iter(watch)
    next(events)
    threading.Timer(0.05, watch.end).start()
    with pytest.raises((Unreachable, StopIteration)):
        next(events)
    watch.close()
    watch.end()  # again, after it is over


def test_nobody_there() -> None:
    api = Api(Configured(client.Configuration(host="http://127.0.0.1:9")), timeout=1)
    with pytest.raises(Unreachable):
        api.get("/x")


def test_list_of_kubeconfig_files_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("{current-context: x, contexts: [{name: x, context: {cluster: x, user: x}}]}")
    (tmp_path / "b").write_text(
        "{clusters: [{name: x, cluster: {server: 'http://127.0.0.1:9'}}], users: [{name: x, user: {}}]}"
    )
    files = os.pathsep.join(str(tmp_path / name) for name in ("none", "a", "b"))
    monkeypatch.setenv("KUBECONFIG", files)
    with pytest.raises(Unreachable, match="port=9"):
        Api.connect().get("/version")


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ConfigException("Token file exists but empty.")])
def test_a_token_that_cannot_be_read_at_the_moment_is_no_answer(error: Exception) -> None:
    """The library reads the token again every minute, in the thread that makes a call. A failure must not end it."""

    def hook(_: client.Configuration) -> None:
        raise error

    configuration: Any = client.Configuration(host="http://127.0.0.1:9", api_key={"BearerToken": "bearer secret"})
    configuration.refresh_api_key_hook = hook
    with pytest.raises(Unreachable, match=str(error.args[-1])):
        Api(Configured(configuration)).get("/x")


def test_names_of_contexts_are_those_of_all_files(tmp_path: Path) -> None:
    more = "clusters: [{name: c, cluster: {}}], users: [{name: u, user: {}}]"
    for name in ("x", "y"):
        context = f"{{name: {name}, context: {{cluster: c, user: u}}}}"
        (tmp_path / name).write_text(f"{{current-context: x, contexts: [{context}], {more}}}")
    assert context_names(os.pathsep.join(str(tmp_path / name) for name in ("x", "y"))) == ["x", "y"]
    assert context_names(str(tmp_path / "none")) == []


def test_no_kubeconfig() -> None:
    with pytest.raises(BadObject, match="/does/not/exist"):
        Api.connect("/does/not/exist")


def inline_kubeconfig(folder: Path, url: str, authority: Path, client: Path) -> str:
    """Write a kubeconfig that contains the CA, and the client's certificate and key (both in the file `client`)."""
    ca, own = (b64encode(file.read_bytes()).decode() for file in (authority, client))
    whole = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": url, "certificate-authority-data": ca}}],
        "users": [{"name": "x", "user": {"client-certificate-data": own, "client-key-data": own}}],
    }
    (folder / "kubeconfig").write_bytes(orjson.dumps(whole))
    return str(folder / "kubeconfig")


def test_what_a_kubeconfig_has_inline_is_left_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by a process that is killed."""
    folder = CertificateFolder(tmp_path / "tls")
    ensure_certificate(folder, {"127.0.0.1"}, datetime.now(UTC))
    authority = folder.path / CA
    own = client_certificate(folder, tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.load_cert_chain(folder.chain, folder.key)
    context.verify_mode = ssl.CERT_REQUIRED
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}"
        try:
            for _ in range(2):
                api = Api.connect(inline_kubeconfig(tmp_path, url, authority, own), timeout=30)
                assert not list(temporary.iterdir())
                assert api.list("/pages") == (ITEMS, "7")
                api.close()
        finally:
            server.shutdown()
