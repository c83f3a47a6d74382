"""Without CDI the answers to Allocate are final, and the allocation records are changed to agree with them."""

import random
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.pods.identity import Refused
from tests.builders import CORE, cards, container, pod
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.records import ASSUMED, RECORD, decided

A, B, C = ["1", "2"], ["3", "4"], ["5", "6"]


def at(second: int, raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "metadata": {**raw["metadata"], "creationTimestamp": f"2026-01-01T00:00:{second:02}Z"}}


@pytest.fixture
def fake_node(tmp_path: Path) -> FakeNode:
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.01)
    fake_node.cards = cards(3)
    return fake_node


def recorded(fake_node: FakeNode, name: str, container_name: str = "c") -> list[object]:
    known = fake_node.pods.by_uid(f"uid-{name}")
    assert known is not None
    return [share.card for share in known.shares or () if share.container == container_name]


def test_allocate_returns_the_oldest_decision(fake_node: FakeNode) -> None:
    with pytest.raises(Refused, match="no pod on this node waits"):
        fake_node.allocate(A)
    for name, on, created in (("young", "1", 2), ("old", "0", 1)):
        fake_node.pods.take(at(created, decided(name, on)))
    first, second = fake_node.allocate(A), fake_node.allocate(B)
    assert [a.env["NVIDIA_VISIBLE_DEVICES"] for a in (first, second)] == ["GPU-n1-0", "GPU-n1-1"]
    assert not first.cdi


def test_allocate_waits_for_a_pod_that_the_kubelet_sees_first(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, cdi=False)
    answer = fake_node.allocate(A, lambda: fake_node.pods.take(decided("p", "1")))
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"


def test_equal_pods_with_each_others_cards_exchange_their_records(fake_node: FakeNode) -> None:
    for i, name in enumerate("pqr"):
        fake_node.pods.take(at(i, decided(name, str(i))))
    # The kubelet takes them in another order: p's cards go to q, q's to r, r's to p.
    for ids, name in ((A, "q"), (B, "r"), (C, "p")):
        fake_node.admit(ids, f"uid-{name}")
    for ids in (A, B, C):
        fake_node.start(ids)
    assert [recorded(fake_node, name) for name in "pqr"] == [[2], [0], [1]]
    assert {name: record[RECORD + "c"] for name, record in fake_node.written} == {"p": "2", "q": "0", "r": "1"}
    assert not fake_node.refusals
    for ids in (A, B, C):
        fake_node.start(ids)
    assert len(fake_node.written) == 4, "confirmed records stay"


def test_exchange_with_a_pod_that_is_admitted_later_works(fake_node: FakeNode) -> None:
    for i, name in enumerate("pq"):
        fake_node.pods.take(at(i, decided(name, str(i))))
    fake_node.admit(A, "uid-q")
    fake_node.start(A)
    assert (recorded(fake_node, "p"), recorded(fake_node, "q")) == ([1], [0])
    late = fake_node.admit(B, "uid-p")
    fake_node.start(B)
    assert late.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert len(fake_node.written) == 2


def test_any_order_of_admissions_and_starts_gives_each_pod_one_decision(fake_node: FakeNode) -> None:
    """Starts and admissions alternate at random, and several decisions name the same card."""
    fake_node.cards = cards(2)
    for seed in range(60):
        fake_node.restart()
        fake_node.entries.clear()
        rng = random.Random(seed)
        for i in range(6):
            fake_node.pods.take(at(i, decided(f"p{i}", str(rng.randrange(2)), core=10)))
        planned = sorted(str(recorded(fake_node, f"p{i}")) for i in range(6))
        order = rng.sample(range(6), 6)
        waiting: list[list[str]] = []
        answers = {}
        while order or waiting:
            if order and (not waiting or rng.random() < 0.5):
                name = f"p{order.pop()}"
                waiting.append(ids := [f"{name}-{k}" for k in range(10)])
                answers[name] = fake_node.admit(ids, f"uid-{name}")
            else:
                fake_node.start(waiting.pop(rng.randrange(len(waiting))))
        assert sorted(str(recorded(fake_node, name)) for name in answers) == planned
        for name, answer in sorted(answers.items()):
            assert [answer.env["NVIDIA_VISIBLE_DEVICES"]] == [f"GPU-n1-{card}" for card in recorded(fake_node, name)]


def test_unequal_pods_do_not_exchange_their_records(fake_node: FakeNode) -> None:
    """The kubelet counts only ids. The pods may request different amounts of memory."""
    small, large = decided("small", "0", mib=512), decided("large", "1", mib=1024)
    for i, raw in enumerate((small, large)):
        fake_node.pods.take(at(i, raw))
    fake_node.admit(A, "uid-large")
    with pytest.raises(Refused, match="was given the cards of another container"):
        fake_node.start(A)
    assert [name for name, _ in fake_node.refusals] == ["large"]
    assert not fake_node.written


def test_containers_of_one_pod_exchange_their_placements(fake_node: FakeNode) -> None:
    two = {RECORD + "a": "0", RECORD + "b": "1"}
    fake_node.deploy(
        pod("p", container("a", 2, 512), container("b", 2, 512), annotations={ASSUMED: "true", **two}), A, "b"
    )
    fake_node.admit(B, "uid-p", "a")
    fake_node.start(A)
    fake_node.start(B)
    assert (recorded(fake_node, "p", "a"), recorded(fake_node, "p", "b")) == ([1], [0])


def test_unwritten_exchange_is_repeated_by_the_next_agent(fake_node: FakeNode) -> None:
    pods = [at(i, decided(name, str(i))) for i, name in enumerate("pq")]
    for raw in pods:
        fake_node.pods.take(raw)
    fake_node.admit(A, "uid-q")
    fake_node.start(A)
    fake_node.written.clear()
    fake_node.restart(*pods)
    assert (recorded(fake_node, "p"), recorded(fake_node, "q")) == ([1], [0])
    assert [name for name, _ in fake_node.written] == ["p", "q"], (
        "the record of the pod that does not run is changed first"
    )


def test_half_written_exchange_is_completed_by_the_next_agent(fake_node: FakeNode) -> None:
    fake_node.pods.take(at(0, decided("p", "0")))
    fake_node.deploy(at(1, decided("q", "1")), A)
    fake_node.restart(at(0, decided("p", "1")), at(1, decided("q", "1")))
    assert (recorded(fake_node, "p"), recorded(fake_node, "q")) == ([1], [0])


def test_cards_of_a_deleted_pod_that_others_hold_are_refused(fake_node: FakeNode) -> None:
    fake_node.pods.take(at(0, decided("gone", "0")))
    fake_node.deploy(at(1, decided("q", "1")), A)
    fake_node.pods.drop(decided("gone", "0"))
    fake_node.pods.take(at(2, decided("full", "0", core=99)))
    with pytest.raises(
        Refused,
        match=r"card 0 \(GPU-n1-0\) has insufficient capacity: core 2% requested, 1% free; held by default/full",
    ):
        fake_node.start(A)


def test_placement_that_an_earlier_agent_gave_away_is_not_given_again(fake_node: FakeNode) -> None:
    pods = [at(i, decided(name, str(i))) for i, name in enumerate("pq")]
    for raw in pods:
        fake_node.pods.take(raw)
    fake_node.admit(A, "uid-p")
    fake_node.restart(*pods)
    assert fake_node.admit(B, "uid-q").env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"


def test_allocate_is_refused_before_all_pods_are_read(fake_node: FakeNode) -> None:
    fake_node.restart(decided("p", "0"), synced=False)
    with pytest.raises(Refused, match="no pod on this node waits"):
        fake_node.allocate(A)


def test_allocate_with_another_amount_is_refused(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "0"))
    with pytest.raises(Refused, match=f"waits for this amount of {CORE}"):
        fake_node.allocate([*A, *B])
