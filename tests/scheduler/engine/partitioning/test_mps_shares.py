"""One card under MPS, against all that it could be cut into."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.slice_names import gigabytes
from scheduler.engine.partitioning.geometry import Place, counts_of
from scheduler.engine.partitioning.mps_shares import MpsCard, mps_card
from tests.examples import examples

SIZES = ("1gb", "2gb", "3gb", "5gb")


def card_of(memory: int, used: str = "", free: str = "") -> MpsCard:
    """`card_of(40, "4gb 4gb", "10gb")`, numbered one after the other."""
    numbered = [*enumerate(f"{used} {free}".split())]
    return mps_card(
        Card(0, "GPU-0", "NVIDIA T4", memory << 30), numbered[: len(used.split())], numbered[len(used.split()) :]
    )


def memory(names: Counter[str]) -> int:
    return sum(gigabytes(name) * count for name, count in names.items())


def names(slices: tuple[Place, ...]) -> Counter[str]:
    return Counter(name for _, name in slices)


@st.composite
def problems(draw: st.DrawFn) -> tuple[MpsCard, Counter[str], Counter[str]]:
    """A card of 12 GiB, what is asked and what is wished for."""
    listed = st.lists(st.sampled_from(SIZES), max_size=5)
    there = draw(listed.filter(lambda some: memory(Counter(some)) <= 12))
    used = draw(st.integers(0, len(there)))
    asked, wished = (Counter(draw(listed)) for _ in range(2))
    return card_of(12, " ".join(there[:used]), " ".join(there[used:])), asked, wished


@given(problems())
@examples(300)
def test_a_card_is_cut_for_what_is_asked_exactly_where_it_has_the_memory(
    problem: tuple[MpsCard, Counter[str], Counter[str]],
) -> None:
    card, asked, wished = problem
    cut = card.partition(counts_of(asked.items()), counts_of(wished.items()))
    if memory(names(card.used) + asked) > 12:
        assert cut is None
        return
    assert cut
    made, served = names(cut.slices), Counter(dict(cut.served))
    assert {*card.used} <= {*cut.slices}
    assert len({number for number, _ in cut.slices}) == len(cut.slices)
    assert memory(made) <= 12
    assert made >= names(card.used) + asked + served
    assert served <= wished
    assert cut.destroyed == len({*card.free} - {*cut.slices})
    assert cut.destroyed == _fewest(card, names(card.used) + asked + served)


def _fewest(card: MpsCard, needed: Counter[str]) -> int:
    """How many free slices must be given up so that there is room for what is needed."""
    for given_up in range(len(card.free) + 1):
        for kept in combinations(card.free, len(card.free) - given_up):
            if memory(needed | (names(card.used) + names(kept))) <= 12:
                return given_up
    raise AssertionError(needed)


@given(problems())
@examples(200)
def test_as_many_wishes_are_served_as_the_memory_has_room_for_smallest_first(
    problem: tuple[MpsCard, Counter[str], Counter[str]],
) -> None:
    card, asked, wished = problem
    cut = MpsCard(12, card.used, ()).partition(counts_of(asked.items()), counts_of(wished.items()))
    if cut is None:
        return
    left, served = 12 - memory(names(card.used) + asked), Counter[str]()
    for name in sorted(wished.elements(), key=gigabytes):
        if gigabytes(name) <= left:
            left -= gigabytes(name)
            served[name] += 1
    assert dict(cut.served) == dict(served)


@given(problems())
@examples(200)
def test_what_a_card_offers_is_what_it_can_be_cut_for(problem: tuple[MpsCard, Counter[str], Counter[str]]) -> None:
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


def test_the_smallest_are_cut_first_and_never_more_than_there_is_memory() -> None:
    cut = card_of(40).partition((), (("20gb", 2), ("10gb", 2), ("5gb", 2)))
    assert cut
    assert cut.slices == ((0, "5gb"), (1, "5gb"), (2, "10gb"), (3, "10gb"))


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
def test_of_free_slices_no_more_are_given_up_than_needed(free: str, asked: str, left: str) -> None:
    cut = card_of(40, "", free).partition(((asked, 1),))
    assert cut
    assert names(cut.slices) - Counter([asked]) == Counter(left.split())


def test_who_stays_keeps_its_number_and_new_ones_take_the_lowest() -> None:
    cut = card_of(40, "4gb", "8gb 8gb 4gb").partition((("4gb", 2), ("20gb", 1)))
    assert cut
    assert cut.slices == ((0, "4gb"), (1, "8gb"), (2, "4gb"), (3, "4gb"), (4, "20gb"))


def test_a_free_slice_that_is_asked_for_is_not_cut_again() -> None:
    cut = card_of(40, "", "8gb 8gb").partition((("8gb", 3),))
    assert cut
    assert cut.slices == ((0, "8gb"), (1, "8gb"), (2, "8gb"))
    assert cut.destroyed == 0


def test_what_others_wish_for_gives_way_to_what_is_asked() -> None:
    cut = card_of(40, "", "20gb 10gb").partition((("30gb", 1),), (("20gb", 1), ("10gb", 1)))
    assert cut
    assert cut.slices == ((0, "30gb"), (1, "10gb"))
    assert cut.served == (("10gb", 1),)


def test_what_is_free_and_wished_for_stays_before_smaller_ones_are_cut() -> None:
    cut = card_of(24, "", "20gb").partition((), (("20gb", 1), ("5gb", 4)))
    assert cut
    assert cut.slices == ((0, "20gb"),)


def test_a_card_serves_48_clients() -> None:
    card = card_of(80, " ".join(["1gb"] * 46), "1gb 4gb")
    assert card.max_free("1gb") == 2
    cut = card.partition((("2gb", 2),))
    assert cut
    assert len(cut.slices) == 48
    assert card.partition((("2gb", 3),)) is None
    assert card_of(80, " ".join(["1gb"] * 48)).no_room_reason("1gb") == "48 slices in use, the most that MPS serves"


def test_memory_is_whole_gibibytes() -> None:
    card = mps_card(Card(0, "GPU-0", "NVIDIA H100 80GB HBM3", 81559 << 20), [], [])
    assert card.partition((("79gb", 1),))
    assert card.partition((("80gb", 1),)) is None
    assert card.no_room_reason("80gb") == "79 GiB: no room for 80gb"
