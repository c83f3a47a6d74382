"""The cluster that the benchmark asks, with three nodes and without a server: it still fits the extender."""

from collections.abc import Callable
from typing import Any

import pytest
from werkzeug.test import Client

from bench.clusters import running
from bench.made import cluster_app
from tests import builders as b

NAMES = ["node-0", "node-1", "node-2"]
Post = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def post() -> Post:
    client = Client(cluster_app(3, 0))

    def send(path: str, body: Any) -> Any:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json

    return send


def test_the_no_op_extender_answers_what_mgpu_answered(post: Post) -> None:
    body = {"Pod": b.share("p", 80), "NodeNames": NAMES}
    passed = post("/filter", body)
    assert passed["NodeNames"] == ["node-0", "node-2"]
    assert post("/noop/filter", body) == passed
    scores = post("/prioritize", body)
    assert [row["Host"] for row in scores] == NAMES
    assert post("/noop/prioritize", body) == scores


def test_an_added_pod_counts_at_once(post: Post) -> None:
    for card in range(8):
        post("/changed", {"pod": running(f"more-{card}", 1, card)})
    assert "node-1" not in post("/filter", {"Pod": b.share("p", 20), "NodeNames": NAMES})["NodeNames"]


def test_a_binding_is_decided_and_its_time_is_known(post: Post) -> None:
    raw = b.share("waits", 20)
    raw["metadata"]["resourceVersion"] = "1"
    post("/changed", {"pod": raw})
    binding = {"PodName": "waits", "PodNamespace": "default", "PodUID": "uid-waits", "Node": "node-2"}
    assert post("/bind", binding)["Error"] == ""
    assert len(post("/took", {})) == 1
