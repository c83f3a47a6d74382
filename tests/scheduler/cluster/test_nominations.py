"""Cards that are set aside for nominated pods."""

from collections.abc import Callable
from typing import Any

import pytest

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.scheduler.cluster.objects import INDEX, put, record
from tests.scheduler.fake import FakeApi, Replica, cluster


def waiting(name: str, core: int, node: str = "n1", *, priority: int = 0) -> dict[str, Any]:
    """Return a pod that is nominated to a node and not bound."""
    raw = b.share(name, core)
    raw["spec"]["priority"] = priority
    raw["status"]["nominatedNodeName"] = node
    return raw


NOW = "2026-01-01T00:00:00Z"


@pytest.fixture
def replica() -> Replica:
    """Two nodes of one card each."""
    return Replica(cluster(("n1", 1), ("n2", 1)))


def passed(replica: Replica, name: str, core: int, *, priority: int = 0) -> list[str]:
    """Return the nodes for the pod of this name, which is created if there is none."""
    raw = b.share(name, core)
    raw["spec"]["priority"] = priority
    found = replica.decider.find("default", name)
    known = found and found.gpu_pod
    if known is None:
        put(replica, raw)
        known = replica.state.gpu_pod(f"uid-{name}")
    assert known is not None
    return replica.filter.filter(known, ["n1", "n2"]).passed


def gpu_pod(replica: Replica, name: str) -> GpuPod:
    known = replica.state.gpu_pod(f"uid-{name}")
    assert known is not None
    return known


@pytest.mark.parametrize(("priority", "nodes"), [(-1, ["n2"]), (0, ["n2"]), (1, ["n1", "n2"])])
def test_cards_of_a_nominated_pod_are_taken_for_pods_up_to_its_priority(
    replica: Replica, priority: int, nodes: list[str]
) -> None:
    put(replica, waiting("member", 60))
    assert passed(replica, "other", 60, priority=priority) == nodes


def test_cards_of_a_nominated_pod_are_free_for_the_pod_itself(replica: Replica) -> None:
    put(replica, waiting("member", 60))
    assert passed(replica, "member", 60) == ["n1", "n2"]


@pytest.mark.parametrize(
    "end",
    [
        lambda api: api.edit_pod("member", lambda raw: raw["status"].pop("nominatedNodeName")),
        lambda api: api.edit_pod("member", lambda raw: raw["status"].update(nominatedNodeName="n2")),
        lambda api: api.remove("pods", "member"),
        lambda api: api.edit_pod("member", lambda raw: raw["status"].update(phase="Failed")),
        lambda api: api.edit_pod("member", lambda raw: raw["metadata"].update(deletionTimestamp=NOW)),
        lambda api: api.bind("member", "n2"),
    ],
    ids=["cleared", "elsewhere", "deleted", "ended", "deleting", "bound elsewhere"],
)
def test_cards_are_free_again_once_the_nomination_has_ended(replica: Replica, end: Callable[[FakeApi], None]) -> None:
    put(replica, waiting("member", 60))
    assert passed(replica, "other", 60) == ["n2"]
    end(replica.api)
    replica.deliver()
    assert "n1" in passed(replica, "other", 60)


def test_nominated_pod_with_a_reservation_counts_once(replica: Replica) -> None:
    put(replica, waiting("member", 60))
    replica.decider.decide(gpu_pod(replica, "member"), "n1")
    assert passed(replica, "small", 40) == ["n1", "n2"]
    assert passed(replica, "large", 60) == ["n2"]


def test_nominated_pod_with_a_reservation_on_another_node_takes_no_cards(replica: Replica) -> None:
    put(replica, waiting("member", 60))
    assert passed(replica, "other", 60) == ["n2"]
    decision = replica.decider.decide(gpu_pod(replica, "member"), "n2")
    assert isinstance(decision, Reservation)
    assert passed(replica, "other", 60) == ["n1"]
    replica.state.reservations.cancel(decision)
    assert passed(replica, "other", 60) == ["n2"]


def test_cards_of_a_deleted_pod_are_set_aside_for_its_preemptor(replica: Replica) -> None:
    """After preemption the evicted pod still holds the card, which is for the nominated pod then."""
    victim = b.share("victim", 60, annotations=record(), node="n1")
    victim["metadata"]["deletionTimestamp"] = NOW
    put(replica, victim, waiting("preemptor", 80))
    assert passed(replica, "small", 30) == ["n2"]
    replica.api.remove("pods", "victim")
    replica.deliver()
    assert passed(replica, "small", 30) == ["n2"]
    assert passed(replica, "preemptor", 80) == ["n1", "n2"]


def test_deletion_after_the_nomination_sets_the_cards_aside(replica: Replica) -> None:
    put(replica, b.share("victim", 60, annotations=record(), node="n1"), waiting("preemptor", 80))
    assert passed(replica, "small", 30) == ["n1", "n2"]
    replica.api.edit_pod("victim", lambda raw: raw["metadata"].update(deletionTimestamp=NOW))
    replica.deliver()
    assert passed(replica, "small", 30) == ["n2"]


def test_decision_avoids_the_card_of_a_nominated_pod_if_another_fits() -> None:
    replica = Replica(cluster(("n1", 2)))
    put(replica, waiting("member", 60), b.share("small", 20), b.share("large", 100), b.share("medium", 50))
    decisions = [replica.decider.decide(gpu_pod(replica, name), "n1") for name in ("medium", "small", "large")]
    assert [getattr(decision, "annotations", {}).get(INDEX) for decision in decisions] == ["1", "0", None]


def test_nominated_pod_gets_another_card_if_its_card_becomes_unhealthy() -> None:
    replica = Replica(cluster(("n1", 2)))
    put(replica, waiting("member", 60))
    device = write_device(Node("n1"), "", b.cards(2))
    device["spec"]["devices"][0]["health"] = False
    replica.api.put("devices", device)
    replica.deliver()
    put(replica, b.share("other", 60))
    assert replica.filter.filter(gpu_pod(replica, "other"), ["n1"]).passed == []


def test_restarted_scheduler_sets_the_same_cards_aside(replica: Replica) -> None:
    put(replica, waiting("member", 60))
    again = Replica(replica.api)
    assert passed(again, "other", 60) == ["n2"]


def test_nominated_pod_takes_no_cards_once_its_group_is_on_another_node() -> None:
    """Otherwise decisions would avoid cards that the pod can never get."""
    replica = Replica(cluster(("n1", 2), ("n2", 1)))
    pods = {name: waiting(name, 20, node) for name, node in (("member", "n2"), ("first", ""), ("next", ""))}
    for raw in pods.values():
        raw["metadata"]["annotations"] = {"mgpu.io/same-card-group": "pair"}
    put(replica, *pods.values(), b.share("large", 90))
    assert replica.state.node_snapshot("n2", "uid-next").available_cards[0].core_free == 800
    assert replica.filter.filter(gpu_pod(replica, "large"), ["n1", "n2"]).passed == ["n1"]
    assert isinstance(replica.decider.decide(gpu_pod(replica, "first"), "n1"), Reservation)
    assert replica.state.node_snapshot("n2", "uid-next").available_cards[0].core_free == 1000
    assert replica.filter.filter(gpu_pod(replica, "large"), ["n1", "n2"]).passed == ["n1", "n2"]
    refused = replica.decider.decide(gpu_pod(replica, "next"), "n2")
    assert str(refused) == "same-card-group pair is on card 0 of n1"


def test_spread_group_avoids_the_node_of_a_nominated_member(replica: Replica) -> None:
    """Members of a gang arrive one by one, and the first of them is only nominated."""
    pods = waiting("member", 20), b.share("worker", 20)
    for raw in pods:
        raw["metadata"]["annotations"] = {"mgpu.io/spread-group": "web"}
    put(replica, *pods)
    beside, fresh = replica.filter.scores(gpu_pod(replica, "worker"), ["n1", "n2"])
    assert beside < fresh


def test_same_card_group_fits_only_beside_its_nominated_member() -> None:
    replica = Replica(cluster(("n1", 2)))
    pods = waiting("member", 90), b.share("next", 20)
    for raw in pods:
        raw["metadata"]["annotations"] = {"mgpu.io/same-card-group": "pair"}
    put(replica, *pods)
    assert replica.filter.filter(gpu_pod(replica, "next"), ["n1"]).passed == []
