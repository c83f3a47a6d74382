"""Allocate and PreStartContainer where the runtime has CDI, without gRPC."""

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


def test_the_only_pod_that_can_be_meant_is_answered_at_once(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "1"))
    answer = fake_node.allocate(A)
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert fake_node.allocate(A).env == VOID, "it is served: another call is for a pod that is not known yet"


def test_where_several_can_be_meant_or_none_is_decided_it_is_void(fake_node: FakeNode) -> None:
    assert fake_node.allocate(A).env == VOID
    fake_node.pods.take(share("late", core=2))
    assert fake_node.allocate(A).env == VOID
    fake_node.pods.take(decided("p", "1"))
    assert fake_node.allocate(A).env == VOID


def test_every_answer_names_a_fresh_device_that_does_not_exist_yet(fake_node: FakeNode) -> None:
    first, second = fake_node.allocate(A), fake_node.allocate(A)
    assert first.cdi != second.cdi
    with pytest.raises(Unresolvable):
        fake_node.visible(first)


def test_before_the_start_the_owner_of_the_ids_is_certain(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "0"))
    fake_node.pods.take(decided("q", "1"))
    first, second = fake_node.admit(A, "uid-q"), fake_node.admit(B, "uid-p")
    fake_node.start(list(reversed(A)))
    fake_node.start(B)
    assert (fake_node.visible(first), fake_node.visible(second)) == ("GPU-n1-1", "GPU-n1-0")


def test_the_pod_and_its_decision_are_waited_for(fake_node: FakeNode) -> None:
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
def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, pods: list[dict[str, Any]], why: str) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.05)
    for raw in pods:
        fake_node.pods.take(raw)
    fake_node.admit(A, "uid-p")
    began = time.monotonic()
    with pytest.raises(Refused, match=why):
        fake_node.start(A)
    assert time.monotonic() - began < 5


def test_what_is_missing_in_the_checkpoint_is_written_when_the_list_is_sent_again(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "1"))
    answer = fake_node.allocate(A)
    fake_node.on_resend = lambda: fake_node.note(answer, A, "uid-p")
    fake_node.start(A)
    assert (fake_node.visible(answer), fake_node.resent) == ("GPU-n1-1", 1)


def test_a_checkpoint_from_before_the_last_answer_names_nobody(tmp_path: Path) -> None:
    """The pod that held the ids has ended, which the API server has not told yet."""
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.pods.take(decided("old", "1"))
    old = fake_node.admit(A, "uid-old")
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


def test_ids_that_nobody_owns_are_refused(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.admit(B, "uid-p")
    with pytest.raises(Refused, match="names no owner of 2 ids"):
        fake_node.start(A)


def test_a_wrong_record_is_refused_at_once_with_an_event(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "7"))
    assert fake_node.admit(A, "uid-p").env == VOID
    with pytest.raises(Refused, match="card 7, which this node does not have"):
        fake_node.start(A)
    assert [name for name, _ in fake_node.refusals] == ["p"]
    assert not list((fake_node.folder).glob("cdi/*"))


def test_a_container_that_starts_again_gets_what_its_record_says_now(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "1"))
    answer = fake_node.admit(A, "uid-p")
    fake_node.start(A)
    fake_node.cards = (card(0), card(1, healthy=False))
    with pytest.raises(Refused, match="unhealthy"):
        fake_node.start(A)
    fake_node.cards = cards(2)
    fake_node.start(A)
    assert fake_node.visible(answer) == "GPU-n1-1"


def test_containers_that_share_ids_each_have_their_own_answer(fake_node: FakeNode) -> None:
    """Whichever of the two it is that starts, and however late the pod's status is."""
    fake_node.pods.take(TWO)
    init, app = fake_node.admit(A, "uid-p", "i"), fake_node.admit(A, "uid-p", "c")
    fake_node.start(A)
    assert (fake_node.visible(init), fake_node.visible(app)) == ("GPU-n1-1", "GPU-n1-0")


def test_of_containers_that_share_ids_only_the_one_that_may_not_start_is_kept_back(fake_node: FakeNode) -> None:
    fake_node.pods.take(TWO)
    init, app = fake_node.admit(A, "uid-p", "i"), fake_node.admit(A, "uid-p", "c")
    fake_node.start(A)
    fake_node.cards = (card(0), card(1, healthy=False))
    fake_node.start(A)
    assert fake_node.visible(app) == "GPU-n1-0"
    with pytest.raises(Unresolvable):
        fake_node.visible(init)
    assert "card 1 (GPU-n1-1) is unhealthy" in fake_node.refusals[0][1]


def test_an_init_container_that_has_ended_well_is_no_reason_for_an_event(fake_node: FakeNode) -> None:
    ended = {"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}
    fake_node.pods.take({**TWO, "status": {"phase": "Running", **ended}})
    fake_node.admit(A, "uid-p", "i")
    fake_node.admit(A, "uid-p", "c")
    fake_node.cards = (card(0), card(1, healthy=False))
    fake_node.start(A)
    assert not fake_node.refusals


def test_after_a_restart_the_checkpoint_knows_the_device(fake_node: FakeNode) -> None:
    answer = fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"))
    fake_node.start(A)
    assert fake_node.visible(answer) == "GPU-n1-1"


def test_after_a_restart_the_kubelet_must_not_say_otherwise(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"))
    fake_node.owned = [Owner("default", "q", "c", frozenset(A))]
    with pytest.raises(Refused, match="assigns the ids to default/p, PodResources to default/q"):
        fake_node.start(A)
    fake_node.owned = [Owner("other", "q", "c", frozenset(A))]
    with pytest.raises(Refused, match="PodResources to a pod of another namespace"):
        fake_node.start(A)
    fake_node.owned = [Owner("default", "p", "c", frozenset(A)), Owner("default", "q", "c", frozenset(B))]
    fake_node.start(A)


def test_a_kubelet_that_is_busy_is_asked_again(fake_node: FakeNode) -> None:
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"))
    fake_node.silent = 2
    fake_node.start(A)
    assert fake_node.silent == 0


def test_a_pod_that_was_made_anew_under_the_name_has_its_own_record(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("p", "1"))
    old = fake_node.admit(A, "uid-p")
    fake_node.start(A)
    fake_node.pods.drop(decided("p", "1"))
    fake_node.pods.take(decided("p", "0", uid="again"))
    new = fake_node.admit(B, "again")
    fake_node.start(B)
    assert (fake_node.visible(old), fake_node.visible(new)) == ("GPU-n1-1", "GPU-n1-0")


def test_what_was_admitted_without_cdi_starts_only_on_the_right_cards(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, cdi=False)
    fake_node.pods.take(decided("p", "1"))
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"), cdi=True)
    fake_node.start(A)
    fake_node.pods.take(decided("p", "0"))
    with pytest.raises(Refused, match="admitted without CDI"):
        fake_node.start(A)


def test_nothing_starts_before_all_pods_are_known(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, wait_seconds=0.01)
    fake_node.admit(A, "uid-p")
    fake_node.restart(decided("p", "1"), synced=False)
    with pytest.raises(Refused, match="pods and cards of this node have not been read"):
        fake_node.start(A)


def test_a_card_that_is_full_takes_no_other_whoever_wrote_the_record(fake_node: FakeNode) -> None:
    fake_node.pods.take(decided("young", "1", core=60))
    fake_node.pods.take(decided("old", "1", core=60))
    fake_node.admit(A, "uid-young")
    refused = fake_node.admit(B, "uid-old")
    fake_node.start(A)
    with pytest.raises(Refused, match=r"card 1 \(GPU-n1-1\) has no room: core 60% asked, 40% free; held by default/y"):
        fake_node.start(B)
    assert [name for name, _ in fake_node.refusals] == ["old"]
    with pytest.raises(Unresolvable):
        fake_node.visible(refused)
    fake_node.start(A)
    fake_node.pods.take(decided("young", "1", core=60, phase="Succeeded"))
    fake_node.start(B)
    assert fake_node.visible(refused) == "GPU-n1-1"


def test_what_was_granted_is_known_after_a_restart(fake_node: FakeNode) -> None:
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


def test_many_waits_do_not_hold_each_other_up(fake_node: FakeNode) -> None:
    """As when many pods were bound before their decisions."""
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


def test_answers_without_cdi_wait_together_no_longer_than_there_is_patience(tmp_path: Path) -> None:
    """The kubelet admits one pod at a time: 80 pods that never get cards kept a node from others for 80 seconds."""
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
