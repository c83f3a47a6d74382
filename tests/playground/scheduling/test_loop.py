"""The scheduling loop against our API server, and with an extender over HTTP."""

from typing import Any

import pytest

from mgpu.kube import Api, ApiError
from playground.scheduling import Extender
from tests.playground.fake_cluster import EVENTS, PODS, FakeCluster, Json
from tests.playground.scheduling.fake_extender import FakeExtender
from tests.waiting import until


def test_scheduling_prefers_the_emptiest_node_and_respects_allocatable(cluster: FakeCluster) -> None:
    cluster.node("n1")
    cluster.node("n2")
    cluster.start_scheduling()
    for i in range(4):
        cluster.submit(f"p{i}", {"cpu": "2"})
    assert sorted(cluster.wait_bound(f"p{i}") for i in range(4)) == ["n1", "n1", "n2", "n2"]
    cluster.submit("more", {"cpu": "1"})
    assert cluster.wait_refused("more") == "0/2 nodes are available: 2 Insufficient cpu."
    events = cluster.api.list(EVENTS)[0]
    assert {"Scheduled", "FailedScheduling"} >= {event["reason"] for event in events}


def test_refused_pod_is_retried_when_another_is_deleted(cluster: FakeCluster) -> None:
    cluster.node("n1")
    cluster.start_scheduling()
    cluster.submit("first", {"cpu": "4"})
    cluster.wait_bound("first")
    cluster.submit("second", {"cpu": "4"})
    cluster.wait_refused("second")
    cluster.api.delete(f"{PODS}/first", {"gracePeriodSeconds": 0})
    assert cluster.wait_bound("second") == "n1"


def test_refused_pod_is_retried_when_a_node_is_added_or_changes(cluster: FakeCluster) -> None:
    cluster.start_scheduling()
    cluster.submit("p", nodeSelector={"a": "b"})
    assert cluster.wait_refused("p") == "no nodes available to schedule pods"
    cluster.node("n1")
    until(lambda: "1 node(s) didn't match" in cluster.wait_refused("p"))
    cluster.api.patch("/api/v1/nodes/n1", {"metadata": {"labels": {"a": "b"}}})
    assert cluster.wait_bound("p") == "n1"


def test_pods_of_another_scheduler_and_gated_pods_are_ignored(cluster: FakeCluster) -> None:
    cluster.node("n1")
    cluster.submit("other", schedulerName="volcano")
    cluster.submit("gated", schedulingGates=[{"name": "wait"}])
    cluster.start_scheduling()
    cluster.submit("mine")
    assert cluster.wait_bound("mine") == "n1"
    assert cluster.node_of("other") == cluster.node_of("gated") == ""


def test_extender_filters_and_its_weighted_score_decides(cluster: FakeCluster, extender: FakeExtender) -> None:
    for name in ("n1", "n2", "n3"):
        cluster.node(name)
    extender.refuse, extender.scores = {"n3": "no card"}, {"n1": 1, "n2": 2, "n3": 10}
    cluster.start_scheduling(Extender(extender.url, weight=5))
    cluster.submit("p")
    assert cluster.wait_bound("p") == "n2"
    path, body = extender.asked[0]
    assert (path, body["NodeNames"], body["Nodes"]) == ("/filter", ["n1", "n2", "n3"], None)
    assert body["Pod"]["metadata"]["name"] == "p"


def test_extender_reasons_are_reported(cluster: FakeCluster, extender: FakeExtender) -> None:
    cluster.node("n1")
    extender.refuse = {"n1": "half of 50% short"}
    cluster.start_scheduling(Extender(extender.url))
    cluster.submit("p")
    assert cluster.wait_refused("p") == "0/1 nodes are available: 1 half of 50% short."
    [event] = until(lambda: cluster.api.list(EVENTS)[0])
    # The real one formats an Event's message once more (seen on 1.36.2), the condition's not.
    assert (event.get("note") or event["message"]) == "0/1 nodes are available: 1 half of 50%!s(MISSING)hort."
    extender.refuse = {}
    cluster.api.patch("/api/v1/nodes/n1", {"metadata": {"annotations": {"touched": "1"}}})
    assert cluster.wait_bound("p") == "n1"


def test_extender_gets_only_managed_pods_and_decides_ignored_resources(
    cluster: FakeCluster, extender: FakeExtender
) -> None:
    cluster.node("n1")
    cluster.start_scheduling(Extender(extender.url, managed={"example.com/core": True}))
    cluster.submit("plain", {"cpu": "1"})
    cluster.submit("gpu", {"example.com/core": "5"})
    assert cluster.wait_bound("plain") == cluster.wait_bound("gpu") == "n1"
    assert {body["Pod"]["metadata"]["name"] for _, body in extender.asked} == {"gpu"}


def test_extender_outage_delays_managed_pods(cluster: FakeCluster, extender: FakeExtender) -> None:
    cluster.node("n1")
    extender.status = 500
    cluster.start_scheduling(Extender(extender.url, managed={"example.com/core": True}))
    cluster.submit("plain")
    assert cluster.wait_bound("plain") == "n1"
    cluster.api.patch(
        "/api/v1/nodes/n1/status",
        {"status": {"capacity": {"example.com/core": "9"}, "allocatable": {"example.com/core": "9"}}},
    )
    cluster.submit("gpu", {"example.com/core": "5"})
    assert "failed filter with extender" in cluster.wait_refused("gpu")
    extender.status = 200
    assert cluster.wait_bound("gpu") == "n1"


def test_extender_unreachable_is_named_by_its_url(cluster: FakeCluster, extender: FakeExtender) -> None:
    cluster.node("n1")
    extender.close()
    cluster.start_scheduling(Extender(extender.url))
    cluster.submit("p")
    assert cluster.wait_refused("p").startswith(f'Post "{extender.url}/filter": ')


def test_extender_null_for_node_names_means_none(cluster: FakeCluster, extender: FakeExtender) -> None:
    cluster.node("n1")
    extender.null = True
    cluster.start_scheduling(Extender(extender.url))
    cluster.submit("p")
    assert cluster.wait_refused("p") == "0/1 nodes are available."


def test_extender_score_that_is_no_integer_is_ignored(cluster: FakeCluster, extender: FakeExtender) -> None:
    cluster.node("n1")
    cluster.node("n2")
    extender.scores = {"n2": 8.0, "n1": 0}
    cluster.start_scheduling(Extender(extender.url, weight=100))
    cluster.submit("p")
    assert cluster.wait_bound("p") == "n1"


@pytest.mark.parametrize("row", ["n1", None, {"Score": 1}, {"Host": 1, "Score": 1}])
def test_extender_scores_in_a_malformed_answer_are_ignored(extender: FakeExtender, row: Any) -> None:
    extender.answer = lambda *_: [row]  # type: ignore[method-assign]
    assert Extender(extender.url).prioritize({}, ["n1"]) == {}


def test_refused_binding_is_retried(cluster: FakeCluster) -> None:
    cluster.node("n1")

    class Refusing(Api):
        refusals = 2

        def create(self, path: str, body: Any, **query: object) -> Json:
            if path.endswith("/binding") and self.refusals:
                self.refusals -= 1
                raise ApiError(409, "Conflict", "no card is left")
            return cluster.api.create(path, body, **query)

    refusing = Refusing(cluster.api._server)
    cluster.start_scheduling(api=refusing)
    cluster.submit("p")
    assert cluster.wait_refused("p") == 'running Bind plugin "DefaultBinder": no card is left'
    assert cluster.wait_bound("p") == "n1"
