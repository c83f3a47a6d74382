"""The same on a node where NVIDIA's own plugin chooses the card of each occupy pod."""

from dataclasses import replace

from mgpu.dialects import mtgpu
from mgpu.model.ledger import Holding, Share
from scheduler.mtgpupods.node_plan import NodePlan
from scheduler.mtgpupods.occupy_pods import CreateOccupyPod, DeleteOccupyPod
from tests.builders import card, cards
from tests.scheduler.mtgpupods.scene import cards_of, kept_by, mtgpupod, occupy, planned, pool, reason, said, uuid

UNTOLD = replace(kept_by("zxcvb", occupy(card=0)["zxcvb"]), shares=(Share("occupy", None, whole=True),))
"""An occupy pod that was bound and of which the node has not told yet which card it got."""


def on_stock(*pods: mtgpu.MtgpuPod, **more: object) -> NodePlan:
    return planned(*pods, nvidia_plugin=True, **more)


def whole(card: int) -> Holding:
    held = pool(card, f"nvidia-{card}", dialect="nvidia")
    return replace(held, shares=(Share("c", uuid(card), whole=True),))


def test_a_new_gpuid_holds_every_card_until_it_is_known_which_one_it_got() -> None:
    found = on_stock(mtgpupod("a"), mtgpupod("b", "qwert"))
    assert cards_of(found) == {"a": None}
    assert found.occupy_pod_steps == (CreateOccupyPod("zxcvb"),)
    assert reason(found, "b") == "ResourceExceeded"


def test_who_names_a_gpuid_whose_card_is_not_known_yet_waits_for_that() -> None:
    found = on_stock(mtgpupod("a"), mtgpupod("b"))
    assert cards_of(found) == {"a": None}
    assert reason(found, "b") == "CardNotKnown"


def test_a_reservation_is_kept_while_the_node_has_not_told() -> None:
    pod = mtgpupod("a")
    admitted = {"uid-a": mtgpu.holding(pod, None, bound=False)}
    for others in ([], [UNTOLD]):
        found = on_stock(pod, mtgpupod("b"), reservations=admitted, occupy_pods=occupy(phase="Running"), others=others)
        assert cards_of(found) == {"a": None}
        assert (reason(found, "a"), reason(found, "b")) == ("Occupying", "CardNotKnown")
        said = found.desired["uid-a"].bound
        assert said
        assert said.message == "the occupy pod of GPUID zxcvb runs; the node has not reported its card yet"
        assert found.occupy_pod_steps == ()


def test_after_a_crash_the_occupy_pod_that_the_node_has_not_told_of_is_waited_for() -> None:
    found = on_stock(mtgpupod("a"), occupy_pods=occupy(phase="Running"), others=[UNTOLD])
    assert (found.reservations, found.occupy_pod_steps) == ((), ())
    assert reason(found, "a") == "CardNotKnown"


def test_all_join_the_card_that_the_node_tells() -> None:
    found = on_stock(mtgpupod("a"), mtgpupod("b"), occupy_pods=occupy(card=1))
    assert [found.desired[uid].bind for uid in ("uid-a", "uid-b")] == [uuid(1), uuid(1)]


def test_the_next_new_gpuid_starts_once_the_first_ones_card_is_known() -> None:
    found = on_stock(mtgpupod("a", card_uuid=uuid(1)), mtgpupod("b", "qwert"), occupy_pods=occupy(card=1))
    assert cards_of(found) == {"b": None}
    assert found.occupy_pod_steps == (CreateOccupyPod("qwert"),)


def test_none_starts_while_a_card_is_shared_that_the_plugin_could_give_out() -> None:
    found = on_stock(mtgpupod("a"), others=[pool(1)])
    assert not found.reservations
    assert said(found, "a").message == "NVIDIA's plugin could choose a card that mgpu has given to pods (1)"


def test_none_starts_while_the_occupy_pod_of_another_gpuid_is_missing() -> None:
    found = on_stock(mtgpupod("a", card_uuid=uuid(1)), mtgpupod("b", "qwert"))
    assert reason(found, "b") == "ResourceExceeded"
    assert found.occupy_pod_steps == (CreateOccupyPod("zxcvb"),)


def test_every_card_that_the_plugin_could_give_out_must_be_large_enough() -> None:
    has = card(0, gib=40), card(1)
    found = on_stock(mtgpupod("a", gib=60), has=has)
    assert not found.reservations
    assert said(found, "a").message == "NVIDIA's plugin could choose card 0: memory 20.0 GiB short"
    assert on_stock(mtgpupod("a", gib=60), has=has, others=[whole(0)]).reservations
    assert on_stock(mtgpupod("a", gib=60), has=(replace(has[0], healthy=False), has[1])).reservations


def test_cards_that_the_plugin_gave_to_others_are_not_free() -> None:
    assert not on_stock(mtgpupod("a"), has=cards(2), others=[whole(0), whole(1)]).reservations
    assert on_stock(mtgpupod("a"), has=cards(2), others=[whole(0)]).reservations
    assert not on_stock(mtgpupod("a"), others=[pool(None, "untold", dialect="nvidia")]).reservations


def test_an_occupy_pod_back_on_another_card_is_left_there_and_nobody_joins() -> None:
    found = on_stock(mtgpupod("a", card_uuid=uuid(0)), mtgpupod("b"), occupy_pods=occupy(card=1))
    assert reason(found, "a", "degraded") == "OtherCard"
    assert reason(found, "b") == "Degraded"
    assert (found.reservations, found.occupy_pod_steps) == ((), ())


def test_an_occupy_pod_that_nobody_needs_any_more_goes_though_its_card_is_not_known() -> None:
    found = on_stock(occupy_pods=occupy(phase="Running"), others=[UNTOLD])
    assert found.occupy_pod_steps == (DeleteOccupyPod("zxcvb", "uid-occupy-zxcvb"),)
