"""What the cluster cache says of nodes, cards and pods, whatever the order of the events."""

from dataclasses import replace

import pytest

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.scheduler.cluster.objects import core_free, put, record
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster


@pytest.fixture
def replica() -> Replica:
    """A node with two cards."""
    return Replica(cluster(("n1", 2)))


def test_pod_created_again_under_its_name_is_another_pod(replica: Replica) -> None:
    put(replica, b.share("p", uid="first", annotations=record(), node="n1"))
    replica.api.remove("pods", "p")
    put(replica, b.share("p", uid="second"))
    assert core_free(replica) == [1000, 1000]
    assert replica.state.uid_of("default", "p") == "second"


def test_uid_of_a_new_pod_survives_the_late_deletion_of_the_old_pod(replica: Replica) -> None:
    """A new list delivers new pods before deleted ones."""
    replica.state.pod_changed(b.share("p", uid="first"))
    replica.state.pod_changed(b.share("p", uid="second"))
    replica.state.pod_gone(b.share("p", uid="first"))
    assert replica.state.uid_of("default", "p") == "second"


def test_pod_without_gpu_request_is_stored_by_name_only(replica: Replica) -> None:
    put(replica, b.pod("plain", b.container("c"), node="n1"))
    assert replica.state.uid_of("default", "plain") == "uid-plain"
    assert replica.state.gpu_pod("uid-plain") is None
    assert core_free(replica) == [1000, 1000]


def test_pod_that_is_malformed_raises_with_the_path_of_the_field() -> None:
    raw = b.share("p")
    raw["spec"]["containers"] = "none"
    with pytest.raises(Exception, match=r"spec\.containers"):
        ClusterCache(SETTINGS).pod_changed(raw)


def test_holding_on_a_node_that_does_not_exist_counts_once_the_node_does() -> None:
    api = FakeApi()
    replica = Replica(api)
    put(replica, b.share("p", annotations=record(), node="n1"))
    assert [h.node for h in replica.state.holdings()] == ["n1"]
    other = cluster(("n1", 2))
    api.put("nodes", other.nodes["n1"])
    api.put("devices", other.devices["n1"])
    replica.deliver()
    assert core_free(replica) == [500, 1000]


def test_deleted_device_takes_the_cards_and_leaves_the_holdings(replica: Replica) -> None:
    put(replica, b.share("p", annotations=record(), node="n1"))
    device = replica.api.devices["n1"]
    replica.api.remove("devices", "n1")
    replica.deliver()
    assert core_free(replica) == []
    replica.api.put("devices", device)
    replica.deliver()
    assert core_free(replica) == [500, 1000]


def test_holding_on_a_card_that_becomes_smaller_stays(replica: Replica) -> None:
    put(replica, b.share("p", 50, 70 * 1024, annotations=record(), node="n1"))
    replica.api.put("devices", write_device(Node("n1"), "", b.cards(2, gib=40)))
    replica.deliver()
    assert [s.memory_free for s in replica.state.node_snapshot("n1", "").cards] == [0, 40 * b.GIB]
    replica.api.remove("pods", "p")
    replica.deliver()
    assert [s.memory_free for s in replica.state.node_snapshot("n1", "").cards] == [40 * b.GIB] * 2


def test_device_that_cannot_be_read_leaves_the_last_one_in_force(replica: Replica) -> None:
    device = write_device(Node("n1"), "", b.cards(2))
    device["spec"]["devices"][1]["resources"]["koordinator.sh/gpu-memory"] = "much"
    first = b.card(0)
    same_uuid = write_device(Node("n1"), "", (first, replace(first, index=1, minor=1)))
    for invalid, text in ((device, "spec.devices[1].resources[koordinator.sh/gpu-memory]"), (same_uuid, "UUID")):
        replica.events.clear()
        replica.api.put("devices", invalid)
        replica.deliver()
        (name, reason, message), *_ = replica.events
        assert (name, reason) == ("n1", "BadDevice")
        assert text in message
        assert core_free(replica) == [1000, 1000]


def test_node_without_a_device_has_equal_cards_by_its_capacity() -> None:
    api = FakeApi()
    raw = b.node("n1")
    raw["status"]["capacity"] |= {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}
    api.put("nodes", raw)
    cards = Replica(api).state.node_snapshot("n1", "").cards
    assert [state.card.memory for state in cards] == [15 * b.GIB] * 2


def test_node_with_mgpus_agent_has_no_cards_before_its_device() -> None:
    """No card of the Device would match an allocation record about cards inferred from the capacity."""
    api = FakeApi()
    raw = b.node("n1", labels={}, **{"mgpu.io/agent": "{}"})
    raw["status"]["capacity"] |= {"aliyun.com/gpu-mem": "160", "aliyun.com/gpu-count": "2"}
    api.put("nodes", raw)
    replica = Replica(api)
    assert replica.state.node_snapshot("n1", "").cards == ()
    api.put("devices", cluster(("n1", 2)).devices["n1"])
    replica.deliver()
    assert [s.card.uuid for s in replica.state.node_snapshot("n1", "").cards] == ["GPU-n1-0", "GPU-n1-1"]
