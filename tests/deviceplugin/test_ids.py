"""Device ids: how many, and which of them are unhealthy."""

import pytest

from deviceplugin.ids import MAX_IDS, device_ids
from mgpu.dialects.node_resources import NodeResource
from tests.builders import card, cards


def core(count: int, each: int = 100) -> NodeResource:
    return NodeResource("r", tuple((i, each) for i in range(count)), as_ids=True)


def unhealthy(ids: dict[str, bool]) -> set[str]:
    return {i for i, healthy in ids.items() if not healthy}


def test_one_short_id_for_every_unit() -> None:
    ids = device_ids(core(2), cards(2))
    assert list(ids) == [str(i) for i in range(200)]
    assert all(ids.values())
    assert device_ids(core(0), ()) == {}


@pytest.mark.parametrize(("count", "expected"), [(39, 3900), (40, 4000), (41, 4000)])
def test_never_more_than_a_pods_status_can_hold(count: int, expected: int) -> None:
    assert len(device_ids(core(count), cards(count))) == expected <= MAX_IDS


def test_a_lost_card_takes_its_own_pods_ids_first_then_earlier_ones_then_free_ones() -> None:
    two = (card(0), card(1, healthy=False))
    held = {1: ["0", "2"]}
    taken = {"0", "2", "7"}
    assert unhealthy(device_ids(core(2, 4), two, held=held, taken=taken)) == {"0", "2", "6", "5"}
    assert unhealthy(device_ids(core(2, 4), two, held=held, taken=taken, before={"3", "4"})) == {"0", "2", "3", "4"}


def test_ids_of_other_cards_pods_only_where_nothing_is_free() -> None:
    two = (card(0, healthy=False), card(1))
    taken = {str(i) for i in range(8)}
    assert len(unhealthy(device_ids(core(2, 4), two, taken=taken))) == 4


def test_two_lost_cards_never_share_an_id() -> None:
    both = (card(0, healthy=False), card(1, healthy=False))
    ids = device_ids(core(2, 4), both, held={0: ["1"], 1: ["1", "2"]})
    assert len(unhealthy(ids)) == 8


def test_an_id_that_the_kubelet_still_knows_but_is_not_offered_any_more_is_left_out() -> None:
    assert unhealthy(device_ids(core(1, 2), (card(0, healthy=False),), held={0: ["99"]}, before={"98"})) == {"0", "1"}
