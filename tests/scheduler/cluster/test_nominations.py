from typing import Any

import pytest

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.scheduler.fake import Replica, cluster


def waiting(name: str, core: int, node: str = "n1", *, priority: int = 0) -> dict[str, Any]:
    """A pod that is nominated to a node and not bound."""
    raw = b.share(name, core)
    raw["spec"]["priority"] = priority
    raw["status"]["nominatedNodeName"] = node
    return raw


@pytest.fixture
def replica() -> Replica:
    """Two nodes of one card each."""
    return Replica(cluster(("n1", 1), ("n2", 1)))


def given(replica: Replica, *pods: dict[str, Any]) -> None:
    for raw in pods:
        replica.api.put("pods", raw)
    replica.deliver()


def passed(replica: Replica, name: str, core: int, *, priority: int = 0) -> list[str]:
    """The nodes for a pod that is known under this name, or a new one."""
    raw = b.share(name, core)
    raw["spec"]["priority"] = priority
    found = replica.decider.find("default", name)
    known = found and found.gpu_pod
    if known is None:
        given(replica, raw)
        known = replica.state.gpu_pod(f"uid-{name}")
    assert known is not None
    return replica.filter.filter(known, ["n1", "n2"]).passed


def _known(replica: Replica, name: str) -> GpuPod:
    known = replica.state.gpu_pod(f"uid-{name}")
    assert known is not None
    return known


@pytest.mark.parametrize(("priority", "nodes"), [(-1, ["n2"]), (0, ["n2"]), (1, ["n1", "n2"])])
def test_cards_are_kept_from_pods_of_equal_or_lower_priority(replica: Replica, priority: int, nodes: list[str]) -> None:
    given(replica, waiting("member", 60))
    assert passed(replica, "other", 60, priority=priority) == nodes


def test_a_pod_is_not_in_its_own_way(replica: Replica) -> None:
    given(replica, waiting("member", 60))
    assert passed(replica, "member", 60) == ["n1", "n2"]


@pytest.mark.parametrize("end", ["cleared", "elsewhere", "gone", "ended", "deleting", "bound elsewhere"])
def test_nothing_is_kept_any_longer(replica: Replica, end: str) -> None:
    given(replica, waiting("member", 60))
    assert passed(replica, "other", 60) == ["n2"]
    if end == "cleared":
        replica.api.edit_pod("member", lambda raw: raw["status"].pop("nominatedNodeName"))
    elif end == "elsewhere":
        replica.api.edit_pod("member", lambda raw: raw["status"].update(nominatedNodeName="n2"))
    elif end == "gone":
        replica.api.remove("pods", "member")
    elif end == "ended":
        replica.api.edit_pod("member", lambda raw: raw["status"].update(phase="Failed"))
    elif end == "deleting":
        replica.api.edit_pod("member", lambda raw: raw["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    else:
        replica.api.bind("member", "n2")
    replica.deliver()
    assert "n1" in passed(replica, "other", 60)


def test_once_decided_it_counts_once(replica: Replica) -> None:
    given(replica, waiting("member", 60))
    known = replica.state.gpu_pod("uid-member")
    assert known is not None
    replica.decider.decide(known, "n1")
    assert passed(replica, "small", 40) == ["n1", "n2"]
    assert passed(replica, "large", 60) == ["n2"]


def test_while_it_is_decided_for_another_node_nothing_is_kept(replica: Replica) -> None:
    given(replica, waiting("member", 60))
    assert passed(replica, "other", 60) == ["n2"]
    known = replica.state.gpu_pod("uid-member")
    assert known is not None
    decision = replica.decider.decide(known, "n2")
    assert isinstance(decision, Reservation)
    assert passed(replica, "other", 60) == ["n1"]
    replica.state.cancel(decision)
    assert passed(replica, "other", 60) == ["n2"]


def test_cards_are_kept_while_those_who_hold_them_are_being_deleted(replica: Replica) -> None:
    """As after preemption: the evicted pod still holds the card, and what it leaves is for the nominated one."""
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    victim = b.share("victim", 60, annotations=record, node="n1")
    victim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    given(replica, victim, waiting("preemptor", 80))
    assert passed(replica, "small", 30) == ["n2"]
    replica.api.remove("pods", "victim")
    replica.deliver()
    assert passed(replica, "small", 30) == ["n2"]
    assert passed(replica, "preemptor", 80) == ["n1", "n2"]


def test_who_is_being_deleted_makes_room_whichever_event_comes_first(replica: Replica) -> None:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    given(replica, b.share("victim", 60, annotations=record, node="n1"), waiting("preemptor", 80))
    assert passed(replica, "small", 30) == ["n1", "n2"]
    replica.api.edit_pod("victim", lambda raw: raw["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    replica.deliver()
    assert passed(replica, "small", 30) == ["n2"]


def test_a_binding_is_the_truth_but_leaves_the_kept_card_alone_where_it_can() -> None:
    replica = Replica(cluster(("n1", 2)))
    given(replica, waiting("member", 60), b.share("small", 20), b.share("large", 100), b.share("medium", 50))
    placed = {}
    for name in ("medium", "small", "large"):
        known = replica.state.gpu_pod(f"uid-{name}")
        assert known is not None
        placed[name] = replica.decider.decide(known, "n1")
    assert [
        getattr(placed[name], "annotations", {}).get("vke.volcengine.com/gpu-index-container-c") for name in placed
    ] == [
        "1",
        "0",
        None,
    ]


def test_others_are_chosen_when_the_kept_card_is_lost() -> None:
    replica = Replica(cluster(("n1", 2)))
    given(replica, waiting("member", 60))
    device = write_device(Node("n1"), "", b.cards(2))
    device["spec"]["devices"][0]["health"] = False
    replica.api.put("devices", device)
    replica.deliver()
    given(replica, b.share("other", 60))
    known = replica.state.gpu_pod("uid-other")
    assert known is not None
    assert replica.filter.filter(known, ["n1"]).passed == []


def test_a_process_that_starts_keeps_the_same(replica: Replica) -> None:
    given(replica, waiting("member", 60))
    again = Replica(replica.api)
    assert passed(again, "other", 60) == ["n2"]


def test_nothing_is_kept_where_the_group_cannot_come_any_more() -> None:
    """Else cards are chosen beside those kept, and never reserved: the binding would pass without any."""
    replica = Replica(cluster(("n1", 2), ("n2", 1)))
    pods = {name: waiting(name, 20, node) for name, node in (("member", "n2"), ("first", ""), ("next", ""))}
    for raw in pods.values():
        raw["metadata"]["annotations"] = {"mgpu.io/same-card-group": "pair"}
    given(replica, *pods.values(), b.share("large", 90))
    assert replica.state.node_snapshot("n2", "uid-next").available_cards[0].core_free == 800
    assert replica.filter.filter(_known(replica, "large"), ["n1", "n2"]).passed == ["n1"]
    assert isinstance(replica.decider.decide(_known(replica, "first"), "n1"), Reservation)
    assert replica.state.node_snapshot("n2", "uid-next").available_cards[0].core_free == 1000
    assert replica.filter.filter(_known(replica, "large"), ["n1", "n2"]).passed == ["n1", "n2"]
    refused = replica.decider.decide(_known(replica, "next"), "n2")
    assert str(refused) == "same-card-group pair is on card 0 of n1"


def test_what_is_kept_for_a_group_counts_as_its_own(replica: Replica) -> None:
    """Members of a gang come one after the other, and the first of them is nominated only."""
    pods = waiting("member", 20), b.share("worker", 20)
    for raw in pods:
        raw["metadata"]["annotations"] = {"mgpu.io/spread-group": "web"}
    given(replica, *pods)
    beside, fresh = replica.filter.scores(_known(replica, "worker"), ["n1", "n2"])
    assert beside < fresh


def test_the_rest_of_a_group_that_shares_a_card_waits_for_its_card() -> None:
    replica = Replica(
        cluster(
            ("n1", 2),
        )
    )
    pods = waiting("member", 90), b.share("next", 20)
    for raw in pods:
        raw["metadata"]["annotations"] = {"mgpu.io/same-card-group": "pair"}
    given(replica, *pods)
    assert replica.filter.filter(_known(replica, "next"), ["n1"]).passed == []
