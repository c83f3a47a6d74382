"""`mgpu webhook` as a process: TLS, hostile requests, invalid arguments."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mgpu.cli.main import main
from mgpu.serving.request_memory import REVIEWS
from tests.builders import container, pod
from tests.mgpu.serving.process import Client, Server
from tests.mgpu.serving.reviews import patch_of, review


@pytest.fixture
def client(server: Server, folder: Path) -> Iterator[Client]:
    with Client(server.ports[0], folder / "ca.crt") as client:
        yield client


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "mgpu-webhook.mgpu-system.svc", "host.example"])
def test_certificate_of_the_process_is_trusted_by_its_own_ca(server: Server, folder: Path, name: str) -> None:
    with Client(server.ports[0], folder / "ca.crt", name) as client:
        client.send(b"", "/readyz", method="GET")
        assert client.receive()[0] == 200


def test_one_connection_serves_mutation_and_validation(client: Client) -> None:
    raw = pod("p", {"name": "c", "resources": {"limits": {"vke.volcengine.com/mgpu-core": "100"}}})
    _, mutated = client.request(review(raw), "/mutate")
    assert [operation["path"] for operation in patch_of(mutated)] == ["/spec/containers/0/resources/requests"]
    _, denied = client.request(review(pod("p", container("c", 120))), "/validate")
    assert "above 100 must be a multiple of 100" in denied["response"]["status"]["message"]


HOSTILE: dict[str, tuple[bytes, dict[str, Any], int, str]] = {
    "not JSON": (b"{", {}, 400, "the body is not JSON"),
    "nothing": (b"", {}, 400, "the body is not JSON"),
    "not a review": (b"{}", {}, 400, "the body is not an AdmissionReview"),
    "no uid": (
        b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"operation":"DELETE"}}',
        {},
        400,
        "request.uid is missing",
    ),
    "nested without end": (b'{"kind":' * 200_000, {}, 400, "the body is not JSON"),
    "another content type": (b"", {"content_type": "text/html"}, 415, "the content type must be application/json"),
    "another method": (b"", {"method": "GET"}, 405, "The method is not allowed"),
    "larger than any review": (b"x" * (REVIEWS.body + 1), {}, 413, f"the body is larger than {REVIEWS.body} bytes"),
}


@pytest.mark.parametrize(("body", "how", "status", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_request_gets_one_line_of_json_and_the_connection_stays_open(
    client: Client, body: bytes, how: dict[str, Any], status: int, says: str
) -> None:
    client.send(body, "/validate", **how)
    got, headers, text = client.receive()
    assert (got, headers["Content-Type"], text.count(b"\n")) == (status, "application/json", 1)
    assert says in text.decode()
    assert client.request(review(pod("p", {"name": "c"})), "/validate")[1]["response"]["allowed"]


def test_review_of_three_megabytes_is_answered(client: Client) -> None:
    big = pod("p", container("c", 50, 1024), annotations={"note": "x" * 1_500_000})
    old = pod("p", container("c", 50, 1024), annotations={"note": "y" * 1_500_000})
    status, answer = client.request(review(big, "UPDATE", old=old), "/validate")
    assert (status, answer["response"]["allowed"]) == (200, True)


def test_bytes_that_are_no_http_get_an_error_without_traceback(client: Client) -> None:
    client.wire.sendall(b"\x16\x03 hello\r\n\r\n")
    status, _, text = client.receive()
    assert status == 400
    assert b"Traceback" not in text


BAD = {
    "a port that is none": (["--port", "70000"], "settings: webhook.port: "),
    "no settings file": (["--config", "/nope.yaml"], "/nope.yaml: cannot be read"),
    "no certificates": (["--cert-dir", "/nope"], "/nope/tls.crt: does not exist or cannot be read"),
    "a name that is none": (["--names", "a b"], "names: 'a b' is neither a DNS name nor an IP address"),
    "a directory that cannot be": (["--self-signed-dir", "/dev/null/x"], "/dev/null/x: cannot store certificates"),
    "no kubeconfig": (["--kubeconfig", "/nope"], "/nope: "),
}


@pytest.mark.parametrize(("options", "says"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_one_line_and_exit_code_2(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhook.main.logs.set_up_logging", lambda _: None)
    result = CliRunner().invoke(main, ["webhook", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1
