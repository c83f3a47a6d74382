"""Cards that the kubelet itself gave out: held for whom the node's Device names, and shared out to nobody."""

import json
from typing import Any

import pytest

from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, cluster

Raw = dict[str, Any]
KEY = "node.koordinator.sh/devices-checkpoints"


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 2))


def told(api: FakeApi, text: str, node: str = "n1") -> None:
    device = json.loads(json.dumps(api.devices[node]))
    device["metadata"]["annotations"] = {KEY: text}
    api.put("devices", device)


def row(uid: str = "uid-old", card: str = "GPU-n1-0") -> Raw:
    return {"podUID": uid, "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": [card]}


def free(replica: Replica) -> list[int]:
    return [s.core_free for s in replica.state.node_snapshot("n1", "").cards]


def test_a_card_given_before_mgpu_came_is_held_until_the_node_says_otherwise(api: FakeApi) -> None:
    told(api, json.dumps([row()]))
    replica = Replica(api)
    assert free(replica) == [0, 1000]
    told(api, "[]")
    replica.deliver()
    assert free(replica) == [1000, 1000]


def test_a_pod_that_runs_without_a_record_holds_what_is_listed_and_no_more(api: FakeApi) -> None:
    """The upgrade case of the Koordinator seed."""
    amounts = {"nvidia.com/gpu": "1"}
    raw = b.pod("old", {"name": "c", "resources": {"limits": amounts, "requests": amounts}}, node="n1", phase="Running")
    api.put("pods", raw)
    replica = Replica(api)
    assert free(replica) == [0, 0]
    assert [reason for _, reason, _ in replica.events] == ["UnknownCards"]
    told(api, json.dumps([row()]))
    replica.deliver()
    assert free(replica) == [0, 1000]
    assert replica.state.undecided_pods() == ()


def test_ids_of_other_resources_are_no_cards_that_are_missing(api: FakeApi) -> None:
    told(api, json.dumps([row(), {**row(card="mlx5_0"), "resourceName": "rdma/hca"}]))
    amounts = {"nvidia.com/gpu": "1", "rdma/hca": "1"}
    api.put("pods", b.pod("old", {"name": "c", "resources": {"limits": amounts}}, node="n1", phase="Running"))
    replica = Replica(api)
    assert free(replica) == [0, 1000]
    assert not replica.events


def test_a_record_wins_over_the_list(api: FakeApi) -> None:
    told(api, json.dumps([row("uid-p")]))
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
    api.put("pods", b.share("p", 30, annotations=record, node="n1"))
    assert free(Replica(api)) == [1000, 700]


def test_a_list_that_cannot_be_read_leaves_the_last_one_in_force(api: FakeApi) -> None:
    told(api, json.dumps([row()]))
    replica = Replica(api)
    told(api, json.dumps([row()])[:20])
    replica.deliver()
    assert free(replica) == [0, 1000]
    assert [reason for _, reason, _ in replica.events] == ["BadCheckpoints"]


def test_it_is_named_once_its_pod_is_known_and_outlives_its_device(api: FakeApi) -> None:
    told(api, json.dumps([row()]))
    api.put("pods", b.pod("old", b.container("c"), node="n1", phase="Running"))
    replica = Replica(api)
    assert [(h.key, h.dialect) for h in replica.state.holdings()] == [("default/old", "nvidia")]
    api.remove("devices", "n1")
    replica.deliver()
    assert len(replica.state.holdings()) == 1


@pytest.mark.parametrize("order", [("devices", "pods"), ("pods", "devices")])
def test_the_order_of_the_watches_makes_no_difference(api: FakeApi, order: tuple[str, str]) -> None:
    replica = Replica(api)
    told(api, json.dumps([row(), row("uid-gone", "GPU-n1-1")]))
    api.put("pods", b.pod("old", b.container("c"), node="n1", phase="Running"))
    api.put("pods", b.pod("gone", b.container("c"), node="n1", phase="Running"))
    api.remove("pods", "gone")
    for kind in order:
        replica.deliver(kind)
    assert free(replica) == free(Replica(api)) == [0, 0]
    assert replica.state.holdings() == Replica(api).state.holdings()


@pytest.mark.parametrize("order", [("devices", "pods"), ("pods", "devices")])
def test_a_pod_that_has_ended_holds_nothing_though_the_list_lags(api: FakeApi, order: tuple[str, str]) -> None:
    replica = Replica(api)
    told(api, json.dumps([row()]))
    api.put("pods", b.pod("old", b.container("c"), node="n1", phase="Succeeded"))
    for kind in order:
        replica.deliver(kind)
    assert free(replica) == [1000, 1000]


def test_cards_that_come_free_so_are_announced(api: FakeApi) -> None:
    told(api, json.dumps([row()]))
    replica = Replica(api)
    replica.freed.clear()
    told(api, "[]")
    replica.deliver()
    assert replica.freed == ["n1"]


@pytest.mark.parametrize("order", [("nodes", "devices"), ("devices", "nodes")])
def test_of_a_node_that_is_gone_with_its_device_nothing_is_kept(api: FakeApi, order: tuple[str, str]) -> None:
    told(api, json.dumps([row()]))
    replica = Replica(api)
    for kind in order:
        assert len(replica.state.holdings()) == 1
        api.remove(kind, "n1")
        replica.deliver()
    assert replica.state.holdings() == ()
    api.put("nodes", b.node("n1"))
    replica.deliver()
    assert replica.state.holdings() == ()


@pytest.mark.parametrize("known", [True, False], ids=["its pod is known", "of its pod the node alone tells"])
def test_a_list_that_names_a_pod_of_another_node_takes_nothing_from_that_node(*, known: bool) -> None:
    """A stolen token of an agent writes the list of its own node, with whatever uids in it."""
    api = cluster(("n1", 2), ("n2", 1))
    told(api, json.dumps([row()]))
    if known:
        api.put("pods", b.pod("old", b.container("c"), node="n1", phase="Running"))
    replica = Replica(api)
    for text in (json.dumps([row(card="GPU-n2-0")]), "[]"):
        told(api, text, "n2")
        replica.deliver()
        assert free(replica) == [0, 1000]
    told(api, "[]")
    replica.deliver()
    assert free(replica) == [1000, 1000]


def test_a_list_that_names_a_pod_without_a_node_gives_it_nothing_elsewhere_when_it_comes() -> None:
    api = cluster(("n1", 2), ("n2", 1))
    told(api, json.dumps([row(card="GPU-n2-0")]), "n2")
    replica = Replica(api)
    told(api, json.dumps([row()]))
    api.put("pods", b.pod("old", b.container("c"), node="n1", phase="Running"))
    replica.deliver()
    assert free(replica) == [0, 1000]
