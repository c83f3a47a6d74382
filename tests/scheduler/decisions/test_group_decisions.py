"""Pods of a same-card group share one card, and pods of a spread group avoid each other, under concurrent decisions."""

import threading

import pytest

from mgpu.kube import ApiError
from mgpu.model.gpu_requests import Rejection
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, admitted, cluster

SAME, SPREAD = "mgpu.io/same-card-group", "mgpu.io/spread-group"
INDEX = "vke.volcengine.com/gpu-index-container-c"


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 2), ("n2", 2))


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    one = Replica(api)
    api.admit = admitted(one)
    return one


def submitted(replica: Replica, name: str, key: str = SAME, core: int = 20, group: str = "pair") -> GpuPod:
    raw = replica.api.put("pods", b.share(name, core, annotations={key: group}))
    replica.deliver()
    known = read_gpu_pod(raw, SETTINGS)
    assert known is not None
    return known


def bound(replica: Replica, name: str, node: str) -> None:
    replica.api.bind(name, node)
    replica.deliver()


def card_of(found: Reservation | Rejection) -> tuple[str, tuple[int, ...]]:
    assert isinstance(found, Reservation), str(found)
    return found.node, found.placement.cards("c")


def test_first_pod_of_same_card_group_chooses_the_card(replica: Replica) -> None:
    other = submitted(replica, "other", SPREAD, 70)
    first, second = submitted(replica, "first", core=40), submitted(replica, "second", core=40)
    assert card_of(replica.decider.decide(other, "n1")) == ("n1", (0,))
    assert card_of(replica.decider.decide(first, "n1")) == ("n1", (1,))
    assert card_of(replica.decider.decide(second, "n1")) == ("n1", (1,))
    refused = replica.decider.decide(submitted(replica, "third", core=40), "n1")
    assert str(refused) == "2 cards: 1 core 20 percent short, 1 same-card-group pair is on another card"


def test_same_card_group_rejects_other_nodes_with_its_place(replica: Replica) -> None:
    submitted(replica, "a")
    bound(replica, "a", "n1")
    known = submitted(replica, "b")
    refused = replica.decider.decide(known, "n2")
    assert isinstance(refused, Rejection)
    assert (str(refused), refused.hopeless) == ("same-card-group pair is on card 0 of n1", True)
    with pytest.raises(ApiError, match="same-card-group pair is on card 0 of n1"):
        replica.api.bind("b", "n2")
    replica.api.remove("pods", "a")
    replica.deliver()
    assert card_of(replica.decider.decide(known, "n2")) == ("n2", (0,))


def test_group_is_limited_to_its_namespace_and_kind(replica: Replica) -> None:
    submitted(replica, "a")
    bound(replica, "a", "n1")
    assert card_of(replica.decider.decide(submitted(replica, "b", SPREAD), "n2"))[0] == "n2"
    stranger = read_gpu_pod(b.share("c", namespace="other", annotations={SAME: "pair"}), SETTINGS)
    assert stranger is not None
    assert card_of(replica.decider.decide(stranger, "n2"))[0] == "n2"


def test_only_pod_of_same_card_group_may_move(replica: Replica) -> None:
    known = submitted(replica, "a")
    replica.decider.decide(known, "n1")
    assert card_of(replica.decider.decide(known, "n2"))[0] == "n2"
    assert list(map(str, replica.state.group_cards(known.request, ""))) == ["card 0 of n2"] if known.request else False


def test_second_reservation_of_group_on_another_card_is_rejected(replica: Replica) -> None:
    """Both snapshots are older than both reservations, and the version of a node does not cover the other node."""
    first, second = submitted(replica, "a"), submitted(replica, "b")
    views = {node: replica.state.node_snapshot(node, "") for node in ("n1", "n2")}
    one = replica.decider.decide(first, "n1", reserve=False)
    two = replica.decider.decide(second, "n2", reserve=False)
    assert isinstance(one, Reservation)
    assert isinstance(two, Reservation)
    assert replica.state.reservations.reserve(one, views["n1"].version)
    assert not replica.state.reservations.reserve(two, views["n2"].version)
    assert str(replica.decider.decide(second, "n2")) == "same-card-group pair is on card 0 of n1"


def test_concurrent_first_pods_do_not_split_the_group(replica: Replica) -> None:
    pods = [submitted(replica, f"p{i}", core=10) for i in range(8)]
    begin, results = threading.Barrier(len(pods)), list[Reservation | Rejection]()

    def decide(known: GpuPod, node: str) -> None:
        begin.wait(60)
        results.append(replica.decider.decide(known, node))

    threads = [threading.Thread(target=decide, args=(known, f"n{1 + i % 2}")) for i, known in enumerate(pods)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == len(pods)
    assert len({card_of(found) for found in results if isinstance(found, Reservation)}) == 1
    assert sum(isinstance(found, Reservation) for found in results) == len(pods) // 2


def test_late_decision_away_from_the_group_fails_the_pod(replica: Replica) -> None:
    submitted(replica, "a")
    bound(replica, "a", "n1")
    replica.api.put("pods", b.share("late", 20, annotations={SAME: "pair"}, node="n2"))
    replica.deliver()
    replica.late.work()
    status = replica.api.pod("late")["status"]
    assert status["phase"] == "Failed"
    assert "same-card-group pair is on card 0 of n1" in status["message"]


def test_group_split_by_records_is_reported(replica: Replica) -> None:
    for name, node in (("a", "n1"), ("b", "n2")):
        raw = b.share(name, 20, annotations={SAME: "pair", INDEX: "1"}, node=node)
        replica.api.put("pods", raw)
    replica.deliver()
    assert [(reason, message) for _, reason, message in replica.events] == [
        (
            "GroupSplit",
            "same-card-group pair is on card 1 of n1 and card 1 of n2; more of its pods fit only on these cards",
        )
    ]
    known = submitted(replica, "c", core=90)
    assert "1 core 10 percent short" in str(replica.decider.decide(known, "n2"))
    assert card_of(replica.decider.decide(submitted(replica, "d"), "n2")) == ("n2", (1,))
    replica.api.edit_pod("a", lambda raw: raw["metadata"].update(labels={"some": "change"}))
    replica.deliver()
    assert len(replica.events) == 1


def test_group_with_unknown_card_waits(replica: Replica) -> None:
    raw = b.share("odd", 20, annotations={SAME: "pair", INDEX: "?"}, node="n1", phase="Running")
    replica.api.put("pods", raw)
    replica.deliver()
    known = submitted(replica, "a")
    for node in ("n1", "n2"):
        assert str(replica.decider.decide(known, node)) == "same-card-group pair is on an unknown card of n1"


def test_spread_group_prefers_unused_cards(replica: Replica) -> None:
    cards = [card_of(replica.decider.decide(submitted(replica, f"p{i}", SPREAD), "n1"))[1] for i in range(3)]
    assert cards == [(0,), (1,), (0,)]


def test_malformed_constraint_is_the_reason_of_the_rejection(replica: Replica) -> None:
    replica.api.put("pods", b.share("odd", annotations={SPREAD: "?"}))
    replica.deliver()
    with pytest.raises(ApiError, match=r"metadata\.annotations\[mgpu\.io/spread-group\]: must be a name"):
        replica.api.bind("odd", "n1")


def test_changed_constraints_are_decided_again(replica: Replica) -> None:
    known = submitted(replica, "a")
    submitted(replica, "member", group="other")
    bound(replica, "member", "n2")
    assert card_of(replica.decider.decide(known, "n1"))[0] == "n1"
    replica.api.edit_pod("a", lambda raw: raw["metadata"].update(annotations={SAME: "other"}))
    replica.deliver()
    assert str(replica.decider.decide(known, "n1")) == "same-card-group other is on card 0 of n2"
