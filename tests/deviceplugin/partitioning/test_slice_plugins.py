"""The device ids of a type of slices: one for each slice, held ids stay, and no number is used again."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.partitioning.slice_plugins import numbers_after, slice_ids


def test_every_slice_has_one_id() -> None:
    assert slice_ids([("", True)] * 3, (), {}, count(0)) == {"0": True, "1": True, "2": True}


def test_held_ids_stay_and_free_ids_are_removed() -> None:
    held = {"2": "a"}
    assert slice_ids([("a", True), ("", True)], ("0", "1", "2"), held, count(3)) == {"2": True, "0": True}
    assert slice_ids([("a", True)], ("0", "1", "2"), held, count(3)) == {"2": True}


def test_slice_that_comes_back_has_a_new_id() -> None:
    fresh = count(0)
    first = slice_ids([("", True)], (), {}, fresh)
    none = slice_ids([], first, {}, fresh)
    assert none == {}
    assert slice_ids([("", True)], none, {}, fresh).keys().isdisjoint(first)


def test_unhealthy_slice_marks_an_id_of_its_pod() -> None:
    rows = [("a", False), ("b", True), ("", True)]
    assert slice_ids(rows, (), {"0": "b", "1": "a"}, count(2)) == {"0": True, "1": False, "2": True}
    assert slice_ids([("a", True), ("", False)], (), {"0": "a"}, count(1)) == {"0": True, "1": False}


def test_numbers_continue_after_the_known_ids() -> None:
    assert next(numbers_after(("3", "11", "MIG-1"))) == 12
    assert next(numbers_after(())) == 0


rows = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.booleans()), max_size=8)


@given(rows, st.sets(st.integers(0, 9).map(str)), st.dictionaries(st.integers(0, 9).map(str), st.sampled_from("abc")))
def test_free_ids_are_never_more_than_free_slices(
    slices: list[tuple[str, bool]], before: set[str], held: dict[str, str]
) -> None:
    ids = slice_ids(slices, before, held, count(10))
    assert held.keys() <= ids.keys()
    assert len(ids) == max(len(slices), len(held))
    assert sum(not well for well in ids.values()) == sum(not well for _, well in slices if ids)
    again = slice_ids(slices, ids, held, count(100))
    assert again == ids
