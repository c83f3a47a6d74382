"""The decider reserves cards before it answers, and moves, keeps or releases reservations."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import FoundPod
from tests import builders as b
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 2), ("n2", 1))


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    return Replica(api)


def submitted(replica: Replica, name: str, core: int = 60, **more: str) -> GpuPod:
    raw = replica.api.put("pods", b.share(name, core, **more))  # type: ignore[arg-type]
    replica.deliver()
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    return known


def decided(replica: Replica, known: GpuPod, node: str = "n1", *, reserve: bool = True) -> Reservation:
    found = replica.decider.decide(known, node, reserve=reserve)
    assert isinstance(found, Reservation), found
    return found


def chosen(decision: Reservation) -> tuple[int, ...]:
    return decision.placement.cards("c")


def test_decide_reserves_the_cards_at_once(replica: Replica) -> None:
    first, second = submitted(replica, "p"), submitted(replica, "q")
    assert chosen(decided(replica, first)) == (0,)
    assert chosen(decided(replica, second)) == (1,)


def test_decide_for_pod_deleted_during_its_binding_reserves_nothing(replica: Replica) -> None:
    """Otherwise the reservation would hold cards until it is overdue, for a pod that no quota counts."""
    known = submitted(replica, "p")
    replica.api.remove("pods", "p")
    replica.deliver()
    refused = replica.decider.decide(known, "n1")
    assert str(refused) == "the pod has been deleted"
    assert replica.cards_held() == {}
    decided(replica, submitted(replica, "q"))


def test_decide_again_on_same_node_returns_same_cards(replica: Replica) -> None:
    known = submitted(replica, "p")
    first = decided(replica, known)
    decided(replica, submitted(replica, "q", core=30))
    assert decided(replica, known) is first
    assert replica.cards_held() == {"p": [(0, 600)], "q": [(0, 300)]}


def test_closed_cache_accepts_and_renews_no_reservation(replica: Replica) -> None:
    """A decision may have begun before the cache was closed."""
    held, new = submitted(replica, "p"), submitted(replica, "q")
    decided(replica, held)
    replica.state.reservations.close()
    for known in (held, new):
        with pytest.raises(RetryLater):
            replica.decider.decide(known, "n1")
    assert replica.cards_held() == {"p": [(0, 600)]}


def test_reservation_becomes_holding_when_pod_is_observed_on_its_node(replica: Replica) -> None:
    known = submitted(replica, "p")
    assert not replica.state.reservations.has_unobserved(5)
    decision = decided(replica, known)
    assert replica.state.reservations.has_unobserved(5)
    replica.clock.now += 5
    assert not replica.state.reservations.has_unobserved(5)  # its write has failed or was never begun
    assert replica.state.reservations.renew(decision)
    assert replica.state.reservations.has_unobserved(5)
    replica.api.edit_pod("p", lambda raw: raw["metadata"].update(annotations=dict(decision.annotations)))
    replica.api.edit_pod("p", lambda raw: raw["spec"].update(nodeName="n1"))
    replica.deliver()
    assert not replica.state.reservations.has_unobserved(5)


def test_decide_on_another_node_moves_the_reservation(replica: Replica) -> None:
    known = submitted(replica, "p")
    decided(replica, known, "n1")
    decided(replica, known, "n2")
    assert [h.node for h in replica.state.holdings()] == ["n2"]


def test_slow_decision_does_not_move_a_reservation_that_is_bound_meanwhile(
    api: FakeApi, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server has written the first Binding after all, which the scheduler had given up. The watch is late."""
    known = submitted(replica, "p")
    decided(replica, known, "n1")
    choose = replica.decider._choose

    def slow(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        api.edit_pod("p", lambda raw: raw["spec"].update(nodeName="n1"))
        return choose(*args, **named)

    monkeypatch.setattr(replica.decider, "_choose", slow)
    assert str(replica.decider.decide(known, "n2")) == "the pod is bound to n1 already"
    assert [holding.node for holding in replica.state.holdings()] == ["n1"]


def test_slow_decision_does_not_replace_one_that_was_bound_meanwhile(
    api: FakeApi, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has given up the first Binding, and has chosen another node. The watch is late."""
    known = submitted(replica, "p")
    choose = replica.decider._choose

    def slow(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        decided(replica, known, "n2")
        api.edit_pod("p", lambda raw: raw["spec"].update(nodeName="n2"))
        return choose(*args, **named)

    monkeypatch.setattr(replica.decider, "_choose", slow)
    assert str(replica.decider.decide(known, "n1")) == "the pod is bound to n2 already"
    assert [holding.node for holding in replica.state.holdings()] == ["n2"]


def test_reservation_of_bound_pod_is_not_moved(replica: Replica) -> None:
    """The scheduler got a timeout although the pod was bound, and the event is late."""
    known = submitted(replica, "p")
    annotations = decided(replica, known, "n1").annotations
    replica.api.edit_pod("p", lambda raw: raw["metadata"].update(annotations=dict(annotations)))
    replica.api.edit_pod("p", lambda raw: raw["spec"].update(nodeName="n1"))
    found = replica.decider.decide(known, "n2")
    assert isinstance(found, Rejection)
    assert "bound to n1" in found.reason
    assert [h.node for h in replica.state.holdings()] == ["n1"]


def test_reservation_is_not_moved_while_the_api_is_unreachable(replica: Replica) -> None:
    known = submitted(replica, "p")
    decided(replica, known, "n1")
    replica.api.reachable = False
    with pytest.raises(RetryLater):
        replica.decider.decide(known, "n2")
    assert [h.node for h in replica.state.holdings()] == ["n1"]


def test_dry_run_reserves_nothing(replica: Replica) -> None:
    known = submitted(replica, "p")
    assert chosen(decided(replica, known, reserve=False)) == (0,)
    assert replica.state.holdings() == ()


def test_dry_run_returns_the_reservation_and_does_not_move_it(replica: Replica) -> None:
    known = submitted(replica, "p")
    first = decided(replica, known)
    assert decided(replica, known, reserve=False) is first
    decided(replica, known, "n2", reserve=False)
    assert [h.node for h in replica.state.holdings()] == ["n1"]


def test_reservation_of_unhealthy_card_is_decided_again(replica: Replica) -> None:
    known = submitted(replica, "p")
    assert chosen(decided(replica, known)) == (0,)
    devices = replica.api.devices["n1"]
    devices["spec"]["devices"][0]["health"] = False
    replica.api.put("devices", devices)
    replica.deliver()
    assert chosen(decided(replica, known)) == (1,)


def test_decide_without_fitting_card_is_rejected(replica: Replica) -> None:
    for name in "pqr":
        decided(replica, submitted(replica, name), "n2" if name == "r" else "n1")
    assert str(replica.decider.decide(submitted(replica, "s"), "n1")) == "2 cards: 2 core 20 percent short"


@pytest.mark.parametrize("node", ["n3", "n1"])
def test_decide_on_unsuitable_node_is_rejected(replica: Replica, node: str) -> None:
    replica.api.put("nodes", b.node("n1", labels={"vke.node.gpu.schedule": "none"}))
    replica.deliver()
    found = replica.decider.decide(submitted(replica, "p"), node)
    assert isinstance(found, Rejection)
    assert ("not known" if node == "n3" else "vke.node.gpu.schedule is none") in found.reason


def check_overdue(replica: Replica, seconds: float = 1) -> None:
    """Check overdue reservations so many seconds after the current ones are overdue."""
    replica.clock.now += SETTINGS.scheduler.reservation_seconds + seconds
    replica.decider.check_overdue()


@pytest.mark.parametrize(
    ("change", "seconds", "kept"),
    [
        (lambda _: None, -1, True),
        (lambda _: None, 1, False),
        (lambda api: api.remove("pods", "p"), 1, False),
        (lambda api: api.put("pods", b.share("p", uid="second", node="n1")), 1, False),
    ],
    ids=["not overdue", "unbound", "deleted", "created again and bound"],
)
def test_overdue_reservation_is_released_unless_its_pod_is_bound(
    replica: Replica, change: Callable[[FakeApi], object], seconds: float, *, kept: bool
) -> None:
    decided(replica, submitted(replica, "p"))
    change(replica.api)
    check_overdue(replica, seconds)
    assert bool(replica.state.holdings()) == kept


def test_overdue_reservation_of_bound_pod_is_kept_until_its_event(replica: Replica) -> None:
    decision = decided(replica, submitted(replica, "p"))
    replica.api.bind("p", "n1", {"metadata": {"annotations": dict(decision.annotations)}})
    check_overdue(replica)
    assert replica.cards_held() == {"p": [(0, 600)]}
    replica.deliver()
    assert [h.bound for h in replica.state.holdings()] == [True]
    assert replica.state.reservation("uid-p") is None


def test_overdue_reservation_is_kept_while_the_api_is_unreachable(replica: Replica) -> None:
    decided(replica, submitted(replica, "p"))
    replica.api.reachable = False
    check_overdue(replica)
    assert len(replica.state.holdings()) == 1
    replica.api.reachable = True
    check_overdue(replica)
    assert replica.state.holdings() == ()


def test_record_on_bound_pod_replaces_the_decided_one(replica: Replica) -> None:
    known = submitted(replica, "p")
    assert chosen(decided(replica, known)) == (0,)
    theirs = {**decided(replica, known).annotations, "vke.volcengine.com/gpu-index-container-c": "1"}
    replica.api.bind("p", "n1", {"metadata": {"annotations": theirs}})
    replica.deliver()
    assert replica.cards_held() == {"p": [(1, 600)]}


def test_event_older_than_the_decision_changes_nothing(replica: Replica) -> None:
    known = submitted(replica, "p")
    decided(replica, known)
    replica.api.edit_pod("p", lambda raw: raw["metadata"].update(labels={"a": "b"}))
    replica.deliver()
    assert replica.cards_held() == {"p": [(0, 600)]}


def test_decide_for_bound_pod_is_rejected(replica: Replica) -> None:
    known = submitted(replica, "p")
    replica.api.bind("p", "n1", {"metadata": {"annotations": dict(decided(replica, known).annotations)}})
    replica.deliver()
    assert isinstance(replica.decider.decide(known, "n1"), Rejection)
    assert [h.bound for h in replica.state.holdings()] == [True]


@pytest.mark.parametrize(("theirs", "own"), [("0", 1), ("1", 0)])
def test_reservation_is_decided_again_if_another_leader_used_its_card(replica: Replica, theirs: str, own: int) -> None:
    known = submitted(replica, "p")
    assert chosen(decided(replica, known)) == (0,)
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": theirs}
    replica.api.put("pods", b.share("q", 60, annotations=record, node="n1"))
    replica.deliver()
    assert chosen(decided(replica, known)) == (own,)


def test_reservation_is_decided_again_if_its_group_has_another_card(replica: Replica) -> None:
    group = {"mgpu.io/same-card-group": "pair"}
    replica.api.put("pods", b.share("p", annotations=group))
    replica.deliver()
    known = replica.state.gpu_pod("uid-p")
    assert known is not None
    assert chosen(decided(replica, known)) == (0,)
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
    replica.api.put("pods", b.share("q", annotations={**record, **group}, node="n1"))
    replica.deliver()
    assert chosen(decided(replica, known)) == (1,)


def test_concurrent_decisions_never_overcommit_a_card(replica: Replica) -> None:
    pods = [submitted(replica, f"p{i}", core=30) for i in range(12)]
    found: list[object] = []
    threads = [threading.Thread(target=lambda k=k: found.append(replica.decider.decide(k, "n1"))) for k in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([f for f in found if isinstance(f, Reservation)]) == 6  # three of 30 % on each of two cards
    assert all(state.core_used <= 900 for state in replica.state.node_snapshot("n1", "").cards)


def core_of(found: FoundPod | None) -> tuple[str, int]:
    """Return the UID of the pod, and the core that its container requests in milli."""
    assert found is not None
    assert found.gpu_pod is not None
    assert found.gpu_pod.request is not None
    return found.uid, found.gpu_pod.request.containers[0].core


def test_find_pod_in_cache_does_not_ask_the_api(replica: Replica) -> None:
    submitted(replica, "p", core=30)
    replica.api.reachable = False
    assert core_of(replica.decider.find("default", "p", "uid-p")) == ("uid-p", 300)


@pytest.mark.parametrize("uid", ["", "second"])
def test_find_pod_that_is_not_cached_reads_the_api(replica: Replica, uid: str) -> None:
    """The cache may still have an older pod of the same name."""
    submitted(replica, "p", core=30, node="n1")
    replica.api.put("pods", b.share("p", 60, uid="second"))
    assert core_of(replica.decider.find("default", "p", uid)) == ("second", 600)


def test_find_pod_that_does_not_exist_returns_none(replica: Replica) -> None:
    assert replica.decider.find("default", "p") is None
    submitted(replica, "p")
    assert replica.decider.find("default", "p", "other") is None


def test_find_pod_without_api_raises_retry_later(replica: Replica) -> None:
    replica.api.reachable = False
    with pytest.raises(RetryLater):
        replica.decider.find("default", "p")
