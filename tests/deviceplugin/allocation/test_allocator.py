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
from tests.deviceplugin.desk import ASSUMED, RECORD, Desk, decided

A, B = ["1", "2"], ["3", "4"]
TWO = pod(
    "p",
    container("c", 2, 512),
    init=(container("i", 2, 512),),
    annotations={ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "1"},
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_only_pod_that_can_be_meant_is_answered_at_once(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    answer = desk.allocate(A)
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert desk.allocate(A).env == VOID, "it is served: another call is for a pod that is not known yet"


def test_where_several_can_be_meant_or_none_is_decided_it_is_void(desk: Desk) -> None:
    assert desk.allocate(A).env == VOID
    desk.pods.take(share("late", core=2))
    assert desk.allocate(A).env == VOID
    desk.pods.take(decided("p", "1"))
    assert desk.allocate(A).env == VOID


def test_every_answer_names_a_fresh_device_that_does_not_exist_yet(desk: Desk) -> None:
    first, second = desk.allocate(A), desk.allocate(A)
    assert first.cdi != second.cdi
    with pytest.raises(Unresolvable):
        desk.visible(first)


def test_before_the_start_the_owner_of_the_ids_is_certain(desk: Desk) -> None:
    desk.pods.take(decided("p", "0"))
    desk.pods.take(decided("q", "1"))
    first, second = desk.admit(A, "uid-q"), desk.admit(B, "uid-p")
    desk.start(list(reversed(A)))
    desk.start(B)
    assert (desk.visible(first), desk.visible(second)) == ("GPU-n1-1", "GPU-n1-0")


def test_the_pod_and_its_decision_are_waited_for(desk: Desk) -> None:
    answer = desk.admit(A, "uid-p")

    def arrives() -> None:
        desk.pods.take(share("p", core=2))
        asyncio.get_running_loop().call_soon(desk.pods.take, decided("p", "1"))

    desk.start(A, arrives)
    assert desk.visible(answer) == "GPU-n1-1"


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([], "pod uid-p is not known from the API server yet"),
        ([share("p", core=2)], "default/p: no cards have been decided for the pod"),
    ],
)
def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, pods: list[dict[str, Any]], why: str) -> None:
    desk = Desk(tmp_path, wait_seconds=0.05)
    for raw in pods:
        desk.pods.take(raw)
    desk.admit(A, "uid-p")
    began = time.monotonic()
    with pytest.raises(Refused, match=why):
        desk.start(A)
    assert time.monotonic() - began < 5


def test_what_is_missing_in_the_checkpoint_is_written_when_the_list_is_sent_again(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    answer = desk.allocate(A)
    desk.on_resend = lambda: desk.note(answer, A, "uid-p")
    desk.start(A)
    assert (desk.visible(answer), desk.resent) == ("GPU-n1-1", 1)


def test_a_checkpoint_from_before_the_last_answer_names_nobody(tmp_path: Path) -> None:
    """The pod that held the ids has ended, which the API server has not told yet."""
    desk = Desk(tmp_path, wait_seconds=0.01)
    desk.pods.take(decided("old", "1"))
    old = desk.admit(A, "uid-old")
    desk.pods.take(decided("new", "0"))
    new = desk.allocate(A)
    with pytest.raises(Refused, match="does not have the last answer"):
        desk.start(A)
    desk.entries.clear()
    desk.note(new, A, "uid-new")
    desk.start(A)
    assert desk.visible(new) == "GPU-n1-0"
    with pytest.raises(Unresolvable):
        desk.visible(old)


def test_ids_that_nobody_owns_are_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_seconds=0.01)
    desk.admit(B, "uid-p")
    with pytest.raises(Refused, match="names no owner of 2 ids"):
        desk.start(A)


def test_a_wrong_record_is_refused_at_once_with_an_event(desk: Desk) -> None:
    desk.pods.take(decided("p", "7"))
    assert desk.admit(A, "uid-p").env == VOID
    with pytest.raises(Refused, match="card 7, which this node does not have"):
        desk.start(A)
    assert [name for name, _ in desk.refusals] == ["p"]
    assert not list((desk.folder).glob("cdi/*"))


def test_a_container_that_starts_again_gets_what_its_record_says_now(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    answer = desk.admit(A, "uid-p")
    desk.start(A)
    desk.cards = (card(0), card(1, healthy=False))
    with pytest.raises(Refused, match="unhealthy"):
        desk.start(A)
    desk.cards = cards(2)
    desk.start(A)
    assert desk.visible(answer) == "GPU-n1-1"


def test_containers_that_share_ids_each_have_their_own_answer(desk: Desk) -> None:
    """Whichever of the two it is that starts, and however late the pod's status is."""
    desk.pods.take(TWO)
    init, app = desk.admit(A, "uid-p", "i"), desk.admit(A, "uid-p", "c")
    desk.start(A)
    assert (desk.visible(init), desk.visible(app)) == ("GPU-n1-1", "GPU-n1-0")


def test_of_containers_that_share_ids_only_the_one_that_may_not_start_is_kept_back(desk: Desk) -> None:
    desk.pods.take(TWO)
    init, app = desk.admit(A, "uid-p", "i"), desk.admit(A, "uid-p", "c")
    desk.start(A)
    desk.cards = (card(0), card(1, healthy=False))
    desk.start(A)
    assert desk.visible(app) == "GPU-n1-0"
    with pytest.raises(Unresolvable):
        desk.visible(init)
    assert "card 1 (GPU-n1-1) is unhealthy" in desk.refusals[0][1]


def test_an_init_container_that_has_ended_well_is_no_reason_for_an_event(desk: Desk) -> None:
    ended = {"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}
    desk.pods.take({**TWO, "status": {"phase": "Running", **ended}})
    desk.admit(A, "uid-p", "i")
    desk.admit(A, "uid-p", "c")
    desk.cards = (card(0), card(1, healthy=False))
    desk.start(A)
    assert not desk.refusals


def test_after_a_restart_the_checkpoint_knows_the_device(desk: Desk) -> None:
    answer = desk.admit(A, "uid-p")
    desk.restart(decided("p", "1"))
    desk.start(A)
    assert desk.visible(answer) == "GPU-n1-1"


def test_after_a_restart_the_kubelet_must_not_say_otherwise(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_seconds=0.01)
    desk.admit(A, "uid-p")
    desk.restart(decided("p", "1"))
    desk.owned = [Owner("default", "q", "c", frozenset(A))]
    with pytest.raises(Refused, match="gives the ids to default/p, PodResources to default/q"):
        desk.start(A)
    desk.owned = [Owner("other", "q", "c", frozenset(A))]
    with pytest.raises(Refused, match="PodResources to a pod of another namespace"):
        desk.start(A)
    desk.owned = [Owner("default", "p", "c", frozenset(A)), Owner("default", "q", "c", frozenset(B))]
    desk.start(A)


def test_a_kubelet_that_is_busy_is_asked_again(desk: Desk) -> None:
    desk.admit(A, "uid-p")
    desk.restart(decided("p", "1"))
    desk.silent = 2
    desk.start(A)
    assert desk.silent == 0


def test_a_pod_that_was_made_anew_under_the_name_has_its_own_record(desk: Desk) -> None:
    desk.pods.take(decided("p", "1"))
    old = desk.admit(A, "uid-p")
    desk.start(A)
    desk.pods.drop(decided("p", "1"))
    desk.pods.take(decided("p", "0", uid="again"))
    new = desk.admit(B, "again")
    desk.start(B)
    assert (desk.visible(old), desk.visible(new)) == ("GPU-n1-1", "GPU-n1-0")


def test_what_was_admitted_without_cdi_starts_only_on_the_right_cards(tmp_path: Path) -> None:
    desk = Desk(tmp_path, cdi=False)
    desk.pods.take(decided("p", "1"))
    desk.admit(A, "uid-p")
    desk.restart(decided("p", "1"), cdi=True)
    desk.start(A)
    desk.pods.take(decided("p", "0"))
    with pytest.raises(Refused, match="admitted without CDI"):
        desk.start(A)


def test_nothing_starts_before_all_pods_are_known(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_seconds=0.01)
    desk.admit(A, "uid-p")
    desk.restart(decided("p", "1"), synced=False)
    with pytest.raises(Refused, match="pods and cards of this node are not known"):
        desk.start(A)


def test_a_card_that_is_full_takes_no_other_whoever_wrote_the_record(desk: Desk) -> None:
    desk.pods.take(decided("young", "1", core=60))
    desk.pods.take(decided("old", "1", core=60))
    desk.admit(A, "uid-young")
    refused = desk.admit(B, "uid-old")
    desk.start(A)
    with pytest.raises(Refused, match=r"card 1 \(GPU-n1-1\) has no room: core 60% asked, 40% free; held by default/y"):
        desk.start(B)
    assert [name for name, _ in desk.refusals] == ["old"]
    with pytest.raises(Unresolvable):
        desk.visible(refused)
    desk.start(A)
    desk.pods.take(decided("young", "1", core=60, phase="Succeeded"))
    desk.start(B)
    assert desk.visible(refused) == "GPU-n1-1"


def test_what_was_granted_is_known_after_a_restart(desk: Desk) -> None:
    pods = decided("a", "1", core=60), decided("b", "1", core=60)
    for raw in pods:
        desk.pods.take(raw)
    desk.admit(A, "uid-b")
    desk.admit(B, "uid-a")
    desk.start(A)
    desk.restart(*pods)
    with pytest.raises(Refused, match="held by default/b"):
        desk.start(B)
    desk.start(A)


def test_many_waits_do_not_hold_each_other_up(desk: Desk) -> None:
    """As when many pods were bound before their decisions."""
    names = [f"p{i}" for i in range(50)]
    ids = {name: [f"{name}-1", f"{name}-2"] for name in names}
    answers = {name: desk.admit(ids[name], f"uid-{name}") for name in names}

    def decide() -> None:
        for i, name in enumerate(names):
            desk.pods.take(decided(name, str(i % 2)))

    async def run() -> None:
        desk.changed.bind()
        waiting = [desk.of.pre_start(ids[name]) for name in names]
        asyncio.get_running_loop().call_later(0.02, decide)
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert [desk.visible(answers[name]) for name in names] == [f"GPU-n1-{i % 2}" for i in range(50)]


def test_answers_without_cdi_wait_together_no_longer_than_there_is_patience(tmp_path: Path) -> None:
    """The kubelet admits one pod at a time: 80 pods that never get cards kept a node from others for 80 seconds."""
    desk = Desk(tmp_path, cdi=False, wait_seconds=0.2)
    desk.budget = WaitBudget(0.2, lambda: 0.0)
    desk.restart()
    waited = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(Refused):
            desk.allocate(["a"])
        waited.append(time.monotonic() - began)
    assert waited[0] >= 0.2
    assert max(waited[1:]) < 0.1


def test_wait_budget_spent_refills_over_time() -> None:
    now = 0.0
    budget = WaitBudget(2.0, lambda: now)
    budget.spend(5.0)
    assert budget.remaining() == 0.0
    now = 40.0
    assert budget.remaining() == pytest.approx(1.0)
    now = 1000.0
    assert budget.remaining() == 2.0
