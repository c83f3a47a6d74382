"""Cards are not held for a pod that is never bound: by scheduling gates, or by bindings that keep failing."""

from typing import Any

import pytest

from mgpu.model.gpu_requests import Rejection
from mgpu.model.pods import GATED, read_pod
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.cluster.reservations import Reservation
from tests import builders as b
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


def test_a_gated_pod_gets_no_decision_and_no_reservation(replica: Replica) -> None:
    known = gated(replica, "p")
    found = replica.decider.decide(known, "n1")
    assert isinstance(found, Rejection)
    assert found.reason == GATED
    assert isinstance(replica.decider.decide(known, "n1", reserve=False), Rejection)
    assert replica.cards_held() == {}


def test_a_gated_pod_passes_no_filter_and_plans_no_slices(replica: Replica) -> None:
    known = gated(replica, "p")
    found = replica.filter.filter(known, ["n1", "n2"])
    assert (found.passed, found.hopeless, found.repartitionable) == ([], dict.fromkeys(["n1", "n2"], GATED), [])


def test_a_gated_pod_is_not_nominated() -> None:
    """A nomination keeps cards from pods of lower priority."""
    raw = b.share("p")
    raw["status"]["nominatedNodeName"] = "n1"
    assert read_pod(raw).nominated_node == "n1"
    raw["spec"]["schedulingGates"] = [{"name": "a"}]
    assert read_pod(raw).nominated_node == ""


def test_a_pod_whose_last_gate_has_gone_is_decided_before_the_watch_tells(replica: Replica) -> None:
    known = gated(replica, "p")
    replica.api.edit_pod("p", lambda raw: raw["spec"].update(schedulingGates=[]))
    assert isinstance(replica.decider.decide(known, "n1"), Reservation)


def hold_on(replica: Replica, known: GpuPod, seconds: float, *, nodes: tuple[str, ...] = ("n1",)) -> float:
    """Bind every second for so long, with bindings that always fail; for how much of it another pod had no cards."""
    held = 0.0
    for i in range(int(seconds)):
        replica.decider.decide(known, nodes[i % len(nodes)])
        replica.clock.now += 1
        replica.decider.check_overdue()
        held += bool(replica.cards_held())
    return held


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_a_reservation_that_is_renewed_without_being_bound_ends(replica: Replica, nodes: tuple[str, ...]) -> None:
    known = submitted(replica, "p")
    assert hold_on(replica, known, 4 * SECONDS, nodes=nodes) == 4 * SECONDS
    replica.clock.now += SECONDS
    replica.decider.check_overdue()
    assert hold_on(replica, known, 1000, nodes=nodes) <= 1000 * 0.15


def test_a_pod_whose_bindings_failed_for_long_is_bound_within_the_pause(replica: Replica) -> None:
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


def test_a_pod_without_a_reservation_for_long_begins_anew(replica: Replica) -> None:
    known = submitted(replica, "p")
    hold_on(replica, known, 6 * SECONDS)
    replica.clock.now += 6 * SECONDS
    replica.decider.check_overdue()
    assert hold_on(replica, known, 4 * SECONDS) == 4 * SECONDS


def test_a_pod_that_waits_between_its_tries_is_never_paused(replica: Replica) -> None:
    """A gang that is bound member by member, or a Permit plugin that waits: each begins with the write of a Binding."""
    known = submitted(replica, "p")
    for _ in range(10):
        assert isinstance(replica.decider.decide(known, "n1"), Reservation)
        replica.clock.now += SECONDS + 1
        replica.decider.check_overdue()  # the write has failed: it is released
        assert replica.cards_held() == {}
        replica.clock.now += 5 * SECONDS


def test_a_bound_pod_keeps_its_cards_however_long_its_event_takes(replica: Replica) -> None:
    known = submitted(replica, "p")
    decision = replica.decider.decide(known, "n1")
    assert isinstance(decision, Reservation)
    replica.api.edit_pod("p", lambda raw: raw["spec"].update(nodeName="n1"))
    for _ in range(20):
        replica.clock.now += SECONDS
        replica.decider.check_overdue()
        assert replica.cards_held() == {"p": [(0, 600)]}


def test_a_dry_run_is_answered_within_the_pause(replica: Replica) -> None:
    known = submitted(replica, "p")
    hold_on(replica, known, 6 * SECONDS)
    assert isinstance(replica.decider.decide(known, "n1"), Rejection)
    assert isinstance(replica.decider.decide(known, "n1", reserve=False), Reservation)
