"""A pod that fits on no node of kube-scheduler's sample is nominated to a node outside of it."""

from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from scheduler.api import extender
from scheduler.decisions import suggestions
from tests import builders as b
from tests.scheduler.fake import Replica, clients, cluster

SAMPLE = ["n0", "n1"]


class Sampling:
    """A cluster of nodes with one card each. The cards of the sample are used in part, so that 60 % fit on none."""

    def __init__(self, nodes: int = 6, used: int = 2) -> None:
        self.replica = Replica(cluster(*((f"n{i}", 1) for i in range(nodes))))
        self.client: Client = clients(self.replica)[1]
        record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
        for i in range(used):
            self.replica.api.put("pods", b.share(f"old-{i}", 60, annotations=record, node=f"n{i}"))
        self.replica.api.put("pods", b.share("p", 60))
        self.replica.deliver()

    def filter(self, names: list[str] = SAMPLE, **spec: Any) -> list[str]:
        """Call the filter, and let the suggestions work. Return the nodes that pass."""
        pod = self.replica.api.pod("p")
        pod = {**pod, "spec": {**pod["spec"], **spec}}
        reply = self.client.post("/filter", json={"Pod": pod, "NodeNames": names})
        self.replica.clock.now += 1
        self.replica.suggestions.work()
        self.replica.deliver()
        found: list[str] = orjson.loads(reply.data)["NodeNames"]
        return found

    @property
    def nominated(self) -> Any:
        return (self.replica.api.pod("p").get("status") or {}).get("nominatedNodeName")

    def clear(self) -> None:
        """Remove the nomination, as kube-scheduler does if the pod does not fit on its nominated node."""
        self.replica.api.edit_pod("p", lambda pod: pod["status"].pop("nominatedNodeName", None))
        self.replica.deliver()


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extender, "_SAMPLE", 2)


def test_pod_that_fits_outside_of_the_sample_is_nominated() -> None:
    sampling = Sampling()
    assert sampling.filter() == []
    assert sampling.nominated in ("n2", "n3", "n4", "n5")
    assert sampling.filter([sampling.nominated]) == [sampling.nominated]


@pytest.mark.parametrize("case", ["small sample", "fits", "gated"])
def test_pod_is_not_nominated_without_need(case: str) -> None:
    sampling = Sampling()
    names = {"small sample": ["n0"], "fits": ["n0", "n2"], "gated": SAMPLE}[case]
    if case == "gated":
        sampling.replica.api.edit_pod("p", lambda pod: pod["spec"].update(schedulingGates=[{"name": "a/b"}]))
        sampling.replica.deliver()
    sampling.filter(names)
    assert sampling.nominated is None


def test_only_nodes_of_the_node_selector_are_suggested() -> None:
    sampling = Sampling()
    sampling.replica.api.put("nodes", b.node("n4", labels={"zone": "a"}))
    sampling.replica.deliver()
    sampling.filter(nodeSelector={"zone": "a"})
    assert sampling.nominated == "n4"


def test_nodes_that_kube_scheduler_refuses_are_suggested_a_few_times_only() -> None:
    sampling = Sampling(nodes=9)
    nominated = []
    for _ in range(6):
        sampling.filter()
        nominated.append(sampling.nominated)
        if sampling.nominated:
            sampling.filter()  # The pod of the call is still nominated.
            sampling.clear()
    found = [node for node in nominated if node]
    assert len(found) == len(set(found)) == suggestions._SAMPLED_ATTEMPTS


def test_vain_search_is_repeated_only_later() -> None:
    sampling = Sampling(nodes=3, used=3)
    sampling.filter()
    assert sampling.nominated is None
    sampling.replica.api.remove("pods", "old-2")
    sampling.replica.deliver()
    sampling.filter()
    assert sampling.nominated is None
    sampling.replica.clock.now += suggestions._KEEP_SECONDS + 1
    sampling.replica.suggestions.work()
    sampling.filter()
    assert sampling.nominated == "n2"


def test_searches_pause() -> None:
    sampling = Sampling()
    for i in range(3):
        sampling.replica.api.put("pods", b.share(f"q{i}", 60))
    sampling.replica.deliver()
    for i in range(3):
        sampling.client.post("/filter", json={"Pod": sampling.replica.api.pod(f"q{i}"), "NodeNames": SAMPLE})
    for searched in range(1, 4):
        sampling.replica.suggestions.work()
        status = [sampling.replica.api.pod(f"q{i}").get("status") or {} for i in range(3)]
        assert sum("nominatedNodeName" in found for found in status) == searched
        sampling.replica.clock.now += suggestions._SEARCH_PAUSE_SECONDS


def test_many_waiting_pods_of_one_namespace_do_not_delay_the_search_of_another() -> None:
    sampling = Sampling(nodes=30)
    api, client = sampling.replica.api, sampling.client
    for i in range(200):
        api.put("pods", b.share(f"q{i}", 60, namespace="flood"))
    sampling.replica.deliver()
    for i in range(200):
        pod = api.pods["flood", f"q{i}"]
        client.post("/filter", json={"Pod": pod, "NodeNames": SAMPLE})
    client.post("/filter", json={"Pod": api.pod("p"), "NodeNames": SAMPLE})
    for _ in range(suggestions._MOST_SAMPLED + 2):
        sampling.replica.suggestions.work()
        sampling.replica.clock.now += suggestions._SEARCH_PAUSE_SECONDS
    assert sampling.nominated is not None


def test_few_pods_of_a_namespace_are_nominated_at_a_time_and_then_the_next_ones() -> None:
    """kube-scheduler counts the cpu of nominated pods, even on a node that they can never use."""
    sampling = Sampling(nodes=40)
    api, client = sampling.replica.api, sampling.client
    names = [f"q{i}" for i in range(suggestions._MOST_SAMPLED + 5)]

    def waiting() -> list[str]:
        return [name for name in names if "nominatedNodeName" not in api.pod(name)["status"]]

    for name in names:
        api.put("pods", b.share(name, 60))
    sampling.replica.deliver()
    for _ in range(2):
        for name in waiting():
            client.post("/filter", json={"Pod": api.pod(name), "NodeNames": SAMPLE})
        for _ in names:
            sampling.replica.suggestions.work()
            sampling.replica.clock.now += suggestions._SEARCH_PAUSE_SECONDS
        sampling.replica.deliver()
        nominated = {name: api.pod(name)["status"]["nominatedNodeName"] for name in names if name not in waiting()}
        assert len(nominated) in (suggestions._MOST_SAMPLED, len(names))
        for name, node in nominated.items():
            if not api.pod(name)["spec"].get("nodeName"):
                api.bind(name, node)
        sampling.replica.deliver()
    assert waiting() == []
