"""Allocate and PreStartContainer for a runtime with CDI, without gRPC."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.allocation.wait_budget import WaitBudget
from deviceplugin.kubelet.pod_resources import Owner
from deviceplugin.pods.identity import VOID, Refused
from playground.container_runtime import Unresolvable
from tests.builders import card, cards, container, pod, share
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.records import ASSUMED, RECORD, decided

A, B = ["1", "2"], ["3", "4"]
TWO = pod(
    "p",
    container("c", 2, 512),
    init=(container("i", 2, 512),),
    annotations={ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "1"},
)


@pytest.fixture
def fake_node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


def test_allocate_with_one_candidate_returns_its_environment(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "1"))
    answer = fake_node.allocate(A)
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert fake_node.allocate(A).env == VOID, "the second call is for a pod that has not been read yet"


def test_allocate_with_several_or_undecided_candidates_returns_void(fake_node: FakeNode) -> None:
    assert fake_node.allocate(A).env == VOID
    fake_node.pods.take(share("late", core=2))
    assert fake_node.allocate(A).env == VOID
    fake_node.pods.take(decided("p", "1"))
    assert fake_node.allocate(A).env == VOID


def test_allocate_names_a_new_device_without_a_file(fake_node: FakeNode) -> None:
    first, second = fake_node.allocate(A), fake_node.allocate(A)
    assert first.cdi != second.cdi
    with pytest.raises(Unresolvable):
        fake_node.visible(first)


def test_pre_start_delivers_to_the_owner_of_the_ids(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "0"))
    fake_node.pods.take(decided("q", "1"))
    first, second = fake_node.admit(A, "uid-q"), fake_node.admit(B, "uid-p")
    fake_node.start(list(reversed(A)))
    fake_node.start(B)
    assert (fake_node.visible(first), fake_node.visible(second)) == ("GPU-n1-1", "GPU-n1-0")


def test_pre_start_waits_for_the_pod_and_its_decision(fake_node: FakeNode) -> None:
    answer = fake_node.admit(A, "uid-p")

    def arrives() -> None:
        fake_node.pods.take(share("p", core=2))
        asyncio.get_running_loop().call_soon(fake_node.pods.take, decided("p", "1"))

    fake_node.start(A, arrives)
    assert fake_node.visible(answer) == "GPU-n1-1"


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([], "the API server has not delivered pod uid-p yet"),
        ([share("p", core=2)], "default/p: no cards have been decided for the pod"),
    ],
)
def test_pre_start_without_pod_or_decision_is_refused(tmp_path: Path, pods: list[dict[str, Any]], why: str) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.05)
    for raw in pods:
        fake_node.pods.take(raw)
    fake_node.admit(A, "uid-p")
    began = time.monotonic()
    with pytest.raises(Refused, match=why):
        fake_node.start(A)
    assert time.monotonic() - began < 5


def test_missing_checkpoint_entry_is_requested_by_sending_the_list_again(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "1"))
    answer = fake_node.allocate(A)
    fake_node.on_resend = lambda: fake_node.note(answer, A, "uid-p")
    fake_node.start(A)
    assert (fake_node.visible(answer), fake_node.resent) == ("GPU-n1-1", 1)


def test_checkpoint_without_the_last_answer_is_not_trusted(tmp_path: Path) -> None:
    """The pod that held the ids has ended, but the API server has not delivered that yet."""
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    old = fake_node.deploy(decided("old", "1"), A)
    fake_node.pods.take(decided("new", "0"))
    new = fake_node.allocate(A)
    with pytest.raises(Refused, match="does not have the last answer"):
        fake_node.start(A)
    fake_node.entries.clear()
    fake_node.note(new, A, "uid-new")
    fake_node.start(A)
    assert fake_node.visible(new) == "GPU-n1-0"
    with pytest.raises(Unresolvable):
        fake_node.visible(old)


def test_ids_without_an_owner_are_refused(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.admit(B, "uid-p")
    with pytest.raises(Refused, match="names no owner of 2 ids"):
        fake_node.start(A)


def test_invalid_record_is_refused_at_once_and_reported(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "7"))
    assert fake_node.admit(A, "uid-p").env == VOID
    with pytest.raises(Refused, match="card 7, which this node does not have"):
        fake_node.start(A)
    assert [name for name, _ in fake_node.refusals] == ["p"]
    assert not list((fake_node.folder).glob("cdi/*"))


def test_restarted_container_gets_the_cards_of_the_current_record(fake_node: FakeNode) -> None:
    answer = fake_node.deploy(decided("p", "1"), A)
    fake_node.start(A)
    fake_node.cards = (card(0), card(1, healthy=False))
    with pytest.raises(Refused, match="unhealthy"):
        fake_node.start(A)
    fake_node.cards = cards(2)
    fake_node.start(A)
    assert fake_node.visible(answer) == "GPU-n1-1"


def test_containers_that_share_ids_get_their_own_cards(fake_node: FakeNode) -> None:
    """The call does not name the container, and the pod's status may be late."""
    fake_node.pods.take(TWO)
    init, app = fake_node.admit(A, "uid-p", "i"), fake_node.admit(A, "uid-p", "c")
    fake_node.start(A)
    assert (fake_node.visible(init), fake_node.visible(app)) == ("GPU-n1-1", "GPU-n1-0")


def test_refused_container_that_shares_ids_does_not_stop_the_other(fake_node: FakeNode) -> None:
    fake_node.pods.take(TWO)
    init, app = fake_node.admit(A, "uid-p", "i"), fake_node.admit(A, "uid-p", "c")
    fake_node.start(A)
    fake_node.cards = (card(0), card(1, healthy=False))
    fake_node.start(A)
    assert fake_node.visible(app) == "GPU-n1-0"
    with pytest.raises(Unresolvable):
        fake_node.visible(init)
    assert "card 1 (GPU-n1-1) is unhealthy" in fake_node.refusals[0][1]


def test_refusal_of_a_completed_init_container_is_not_reported(fake_node: FakeNode) -> None:
    ended = {"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}
    fake_node.pods.take({**TWO, "status": {"phase": "Running", **ended}})
    fake_node.admit(A, "uid-p", "i")
    fake_node.admit(A, "uid-p", "c")
    fake_node.cards = (card(0), card(1, healthy=False))
    fake_node.start(A)
    assert not fake_node.refusals


def test_restarted_agent_finds_the_device_in_the_checkpoint(fake_node: FakeNode) -> None:
    answer = fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"))
    fake_node.start(A)
    assert fake_node.visible(answer) == "GPU-n1-1"


def test_restarted_agent_refuses_if_pod_resources_contradicts_the_checkpoint(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"))
    fake_node.owned = [Owner("default", "q", "c", frozenset(A))]
    with pytest.raises(Refused, match="assigns the ids to default/p, but PodResources to default/q"):
        fake_node.start(A)
    fake_node.owned = [Owner("other", "q", "c", frozenset(A))]
    with pytest.raises(Refused, match="PodResources to a pod of another namespace"):
        fake_node.start(A)
    fake_node.owned = [Owner("default", "p", "c", frozenset(A)), Owner("default", "q", "c", frozenset(B))]
    fake_node.start(A)


def test_busy_pod_resources_is_queried_again(fake_node: FakeNode) -> None:
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"))
    fake_node.silent = 2
    fake_node.start(A)
    assert fake_node.silent == 0


def test_recreated_pod_has_its_own_record(fake_node: FakeNode) -> None:
    old = fake_node.deploy(decided("p", "1"), A)
    fake_node.start(A)
    fake_node.pods.drop(decided("p", "1"))
    fake_node.pods.take(decided("p", "0", uid="again"))
    new = fake_node.admit(B, "again")
    fake_node.start(B)
    assert (fake_node.visible(old), fake_node.visible(new)) == ("GPU-n1-1", "GPU-n1-0")


def test_answer_from_before_cdi_must_agree_with_the_record(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, cdi=False)
    fake_node.deploy(decided("p", "1"), A)
    fake_node.restart(decided("p", "1"), cdi=True)
    fake_node.start(A)
    fake_node.pods.take(decided("p", "0"))
    with pytest.raises(Refused, match="admitted without CDI"):
        fake_node.start(A)


def test_pre_start_is_refused_before_all_pods_are_read(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"), synced=False)
    with pytest.raises(Refused, match="pods and cards of this node have not been read"):
        fake_node.start(A)


def test_pod_that_exceeds_the_capacity_of_a_card_waits(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("young", "1", core=60))
    fake_node.pods.take(decided("old", "1", core=60))
    fake_node.admit(A, "uid-young")
    refused = fake_node.admit(B, "uid-old")
    fake_node.start(A)
    with pytest.raises(
        Refused, match=r"card 1 \(GPU-n1-1\) has insufficient capacity: core 60% requested, 40% free; held by default/y"
    ):
        fake_node.start(B)
    assert [name for name, _ in fake_node.refusals] == ["old"]
    with pytest.raises(Unresolvable):
        fake_node.visible(refused)
    fake_node.start(A)
    fake_node.pods.take(decided("young", "1", core=60, phase="Succeeded"))
    fake_node.start(B)
    assert fake_node.visible(refused) == "GPU-n1-1"


def test_restarted_agent_knows_earlier_grants(fake_node: FakeNode) -> None:
    pods = decided("a", "1", core=60), decided("b", "1", core=60)
    for raw in pods:
        fake_node.pods.take(raw)
    fake_node.admit(A, "uid-b")
    fake_node.admit(B, "uid-a")
    fake_node.start(A)
    fake_node.restart(*pods)
    with pytest.raises(Refused, match="held by default/b"):
        fake_node.start(B)
    fake_node.start(A)


def test_waiting_calls_do_not_block_each_other(fake_node: FakeNode) -> None:
    """Many pods were bound before their cards were decided."""
    names = [f"p{i}" for i in range(50)]
    ids = {name: [f"{name}-1", f"{name}-2"] for name in names}
    answers = {name: fake_node.admit(ids[name], f"uid-{name}") for name in names}

    def decide() -> None:
        for i, name in enumerate(names):
            fake_node.pods.take(decided(name, str(i % 2)))

    async def run() -> None:
        fake_node.changed.bind()
        waiting = [fake_node.allocator.pre_start(ids[name]) for name in names]
        asyncio.get_running_loop().call_later(0.02, decide)
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert [fake_node.visible(answers[name]) for name in names] == [f"GPU-n1-{i % 2}" for i in range(50)]


def test_answers_without_cdi_share_one_wait_budget(tmp_path: Path) -> None:
    """The kubelet admits one pod at a time: without the budget, 80 pods without cards blocked a node for 80 seconds."""
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.2)
    fake_node.budget = WaitBudget(0.2, 0.2, lambda: 0.0)
    fake_node.restart()
    waited = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(Refused):
            fake_node.allocate(["a"])
        waited.append(time.monotonic() - began)
    assert waited[0] >= 0.2
    assert max(waited[1:]) < 0.1


def test_wait_budget_spent_refills_over_time() -> None:
    now = 0.0
    budget = WaitBudget(2.0, 10.0, lambda: now)
    budget.spend(5.0)
    assert budget.allowance() == 0.0
    now = 40.0
    assert budget.allowance() == pytest.approx(1.0)
    now = 1000.0
    assert budget.allowance() == 2.0
