"""The page is read-only and rejects requests that other sites cause."""

import gzip
import json
import re
from typing import Any

import pytest
from flask.testing import FlaskClient

from mgpu.model.errors import RetryLater
from mgpu.presentation.measured_use import NodeUse
from scheduler.api.page.node_use import NodeUses
from scheduler.api.page.page_app import make_app, make_board
from tests.agent_pods import agent
from tests.scheduler.cluster.objects import put
from tests.scheduler.fake import Replica, cluster

FILES = ("index.html", "app.js", "cards.js", "detail.js", "dom.js", "list.js", "store.js", "waiting.js", "style.css")


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2)))


@pytest.fixture
def client(replica: Replica) -> FlaskClient:
    return client_of(replica)


def client_of(replica: Replica, host: str = "127.0.0.1") -> FlaskClient:
    process: Any = replica
    uses = NodeUses(replica.state, lambda _: NodeUse(), lambda work: work())
    return make_app(make_board(replica.state, replica.settings), uses, process, host).test_client()


def test_static_files_are_served_with_etags(client: FlaskClient) -> None:
    page = client.get("/")
    assert page.mimetype == "text/html"
    assert page.data == client.get("/index.html").data
    for name in FILES:
        reply = client.get(f"/{name}")
        assert reply.status_code == 200, name
        again = client.get(f"/{name}", headers={"If-None-Match": reply.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")


def test_page_has_no_foreign_or_inline_content(client: FlaskClient) -> None:
    policy = client.get("/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in FILES:
        text = client.get(f"/{name}").text
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", client.get("/").text)


@pytest.mark.parametrize("path", ["/../app.py", "/static/app.js", "/app.py", "/%2e%2e/app.py", "/nothing"])
def test_unknown_files_are_not_found(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/app.js", "/api/cluster", "/api/nodes/n1", "/api/use"])
def test_page_rejects_writes(client: FlaskClient, method: str, path: str) -> None:
    assert client.open(path, method=method).status_code == 405


def test_cluster_is_compressed_if_accepted(client: FlaskClient) -> None:
    plain = client.get("/api/cluster")
    packed = client.get("/api/cluster", headers={"Accept-Encoding": "gzip, br"})
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed.data)) == plain.json
    assert [node["name"] for node in plain.json["nodes"]] == ["n1"] if plain.json else False


def test_node_details_are_served(client: FlaskClient) -> None:
    found = client.get("/api/nodes/n1").json
    assert found is not None
    assert [card["uuid"] for card in found["cards"]] == ["GPU-n1-0", "GPU-n1-1"]
    assert client.get("/api/nodes/n2").status_code == 404


def test_use_of_the_named_nodes_is_served(replica: Replica, client: FlaskClient) -> None:
    put(replica, agent("n1", ip="192.0.2.7", port=9404))
    assert client.get("/api/use?node=n1&node=n2").json == {}
    assert client.get("/api/use?node=n1&node=n2").json == {
        "n1": {"cards": [[0, None, None], [1, None, None]], "pods": []}
    }
    assert client.get("/api/use").json == {}


def test_page_before_first_sync_is_unavailable(
    replica: Replica, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yet() -> None:
        raise RetryLater("not in sync yet: pods")

    monkeypatch.setattr(replica, "may_answer", not_yet)
    for path in ("/api/cluster", "/api/nodes/n1", "/api/use?node=n1"):
        reply = client.get(path)
        assert (reply.status_code, reply.json) == (503, {"error": "not in sync yet: pods"})
    assert client.get("/").status_code == 200


def test_follower_serves_the_page_with_its_reason(
    replica: Replica, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "not_deciding_reason", lambda: "another replica leads")
    reply = client.get("/api/cluster")
    assert reply.json is not None
    assert (reply.status_code, reply.json["replica"]) == (200, "another replica leads")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8890", 200),
        ("localhost:1234", 200),
        ("[::1]:8890", 200),
        ("127.0.0.1", 200),
        ("rebound.example", 421),
        ("rebound.example:8890", 421),
        ("127.0.0.1.rebound.example:8890", 421),
        ("localhost.rebound.example", 421),
        ("", 421),
    ],
)
def test_page_on_loopback_rejects_foreign_host_names(client: FlaskClient, host: str, status: int) -> None:
    assert client.get("/api/cluster", headers={"Host": host}).status_code == status


def test_page_on_other_addresses_accepts_any_host_name(replica: Replica) -> None:
    client = client_of(replica, "0.0.0.0")
    assert client.get("/api/cluster", headers={"Host": "gpus.example"}).status_code == 200
