"""The number of device ids, and which of them are unhealthy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.kubelet.device_ids import MAX_IDS, device_ids
from mgpu.dialects.protocol import NodeResource
from tests.builders import card, cards


def core(count: int, each: int = 100) -> NodeResource:
    return NodeResource("r", tuple((i, each) for i in range(count)), as_ids=True)


def unhealthy(ids: dict[str, bool]) -> set[str]:
    return {i for i, healthy in ids.items() if not healthy}


def test_each_unit_has_a_short_id() -> None:
    ids = device_ids(core(2), cards(2))
    assert list(ids) == [str(i) for i in range(200)]
    assert all(ids.values())
    assert device_ids(core(0), ()) == {}


@pytest.mark.parametrize(("count", "expected"), [(39, 3900), (40, 4000), (41, 4000)])
def test_number_of_ids_is_limited(count: int, expected: int) -> None:
    assert len(device_ids(core(count), cards(count))) == expected <= MAX_IDS


def test_unhealthy_ids_are_those_of_the_cards_pods_then_earlier_then_free_ones() -> None:
    two = (card(0), card(1, healthy=False))
    held = {1: ["0", "2"]}
    taken = {"0", "2", "7"}
    assert unhealthy(device_ids(core(2, 4), two, held=held, taken=taken)) == {"0", "2", "6", "5"}
    assert unhealthy(device_ids(core(2, 4), two, held=held, taken=taken, before={"3", "4"})) == {"0", "2", "3", "4"}


def test_ids_of_other_cards_pods_only_where_nothing_is_free() -> None:
    two = (card(0, healthy=False), card(1))
    taken = {str(i) for i in range(8)}
    assert len(unhealthy(device_ids(core(2, 4), two, taken=taken))) == 4


def test_two_unhealthy_cards_have_different_ids() -> None:
    both = (card(0, healthy=False), card(1, healthy=False))
    ids = device_ids(core(2, 4), both, held={0: ["1"], 1: ["1", "2"]})
    assert len(unhealthy(ids)) == 8


def test_held_id_beyond_the_limit_is_ignored() -> None:
    assert unhealthy(device_ids(core(1, 2), (card(0, healthy=False),), held={0: ["99"]}, before={"98"})) == {"0", "1"}


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 6)), max_size=5), st.integers(0, 20), st.data()
)
def test_as_many_ids_are_unhealthy_as_unhealthy_cards_have_units(
    rows: list[tuple[int, bool, int]], limit: int, data: st.DataObject
) -> None:
    """Each card: units, healthy, units that a pod of it holds. A well card's pods suffer only where no id is free."""
    own = [card(i, healthy=healthy) for i, (_, healthy, _) in enumerate(rows)]
    resource = NodeResource("r", tuple((i, units) for i, (units, _, _) in enumerate(rows)), as_ids=True)
    total = min(limit, sum(units for units, _, _ in rows))
    shuffled = data.draw(st.permutations([str(i) for i in range(total)]))
    held: dict[int, list[str]] = {}
    for i, (units, _, used) in enumerate(rows):
        held[i], shuffled = shuffled[: min(units, used)], shuffled[min(units, used) :]
    ids = device_ids(resource, own, limit, held, {i for some in held.values() for i in some})
    lost = unhealthy(ids)
    assert len(ids) == total
    assert len(lost) == min(total, sum(units for units, healthy, _ in rows if not healthy))
    well = {i for index, some in held.items() if rows[index][1] for i in some}
    assert not (lost & well) or lost >= set(shuffled)
