"""What is planned for the MtgpuPods of a node whose cards mgpu gives out: who gets a card, who waits and why."""

from dataclasses import replace

import pytest

from mgpu.dialects import mtgpu
from scheduler.mtgpupods.mtgpupod_status import Condition
from scheduler.mtgpupods.observed_node import OwnedPod, UnreadableMtgpuPod
from scheduler.mtgpupods.occupy_pods import CreateOccupyPod, DeleteOccupyPod, OccupyPod
from tests.builders import GIB, card, cards
from tests.scheduler.mtgpupods.scene import cards_of, made, mtgpupod, occupy, planned, pool, reason, said, uuid


def test_a_new_gpuid_gets_the_lowest_idle_card_and_an_occupy_pod() -> None:
    found = planned(mtgpupod("a"))
    assert cards_of(found) == {"a": uuid(0)}
    assert found.occupy_pod_steps == (CreateOccupyPod("zxcvb"),)
    assert reason(found, "a") == "Occupying"
    assert not found.desired["uid-a"].bind


def test_it_is_bound_once_the_occupy_pod_runs_on_its_card() -> None:
    found = planned(mtgpupod("a"), occupy_pods=occupy(card=0))
    desired = found.desired["uid-a"]
    assert (desired.bind, desired.create_pod, desired.card) == (uuid(0), True, card(0))
    assert (said(found, "a").status, reason(found, "a")) == ("True", "Bound")
    assert said(found, "a", "degraded").status == "False"


@pytest.mark.parametrize("phase", ["Pending", "Unknown"])
def test_an_occupy_pod_that_has_a_card_and_does_not_run_is_waited_for(phase: str) -> None:
    found = planned(mtgpupod("a"), occupy_pods=occupy(card=1, phase=phase, message="no image"))
    assert cards_of(found) == {"a": uuid(1)}
    assert said(found, "a").reason == "Occupying"
    assert "no image" in said(found, "a").message
    assert not found.desired["uid-a"].bind
    assert not found.desired["uid-a"].create_pod
    assert found.occupy_pod_steps == ()


def test_a_second_one_joins_the_card_and_another_gpuid_gets_another() -> None:
    pods = mtgpupod("a", request=200), mtgpupod("b", request=800), mtgpupod("c", "qwert", 1000)
    found = planned(*pods)
    assert cards_of(found) == {"a": uuid(0), "b": uuid(0), "c": uuid(1)}
    assert found.occupy_pod_steps == (CreateOccupyPod("qwert"), CreateOccupyPod("zxcvb"))


def test_decimal_sums_fill_one_card_exactly() -> None:
    pods = [mtgpupod(name, request=request) for name, request in zip("abcd", (200, 400, 300, 100), strict=True)]
    found = planned(*pods, mtgpupod("e", request=1), has=cards(1))
    assert set(cards_of(found)) == set("abcd")
    assert said(found, "e").message == "card 0, the card of GPUID zxcvb: core 0.1 percent short"


def test_memory_never_exceeds_the_card() -> None:
    found = planned(mtgpupod("a", gib=50), mtgpupod("b", gib=31), mtgpupod("c", gib=30), has=cards(1))
    assert set(cards_of(found)) == {"a"}
    assert "memory 1.0 GiB short" in said(found, "b").message
    assert "older MtgpuPods of its namespace wait for GPUID zxcvb" in said(found, "c").message


def test_who_needs_more_than_the_whole_card_holds_up_nobody() -> None:
    found = planned(mtgpupod("a"), mtgpupod("b", gib=81), mtgpupod("c"), has=cards(1))
    assert set(cards_of(found)) == {"a", "c"}
    assert reason(found, "b") == "ResourceExceeded"


def test_who_needs_more_than_any_card_holds_up_nobody_of_a_new_gpuid() -> None:
    assert set(cards_of(planned(mtgpupod("a", gib=81), mtgpupod("b")))) == {"b"}


def test_a_new_gpuid_that_waits_for_a_large_card_holds_up_those_that_name_it_too() -> None:
    has = card(0, gib=40), card(1, gib=80)
    found = planned(mtgpupod("a", gib=60), mtgpupod("b"), mtgpupod("c", "qwert"), has=has, others=[pool(1)])
    assert cards_of(found) == {"c": uuid(0)}
    text = "2 cards: 1 in use, but a whole card is requested, 1 memory 20.0 GiB short"
    assert text in said(found, "a").message
    assert reason(found, "b") == "ResourceExceeded"


def test_waiting_ones_are_served_in_the_order_of_creation_then_name() -> None:
    late, early = mtgpupod("a", "later", created="2026-11-21T00:00:01Z"), mtgpupod("b", "first")
    assert cards_of(planned(late, early, has=cards(1))) == {"b": uuid(0)}
    assert cards_of(planned(mtgpupod("b", "x"), mtgpupod("a", "y"), has=cards(1))) == {"a": uuid(0)}


def test_a_card_with_shares_of_others_and_a_whole_one_are_left_alone() -> None:
    found = planned(mtgpupod("a"), others=[pool(0), pool(1, "other")])
    assert not found.reservations
    assert not found.occupy_pod_steps
    assert "2 cards: 2 in use" in said(found, "a").message


def test_an_unhealthy_card_is_nobodys() -> None:
    assert cards_of(planned(mtgpupod("a"), has=(card(0, healthy=False), card(1)))) == {"a": uuid(1)}


def test_a_node_without_cards_says_so() -> None:
    assert said(planned(mtgpupod("a"), has=()), "a").message == "the node has no GPU cards that pods could share"


def test_a_reservation_stays_on_its_card_and_before_earlier_ones() -> None:
    pods = mtgpupod("a", "first"), mtgpupod("b", "later")
    admitted = {"uid-b": mtgpu.holding(pods[1], uuid(1), bound=False)}
    assert cards_of(planned(*pods, reservations=admitted)) == {"a": uuid(0), "b": uuid(1)}
    assert cards_of(planned(*pods, reservations=admitted, has=(card(1),))) == {"b": uuid(1)}


def test_a_reservation_that_is_lost_is_no_reason_to_skip_an_earlier_one() -> None:
    pods = mtgpupod("a", gib=60), mtgpupod("b", gib=10), mtgpupod("c", gib=60)
    admitted = {"uid-c": mtgpu.holding(pods[2], uuid(0), bound=False)}
    found = planned(*pods, reservations=admitted, has=(card(0, healthy=False), card(1, gib=40)))
    assert found.reservations == ()


def test_a_reservation_follows_the_occupy_pod_as_long_as_nothing_is_promised() -> None:
    pod = mtgpupod("a")
    admitted = {"uid-a": mtgpu.holding(pod, uuid(0), bound=False)}
    assert cards_of(planned(pod, reservations=admitted, occupy_pods=occupy(card=1))) == {"a": uuid(1)}


def test_after_a_crash_the_occupy_pod_says_which_card() -> None:
    found = planned(mtgpupod("a", gib=10), occupy_pods=occupy(card=1))
    assert found.desired["uid-a"].bind == uuid(1)
    assert not found.occupy_pod_steps


def test_an_occupy_pod_whose_card_is_too_small_is_replaced() -> None:
    small = planned(mtgpupod("a", gib=60), occupy_pods=occupy(card=0), has=(card(0, gib=40), card(1)))
    assert not small.reservations
    assert small.occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb"),)


def test_an_occupy_pod_on_a_card_that_others_share_is_replaced() -> None:
    found = planned(mtgpupod("a"), occupy_pods=occupy(card=0), others=[pool(0)])
    assert not found.reservations
    assert reason(found, "a") == "Degraded"
    assert found.occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb"),)


def test_an_occupy_pod_on_the_card_of_another_gpuid_is_replaced() -> None:
    users = mtgpupod("a", "abc", card_uuid=uuid(0))
    found = planned(users, mtgpupod("b"), occupy_pods=occupy(card=0))
    assert reason(found, "a", "degraded") == "CardShared"
    assert reason(found, "b") == "Degraded"
    assert DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb") in found.occupy_pod_steps


def test_users_that_only_their_pods_tell_of_keep_their_card() -> None:
    """Somebody took the finalizer off their MtgpuPods."""
    one, other = (mtgpu.holding(mtgpupod(name), uuid(i)) for i, name in enumerate("xy"))
    found = planned(mtgpupod("a"), others=[one])
    assert (cards_of(found), found.occupy_pod_steps) == ({"a": uuid(0)}, (CreateOccupyPod("zxcvb"),))
    elsewhere = planned(mtgpupod("a"), others=[one], occupy_pods=occupy(card=1))
    assert reason(elsewhere, "a") == "Occupying"
    assert not elsewhere.desired["uid-a"].bind
    assert reason(planned(mtgpupod("a"), others=[one, other]), "a") == "Degraded"


def test_an_occupy_pod_that_nobody_needs_is_swept() -> None:
    assert planned(occupy_pods=occupy(card=0)).occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb"),)
    assert planned(occupy_pods=occupy(card=0, deleting=True)).occupy_pod_steps == ()


def test_an_occupy_pod_that_has_ended_is_replaced() -> None:
    bound = mtgpupod("a", card_uuid=uuid(0))
    found = planned(bound, occupy_pods=occupy(card=0, phase="Failed"), owned_pods=made("a"))
    assert found.occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb"),)
    assert planned(bound, owned_pods=made("a")).occupy_pod_steps == (CreateOccupyPod("zxcvb"),)


def test_while_a_gpuid_is_retired_it_cannot_be_used_again() -> None:
    found = planned(mtgpupod("a"), occupy_pods=occupy(card=0, deleting=True))
    assert reason(found, "a") == "Retiring"
    assert not found.reservations
    assert not found.occupy_pod_steps


def test_bound_ones_hold_whatever_the_card_has_and_others_join_only_what_is_left() -> None:
    pods = [mtgpupod(name, request=700, card_uuid=uuid(0)) for name in "ab"]
    found = planned(*pods, mtgpupod("c", request=0), mtgpupod("d", request=1), occupy_pods=occupy(card=0))
    assert set(cards_of(found)) == {"c"}
    assert reason(found, "d") == "ResourceExceeded"


def test_the_pod_is_made_again_on_the_same_card_when_somebody_deletes_it() -> None:
    bound = mtgpupod("a", card_uuid=uuid(1))
    there = planned(bound, occupy_pods=occupy(card=1), owned_pods=made("a", 1))
    assert (there.desired["uid-a"].create_pod, reason(there, "a", "created")) == (False, "PodCreated")
    going = planned(bound, occupy_pods=occupy(card=1), owned_pods=made("a", 1, deleting=True))
    assert (going.desired["uid-a"].create_pod, reason(going, "a", "created")) == (False, "PodTerminating")
    gone = planned(bound, occupy_pods=occupy(card=1)).desired["uid-a"]
    assert (gone.create_pod, gone.card, gone.created) == (True, card(1), None)


@pytest.mark.parametrize(
    "occupies",
    [{}, occupy(), occupy(phase="Running"), occupy(card=0, phase="Pending"), occupy(card=0, deleting=True)],
    ids=str,
)
def test_no_pod_is_made_before_the_occupy_pod_runs(occupies: dict[str, OccupyPod]) -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(0)), occupy_pods=occupies)
    assert (found.desired["uid-a"].create_pod, reason(found, "a", "created")) == (False, "OccupyPodNotRunning")


def test_one_that_has_ended_frees_its_share_and_is_never_started_again() -> None:
    found = planned(
        mtgpupod("a", card_uuid=uuid(0), phase="Succeeded"),
        occupy_pods=occupy(card=0),
        owned_pods=made("a", phase="Succeeded"),
    )
    desired = found.desired["uid-a"]
    assert reason(found, "a") == "Ended"
    assert not any((desired.create_pod, desired.delete_pod, desired.remove_finalizer))
    assert found.occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb"),)


@pytest.mark.parametrize(
    ("deleting", "told"), [(False, "PodCreated"), (True, "PodTerminating")], ids=["by itself", "by its deletion"]
)
def test_the_pod_of_one_that_has_ended_is_not_made_beside_it(deleting: bool, told: str) -> None:
    own = made("a", phase="Succeeded", deleting=deleting)
    found = planned(mtgpupod("a", card_uuid=uuid(0)), occupy_pods=occupy(card=0), owned_pods=own)
    assert (reason(found, "a", "created"), found.desired["uid-a"].create_pod) == (told, False)
    gone = planned(mtgpupod("a", card_uuid=uuid(0)), exists=False, owned_pods=made("a", phase="Succeeded"))
    assert not gone.desired["uid-a"].delete_pod


def test_it_holds_until_its_status_says_that_its_pod_has_ended() -> None:
    bound = mtgpupod("a", request=1000, card_uuid=uuid(0), phase="Running")
    found = planned(bound, mtgpupod("b"), occupy_pods=occupy(card=0), owned_pods=made("a", phase="Succeeded"))
    assert not found.reservations
    assert not found.desired["uid-a"].create_pod


def test_one_whose_status_says_ended_holds_while_its_pod_runs() -> None:
    bound = mtgpupod("a", request=1000, card_uuid=uuid(0), phase="Failed")
    assert not planned(
        bound, mtgpupod("b"), occupy_pods=occupy(card=0), owned_pods=made("a", phase="Running")
    ).reservations


def test_a_status_that_was_lost_is_read_off_the_pod() -> None:
    found = planned(mtgpupod("a"), mtgpupod("b", request=900), occupy_pods=occupy(card=1), owned_pods=made("a", 1))
    assert found.desired["uid-a"].bind == uuid(1)
    assert not found.desired["uid-a"].create_pod
    assert not found.reservations
    assert reason(found, "b") == "ResourceExceeded"


def test_a_gpuid_goes_to_the_card_of_its_users_when_its_occupy_pod_is_missing() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(1)), mtgpupod("b"), owned_pods=made("a", 1))
    assert cards_of(found) == {"b": uuid(1)}
    assert found.occupy_pod_steps == (CreateOccupyPod("zxcvb"),)
    assert reason(found, "b") == "Occupying"


def test_others_join_while_the_occupy_pod_of_users_is_made_again() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(1)), mtgpupod("b"), occupy_pods=occupy(card=1, deleting=True))
    assert cards_of(found) == {"b": uuid(1)}


def test_an_occupy_pod_that_leaves_another_card_is_no_trouble_any_more() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(0)), occupy_pods=occupy(card=1, deleting=True))
    assert reason(found, "a", "degraded") == "AsBound"


def test_an_occupy_pod_back_on_another_card_degrades_its_users_and_moves_nobody() -> None:
    pods = [mtgpupod(name, card_uuid=uuid(0)) for name in "ab"]
    found = planned(*pods, mtgpupod("c"), occupy_pods=occupy(card=1), owned_pods=made("a"))
    for name in "ab":
        assert (said(found, name, "degraded").status, reason(found, name, "degraded")) == ("True", "OtherCard")
        assert not found.desired[f"uid-{name}"].bind
        assert not found.desired[f"uid-{name}"].create_pod
    assert reason(found, "c") == "Degraded"
    assert (found.reservations, found.occupy_pod_steps) == ((), ())


def test_it_is_no_longer_degraded_once_the_occupy_pod_is_on_the_card() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(0)), occupy_pods=occupy(card=0))
    assert (said(found, "a", "degraded").status, reason(found, "a", "degraded")) == ("False", "AsBound")


def test_a_card_that_is_gone_degrades_and_no_occupy_pod_takes_another_one() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(7)))
    assert reason(found, "a", "degraded") == "CardMissing"
    assert not found.occupy_pod_steps


def test_an_unhealthy_card_degrades_and_nobody_joins() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b"), has=(card(0, healthy=False), card(1)))
    assert reason(found, "a", "degraded") == "CardUnhealthy"
    assert reason(found, "b") == "Degraded"
    assert not found.occupy_pod_steps


def test_strangers_on_the_card_degrade() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b"), occupy_pods=occupy(card=0), others=[pool(0)])
    assert reason(found, "a", "degraded") == "CardShared"
    assert "default/pool" in said(found, "a", "degraded").message
    assert reason(found, "b") == "Degraded"


def test_users_of_one_gpuid_on_two_cards_are_told_and_nobody_joins() -> None:
    found = planned(mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b", card_uuid=uuid(1)), mtgpupod("c"))
    assert [reason(found, name, "degraded") for name in "ab"] == ["AsBound", "OtherCard"]
    assert reason(found, "c") == "Degraded"


def test_a_foreign_pod_of_the_name_is_a_conflict_and_holds_up_nobody() -> None:
    found = planned(mtgpupod("a"), mtgpupod("b"), name_conflicts=frozenset({"uid-a"}))
    assert reason(found, "a") == "NameConflict"
    assert set(cards_of(found)) == {"b"}
    bound = planned(mtgpupod("a", card_uuid=uuid(0)), occupy_pods=occupy(card=0), name_conflicts=frozenset({"uid-a"}))
    desired = bound.desired["uid-a"]
    assert (reason(bound, "a", "created"), desired.create_pod, desired.delete_pod) == ("NameConflict", False, False)


def test_a_foreign_pod_of_the_occupy_pods_name_is_never_touched() -> None:
    foreign = occupy(ours=False, phase="Running")
    found = planned(mtgpupod("a"), mtgpupod("b", "qwert"), occupy_pods=foreign)
    assert reason(found, "a") == "OccupyNameConflict"
    assert cards_of(found) == {"b": uuid(0)}
    assert found.occupy_pod_steps == (CreateOccupyPod("qwert"),)
    bound = planned(mtgpupod("a", card_uuid=uuid(0)), occupy_pods=foreign)
    assert reason(bound, "a", "degraded") == "OccupyNameConflict"
    assert not bound.occupy_pod_steps


def test_on_a_cordoned_node_nothing_new_is_started() -> None:
    pods = mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b"), mtgpupod("c", "qwert")
    found = planned(*pods, unschedulable=True)
    assert not found.reservations
    assert not found.occupy_pod_steps
    assert {reason(found, name) for name in "bc"} == {"NodeUnschedulable"}
    assert (found.desired["uid-a"].create_pod, reason(found, "a", "created")) == (False, "NodeUnschedulable")


def test_a_node_that_is_gone_ends_what_ran_there_and_keeps_who_was_bound() -> None:
    pods = mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b")
    found = planned(*pods, exists=False, has=(), occupy_pods=occupy(card=0), owned_pods=made("a", deleting=True))
    assert reason(found, "b") == "NodeNotFound"
    desired = found.desired["uid-a"]
    assert (said(found, "a").status, reason(found, "a")) == ("Unknown", "NodeNotFound")
    assert (desired.delete_pod, desired.force, desired.remove_finalizer) == (True, True, False)
    assert found.occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb", force=True),)
    assert not planned(*pods, exists=False, has=()).occupy_pod_steps


def test_a_node_that_is_back_goes_on_with_its_card() -> None:
    assert planned(mtgpupod("a", card_uuid=uuid(1))).occupy_pod_steps == (CreateOccupyPod("zxcvb"),)


def test_deletion_takes_its_pod_then_its_finalizer_and_holds_until_it_is_gone() -> None:
    going = mtgpupod("a", request=1000, card_uuid=uuid(0), deleting=True)
    first = planned(going, mtgpupod("b"), occupy_pods=occupy(card=0), owned_pods=made("a"))
    desired = first.desired["uid-a"]
    assert (desired.delete_pod, desired.force, desired.remove_finalizer, desired.bound) == (True, False, False, None)
    assert (first.reservations, first.occupy_pod_steps) == ((), ())
    again = planned(going, occupy_pods=occupy(card=0), owned_pods=made("a", deleting=True)).desired["uid-a"]
    assert (again.delete_pod, again.remove_finalizer) == (False, False)
    last = planned(going, mtgpupod("b"), occupy_pods=occupy(card=0))
    assert (last.desired["uid-a"].remove_finalizer, last.desired["uid-a"].create_pod) == (True, False)
    assert (last.reservations, last.occupy_pod_steps) == ((), ())
    assert not planned(going).occupy_pod_steps


def test_one_that_waits_is_finished_at_once_and_holds_up_nobody() -> None:
    found = planned(mtgpupod("a", gib=80, deleting=True), mtgpupod("b"), has=cards(1))
    assert found.desired["uid-a"].remove_finalizer
    assert set(cards_of(found)) == {"b"}


def test_one_that_has_ended_has_its_pod_deleted_with_it() -> None:
    ended = mtgpupod("a", card_uuid=uuid(0), phase="Failed", deleting=True)
    assert planned(ended, owned_pods=made("a", phase="Failed")).desired["uid-a"].delete_pod


def test_an_unreadable_one_says_why_and_can_be_deleted() -> None:
    bad = UnreadableMtgpuPod("uid-x", "default/x", "spec.nodeName: is missing")
    assert said(planned(unreadable=(bad,)), "x") == Condition("False", "Invalid", "spec.nodeName: is missing")
    assert planned(unreadable=(replace(bad, deleting=True),)).desired["uid-x"].remove_finalizer
    own = {"uid-x": OwnedPod("uid-pod-x", "Running")}
    assert planned(unreadable=(replace(bad, deleting=True),), owned_pods=own).desired["uid-x"].delete_pod


def test_an_unreadable_one_keeps_its_card_and_its_neighbours_stay() -> None:
    bad = UnreadableMtgpuPod("uid-x", "default/x", "metadata.annotations: no")
    held = pool(None, "x", dialect="mtgpu")
    held = replace(held, shares=(replace(held.shares[0], card=uuid(0)),))
    found = planned(
        mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b"), unreadable=(bad,), others=[held], occupy_pods=occupy(card=0)
    )
    assert said(found, "a", "degraded").status == "False"
    assert reason(found, "b") == "ResourceExceeded"


def test_a_cards_memory_is_in_bytes_of_that_very_card() -> None:
    has = (replace(card(0), memory=10 * GIB + 1),)
    assert planned(replace(mtgpupod("a"), memory=10 * GIB + 1), has=has).reservations
    assert not planned(replace(mtgpupod("a"), memory=10 * GIB + 2), has=has).reservations
