"""Pods that run without a record and that were handed nothing hold nothing.

The kubelet starts a container whose resource its node does not offer without asking any plugin. A tenant needs no more
than `nodeName` for that, and every share that such a pod held on all cards of its node would be denied to others.
"""

import json
from typing import Any

import pytest

from mgpu.model.device_checkpoints import CHECKPOINTS, no_devices_entry, write_entries
from mgpu.model.device_object import WHOLE_CARDS_LABEL
from mgpu.presentation.overview import make_overview
from tests import builders as b
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster
from tests.scheduler.partitioning.cluster import MIG, slices, wants
from tests.scheduler.partitioning.cluster import cluster as cut_cluster

Raw = dict[str, Any]
EVERYBODY = json.loads(write_entries([no_devices_entry("*")]))


def listed(api: FakeApi, *rows: Raw, complete: bool = True, node: str = "n1") -> None:
    """The node's Device lists these rows, and promises to list all such pods."""
    device = json.loads(json.dumps(api.devices[node]))
    device["metadata"]["annotations"] = {CHECKPOINTS: json.dumps([*rows, *(EVERYBODY if complete else ())])}
    api.put("devices", device)


def row(uid: str, *cards: str) -> Raw:
    return {"podUID": uid, "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": list(cards)}


def ran(raw: Raw, *containers: str, phase: str = "Pending") -> Raw:
    rows = [{"name": name, "containerID": "x", "state": {"running": {}}} for name in containers]
    return {**raw, "status": {"phase": phase, "containerStatuses": rows}}


def whole(name: str = "p", count: int = 1, **more: Any) -> Raw:
    amounts = {"nvidia.com/gpu": str(count)}
    return b.pod(name, {"name": "c", "resources": {"limits": amounts, "requests": amounts}}, node="n1", **more)


def free(replica: Replica) -> list[int]:
    shown = make_overview(replica.api.nodes.values(), replica.api.devices.values(), replica.api.pods.values(), SETTINGS)
    ours = [s.core_free for s in replica.state.node_snapshot("n1", "").cards]
    theirs = [card.state.core_free for node in shown.nodes for card in node.cards if node.name == "n1"]
    assert ours == theirs, "mgpu inspect shows what the scheduler counts"
    return ours


def events(replica: Replica) -> list[tuple[str, str]]:
    return [(reason, text) for _, reason, text in replica.events]


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 2))


def test_pod_without_a_record_on_a_node_that_lists_all_such_pods_holds_nothing(api: FakeApi) -> None:
    listed(api)
    api.put("pods", ran(b.share("p", node="n1"), "c", phase="Running"))
    replica = Replica(api)
    assert free(replica) == [1000, 1000]
    ((reason, text),) = events(replica)
    assert reason == "UnknownCards"
    assert "was given none; it holds nothing" in text
    assert replica.state.undecided_pods() == ()


def test_pod_without_a_record_holds_everything_where_the_node_promises_no_list(api: FakeApi) -> None:
    listed(api, complete=False)
    api.put("pods", ran(b.share("p", node="n1"), "c"))
    replica = Replica(api)
    assert free(replica) == [500, 500]
    listed(api)
    replica.deliver()
    assert free(replica) == [1000, 1000]
    listed(api, complete=False)
    replica.deliver()
    assert free(replica) == [500, 500], "an earlier agent has taken the node over"


def test_pod_without_a_record_that_is_listed_holds_what_is_listed(api: FakeApi) -> None:
    listed(api, row("uid-p", "GPU-n1-1"))
    api.put("pods", ran(b.share("p", node="n1"), "c"))
    assert free(Replica(api)) == [1000, 0]


def test_pod_whose_record_cannot_be_read_holds_everything_until_it_is_listed_as_bare(api: FakeApi) -> None:
    """Its record was there, so that it may have cards, whatever has not been listed yet."""
    listed(api)
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "banana"}
    api.put("pods", ran(b.share("p", annotations=record, node="n1"), "c"))
    replica = Replica(api)
    assert [s.core_free for s in replica.state.node_snapshot("n1", "").cards] == [500, 500]
    listed(api, *json.loads(write_entries([no_devices_entry("uid-p")])))
    replica.deliver()
    assert [s.core_free for s in replica.state.node_snapshot("n1", "").cards] == [1000, 1000]


def test_pod_of_nvidias_plugin_holds_everything_until_it_is_listed(api: FakeApi) -> None:
    """That plugin gives out cards without a record, so that a pod that is not listed yet may have any."""
    listed(api)
    api.put("nodes", b.node("n1", labels={WHOLE_CARDS_LABEL: "nvidia"}))
    api.put("pods", ran(whole(), "c", phase="Running"))
    replica = Replica(api)
    assert free(replica) == [0, 0]
    listed(api, *json.loads(write_entries([no_devices_entry("uid-p")])))
    replica.deliver()
    assert free(replica) == [1000, 1000], "it started before that plugin was there"


def test_container_that_waits_beside_one_that_was_handed_nothing_is_decided_late(api: FakeApi) -> None:
    listed(api)
    api.put("pods", ran(b.pod("p", b.container("ran", 10, 1024), b.container("waits", 50, 1024), node="n1"), "ran"))
    replica = Replica(api)
    assert free(replica) == [1000, 1000]
    assert list(replica.state.undecided_pods()) == ["uid-p"]


def test_pod_for_rdma_alone_that_runs_without_a_record_holds_none() -> None:
    """No node hands out rdma, so that the container starts at once, on every node."""
    api = cluster(("n1", 1))
    device = json.loads(json.dumps(api.devices["n1"]))
    device["spec"]["devices"].append(
        {"type": "rdma", "id": "0000:09:00.0", "minor": 0, "health": True, "resources": {"koordinator.sh/rdma": "100"}}
    )
    api.put("devices", device)
    amounts = {"koordinator.sh/rdma": "100"}
    api.put(
        "pods", ran(b.pod("p", {"name": "c", "resources": {"limits": amounts, "requests": amounts}}, node="n1"), "c")
    )
    replica = Replica(api)
    (rdma,) = replica.state.node_snapshot("n1", "").other_devices
    assert rdma.idle


def test_pod_for_slices_that_runs_on_a_node_with_whole_cards_holds_no_card(api: FakeApi) -> None:
    """The kubelet of a node whose cards are not cut does not know the resource of any profile."""
    listed(api)
    api.put("pods", ran(wants("p", {"mig-1g.10gb": 1}, node="n1"), "a", phase="Running"))
    assert free(Replica(api)) == [1000, 1000]


def test_profile_that_the_node_makes_later_is_not_held_by_a_pod_that_ran_without_it() -> None:
    """C8: `1g.10gb.me` is no resource of the node, so its container runs; the other one waits for its slice."""
    replica, agents = cut_cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb")))
    listed(replica.api)
    replica.api.put("pods", ran(wants("p", {"mig-1g.10gb.me": 3}, {"mig-1g.10gb": 1}, node="n1"), "a"))
    replica.deliver()
    agents["n1"].make(*slices((0, 2, "1g.10gb.me")))
    replica.deliver()
    assert all(s.idle for s in replica.state.node_snapshot("n1", "").other_devices)
    assert list(replica.state.undecided_pods()) == ["uid-p"]


def test_slice_that_a_pod_without_a_record_was_given_stays_held() -> None:
    replica, agents = cut_cluster(("n1", MIG, 1))
    one, two = slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb"))
    agents["n1"].make(one, two)
    agents["n1"].give("uid-p", one)
    listed(replica.api)
    replica.api.put("pods", ran(wants("p", {"mig-1g.10gb": 1}, node="n1"), "a", phase="Running"))
    replica.deliver()
    assert [s.idle for s in replica.state.node_snapshot("n1", "").other_devices] == [False, True]


def test_pod_for_slices_that_its_agent_names_as_bare_is_decided_late_or_failed() -> None:
    """The kubelet counts what it asks for, and would fail each pod that comes for a slice of that profile."""
    replica, agents = cut_cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb")))
    replica.api.put("pods", ran(wants("p", {"mig-1g.10gb.me": 9}, node="n1"), "a", phase="Running"))
    listed(replica.api)
    replica.deliver()
    assert not replica.state.undecided_pods(), "its agent may not have seen it yet"
    listed(replica.api, *json.loads(write_entries([no_devices_entry("uid-p")])))
    replica.deliver()
    assert list(replica.state.undecided_pods()) == ["uid-p"]
