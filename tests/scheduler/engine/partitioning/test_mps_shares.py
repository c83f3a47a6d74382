"""Partitions of one card under MPS, against all that its memory allows."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.slice_names import gigabytes
from scheduler.engine.partitioning.geometry import CardPartition, Counts, Place, counts_of
from scheduler.engine.partitioning.mps_shares import MpsCard, mps_card
from tests.examples import examples

SIZES = ("1gb", "2gb", "3gb", "5gb")


def card_of(memory: int, used: str = "", free: str = "") -> MpsCard:
    """`card_of(40, "4gb 4gb", "10gb")`, numbered one after the other."""
    numbered = [*enumerate(f"{used} {free}".split())]
    return mps_card(
        Card(0, "GPU-0", "NVIDIA T4", memory << 30), numbered[: len(used.split())], numbered[len(used.split()) :]
    )


def partitioned(card: MpsCard, requested: Counts = (), extra: Counts = ()) -> CardPartition:
    partition = card.partition(requested, extra)
    assert partition
    return partition


def memory(names: Counter[str]) -> int:
    return sum(gigabytes(name) * count for name, count in names.items())


def names(slices: tuple[Place, ...]) -> Counter[str]:
    return Counter(name for _, name in slices)


@st.composite
def problems(draw: st.DrawFn) -> tuple[MpsCard, Counter[str], Counter[str]]:
    """A card of 12 GiB, the requested and the extra slices."""
    listed = st.lists(st.sampled_from(SIZES), max_size=5)
    there = draw(listed.filter(lambda some: memory(Counter(some)) <= 12))
    used = draw(st.integers(0, len(there)))
    asked, wished = (Counter(draw(listed)) for _ in range(2))
    return card_of(12, " ".join(there[:used]), " ".join(there[used:])), asked, wished


@given(problems())
@examples(60)
def test_property_partition_exists_exactly_if_the_memory_suffices(
    problem: tuple[MpsCard, Counter[str], Counter[str]],
) -> None:
    card, asked, wished = problem
    partition = card.partition(counts_of(asked.items()), counts_of(wished.items()))
    if memory(names(card.used) + asked) > 12:
        assert partition is None
        return
    assert partition
    made, served = names(partition.slices), Counter(dict(partition.served))
    assert {*card.used} <= {*partition.slices}
    assert len({number for number, _ in partition.slices}) == len(partition.slices)
    assert memory(made) <= 12
    assert made >= names(card.used) + asked + served
    assert served <= wished
    assert partition.destroyed == len({*card.free} - {*partition.slices})
    assert partition.destroyed == _fewest(card, names(card.used) + asked + served)


def _fewest(card: MpsCard, needed: Counter[str]) -> int:
    """Return how many free slices must be destroyed so that the needed ones fit."""
    for given_up in range(len(card.free) + 1):
        for kept in combinations(card.free, len(card.free) - given_up):
            if memory(needed | (names(card.used) + names(kept))) <= 12:
                return given_up
    raise AssertionError(needed)


@given(problems())
@examples(40)
def test_property_extra_slices_are_served_smallest_first(
    problem: tuple[MpsCard, Counter[str], Counter[str]],
) -> None:
    card, asked, wished = problem
    partition = MpsCard(12, card.used, ()).partition(counts_of(asked.items()), counts_of(wished.items()))
    if partition is None:
        return
    left, served = 12 - memory(names(card.used) + asked), Counter[str]()
    for name in sorted(wished.elements(), key=gigabytes):
        if gigabytes(name) <= left:
            left -= gigabytes(name)
            served[name] += 1
    assert dict(partition.served) == dict(served)


@given(problems())
@examples(40)
def test_property_options_are_what_a_card_can_be_partitioned_for(
    problem: tuple[MpsCard, Counter[str], Counter[str]],
) -> None:
    card, asked, _ = problem
    need = counts_of(asked.items())
    options = card.options(need)
    assert all(card.partition(counts_of((n, c) for (n, _), c in zip(need, o, strict=True))) for o in options)
    whole = tuple(count for _, count in need)
    assert (whole in options) == (card.partition(need) is not None)
    for name in SIZES:
        most = card.max_free(name)
        assert card.partition(((name, most),) if most else ())
        assert card.partition(((name, most + 1),)) is None


def test_smallest_slices_are_created_first() -> None:
    partition = partitioned(card_of(40), (), (("20gb", 2), ("10gb", 2), ("5gb", 2)))
    assert partition.slices == ((0, "5gb"), (1, "5gb"), (2, "10gb"), (3, "10gb"))


@pytest.mark.parametrize(
    ("free", "asked", "left"),
    [
        ("10gb 10gb", "16gb", "10gb 10gb"),  # there is room beside them
        ("10gb 4gb 2gb", "27gb", "10gb 2gb"),
        ("10gb 4gb 2gb", "25gb", "10gb 4gb"),
        ("10gb 4gb 2gb", "35gb", "4gb"),
        ("10gb 4gb 4gb", "36gb", "4gb"),
    ],
)
def test_no_more_free_slices_are_destroyed_than_needed(free: str, asked: str, left: str) -> None:
    partition = partitioned(card_of(40, "", free), ((asked, 1),))
    assert names(partition.slices) - Counter([asked]) == Counter(left.split())


def test_kept_slices_keep_their_numbers_and_new_ones_take_the_lowest() -> None:
    partition = partitioned(card_of(40, "4gb", "8gb 8gb 4gb"), (("4gb", 2), ("20gb", 1)))
    assert partition.slices == ((0, "4gb"), (1, "8gb"), (2, "4gb"), (3, "4gb"), (4, "20gb"))


def test_requested_free_slice_is_not_created_again() -> None:
    partition = partitioned(card_of(40, "", "8gb 8gb"), (("8gb", 3),))
    assert partition.slices == ((0, "8gb"), (1, "8gb"), (2, "8gb"))
    assert partition.destroyed == 0


def test_extra_slices_give_way_to_requested_ones() -> None:
    partition = partitioned(card_of(40, "", "20gb 10gb"), (("30gb", 1),), (("20gb", 1), ("10gb", 1)))
    assert partition.slices == ((0, "30gb"), (1, "10gb"))
    assert partition.served == (("10gb", 1),)


def test_free_extra_slice_stays_before_smaller_ones_are_created() -> None:
    partition = partitioned(card_of(24, "", "20gb"), (), (("20gb", 1), ("5gb", 4)))
    assert partition.slices == ((0, "20gb"),)


def test_card_has_at_most_48_slices() -> None:
    card = card_of(80, " ".join(["1gb"] * 46), "1gb 4gb")
    assert card.max_free("1gb") == 2
    partition = partitioned(card, (("2gb", 2),))
    assert len(partition.slices) == 48
    assert card.partition((("2gb", 3),)) is None
    assert card_of(80, " ".join(["1gb"] * 48)).no_room_reason("1gb") == "48 slices in use, the most that MPS serves"


def test_memory_is_rounded_down_to_gibibytes() -> None:
    card = mps_card(Card(0, "GPU-0", "NVIDIA H100 80GB HBM3", 81559 << 20), [], [])
    assert card.partition((("79gb", 1),))
    assert card.partition((("80gb", 1),)) is None
    assert card.no_room_reason("80gb") == "79 GiB in total: no room for 80gb"
