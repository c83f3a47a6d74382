"""No cards stay reserved for pods that are never bound."""

from typing import Any

import pytest

from mgpu.model.gpu_requests import Rejection
from mgpu.model.pods import GATED, read_pod
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.cluster.reservations import Reservation, Reservations
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster

SECONDS = SETTINGS.scheduler.reservation_seconds


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 1), ("n2", 1))


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    return Replica(api)


def submitted(replica: Replica, name: str, **spec: Any) -> GpuPod:
    raw = b.share(name, 60)
    raw["spec"] |= spec
    raw = replica.api.put("pods", raw)
    replica.deliver()
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    return known


def gated(replica: Replica, name: str) -> GpuPod:
    return submitted(replica, name, schedulingGates=[{"name": "example.com/later"}])


def test_decision_for_a_gated_pod_is_rejected_without_a_reservation(replica: Replica) -> None:
    known = gated(replica, "p")
    found = replica.decider.decide(known, "n1")
    assert isinstance(found, Rejection)
    assert found.reason == GATED
    assert isinstance(replica.decider.decide(known, "n1", reserve=False), Rejection)
    assert replica.cards_held() == {}


def test_filter_of_a_gated_pod_passes_no_node_and_plans_no_slices(replica: Replica) -> None:
    known = gated(replica, "p")
    found = replica.filter.filter(known, ["n1", "n2"])
    assert (found.passed, found.hopeless, found.repartitionable) == ([], dict.fromkeys(["n1", "n2"], GATED), [])


def test_gated_pod_is_not_nominated() -> None:
    """A nomination sets cards aside from pods of lower priority."""
    raw = b.share("p")
    raw["status"]["nominatedNodeName"] = "n1"
    assert read_pod(raw).nominated_node == "n1"
    raw["spec"]["schedulingGates"] = [{"name": "a"}]
    assert read_pod(raw).nominated_node == ""


def test_decision_for_a_pod_without_gates_does_not_wait_for_its_event(replica: Replica) -> None:
    known = gated(replica, "p")
    replica.api.edit_pod("p", lambda raw: raw["spec"].update(schedulingGates=[]))
    assert isinstance(replica.decider.decide(known, "n1"), Reservation)


def hold_on(replica: Replica, known: GpuPod, seconds: float, *, nodes: tuple[str, ...] = ("n1",)) -> float:
    """Bind every second with bindings that fail; return for how many seconds other pods got no cards."""
    held = 0.0
    for i in range(int(seconds)):
        replica.decider.decide(known, nodes[i % len(nodes)])
        replica.clock.now += 1
        replica.decider.check_overdue()
        held += bool(replica.cards_held())
    return held


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_reservations_of_a_pod_that_is_never_bound_end(replica: Replica, nodes: tuple[str, ...]) -> None:
    known = submitted(replica, "p")
    assert hold_on(replica, known, 4 * SECONDS, nodes=nodes) == 4 * SECONDS
    replica.clock.now += SECONDS
    replica.decider.check_overdue()
    assert hold_on(replica, known, 1000, nodes=nodes) <= 1000 * 0.15


def test_pod_whose_bindings_failed_gets_a_reservation_after_a_pause(replica: Replica) -> None:
    known = submitted(replica, "p")
    hold_on(replica, known, 6 * SECONDS)
    for _ in range(21):
        found = replica.decider.decide(known, "n1")
        if isinstance(found, Reservation):
            break
        assert "bindings of this pod keep failing; cards are reserved again in" in found.reason
        replica.clock.now += 1
    assert isinstance(found, Reservation)
    assert replica.cards_held() == {"p": [(0, 600)]}


def test_pod_without_a_reservation_for_long_gets_the_full_time_again(replica: Replica) -> None:
    known = submitted(replica, "p")
    hold_on(replica, known, 6 * SECONDS)
    replica.clock.now += 6 * SECONDS
    replica.decider.check_overdue()
    assert hold_on(replica, known, 4 * SECONDS) == 4 * SECONDS


def test_pod_that_waits_between_its_bindings_is_never_paused(replica: Replica) -> None:
    """The members of a gang, or a Permit plugin that waits: each reservation begins with the write of a Binding."""
    known = submitted(replica, "p")
    for _ in range(10):
        assert isinstance(replica.decider.decide(known, "n1"), Reservation)
        replica.clock.now += SECONDS + 1
        replica.decider.check_overdue()  # The write has failed, so the reservation is released.
        assert replica.cards_held() == {}
        replica.clock.now += 5 * SECONDS


def test_bound_pod_keeps_its_cards_until_its_event_arrives(replica: Replica) -> None:
    known = submitted(replica, "p")
    decision = replica.decider.decide(known, "n1")
    assert isinstance(decision, Reservation)
    replica.api.edit_pod("p", lambda raw: raw["spec"].update(nodeName="n1"))
    for _ in range(20):
        replica.clock.now += SECONDS
        replica.decider.check_overdue()
        assert replica.cards_held() == {"p": [(0, 600)]}


def test_decision_without_a_reservation_is_made_during_the_pause(replica: Replica) -> None:
    known = submitted(replica, "p")
    hold_on(replica, known, 6 * SECONDS)
    assert isinstance(replica.decider.decide(known, "n1"), Rejection)
    assert isinstance(replica.decider.decide(known, "n1", reserve=False), Reservation)


def test_deleted_pods_are_remembered_up_to_a_time_and_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.cluster.reservations._MAX_DELETED", 3)
    clock = Clock()
    decisions = Reservations(30.0, clock)
    for uid in "abcd":
        decisions.mark_deleted(uid)
    assert [uid for uid in "abcd" if decisions.is_deleted(uid)] == ["b", "c", "d"]
    clock.now += 121.0
    decisions.mark_deleted("e")
    assert [uid for uid in "abcde" if decisions.is_deleted(uid)] == ["e"]
