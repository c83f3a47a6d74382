"""One MIG card, against all that it could be cut into."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.mig import LAYOUTS, Instance, Layout, possible_instances
from scheduler.engine.partitioning.geometry import GeometryTable, MigCard, counts_of, mig_card, table_of
from tests.examples import examples
from tests.scheduler.partitioning.exhaustive import Instances, all_cuts, allowed_cuts, best_of, free_in

GIB = 1 << 30
A30 = Card(0, "GPU-0", "NVIDIA A30", 24 * GIB)
A100 = Card(0, "GPU-0", "NVIDIA A100-SXM4-80GB", 80 * GIB)
KNOWN = (
    {"1g.10gb": 7},
    {"1g.10gb": 5, "2g.20gb": 1},
    {"2g.20gb": 2, "3g.40gb": 1},
    {"1g.10gb": 3, "3g.40gb": 1},
    {"3g.40gb": 2},
    {"4g.40gb": 1},
)


def table(card: Card, geometries: Mapping[str, tuple[Mapping[str, int], ...]] | None = None) -> GeometryTable:
    found = table_of(card, geometries or {})
    assert found
    return found


def card_of(of: GeometryTable, used: Instances = frozenset(), free: Instances = frozenset()) -> MigCard:
    card = mig_card(of, sorted(used), sorted(free))
    assert isinstance(card, MigCard), card
    return card


@st.composite
def problems(draw: st.DrawFn) -> tuple[GeometryTable, Instances, Instances, Counter[str], Counter[str]]:
    """A table, what is used and what is free of a card, what is asked and what is wished for."""
    of = table(draw(st.sampled_from([A30, A100])), draw(st.sampled_from([None, {"A100": KNOWN}])))
    cut = draw(st.sampled_from(all_cuts(of.layout)))
    used = frozenset(i for i in sorted(cut) if draw(st.booleans()))
    names = st.sampled_from([p.name for p in of.layout.profiles])
    asked, wished = (Counter(draw(st.lists(names, max_size=3))) for _ in range(2))
    return of, used, cut - used, asked, wished


def geometries_of(of: GeometryTable) -> tuple[Mapping[str, int], ...] | None:
    return KNOWN if of.is_configured else None


@given(problems())
@examples(300)
def test_a_card_is_cut_as_well_as_by_exhaustive_search(
    problem: tuple[GeometryTable, Instances, Instances, Counter[str], Counter[str]],
) -> None:
    of, used, free, asked, wished = problem
    cut = card_of(of, used, free).partition(counts_of(asked.items()), counts_of(wished.items()))
    cuts = allowed_cuts(of.layout, used, asked, geometries_of(of))
    if cut is None:
        assert not cuts
        return
    made = frozenset(Instance(*place) for place in cut.slices)
    assert made in cuts
    served = (free_in(made, used) - asked) & wished
    assert dict(cut.served) == dict(served)
    found = (served.total(), len(made), len(free - made), cut.creatable)
    assert found == best_of(of.layout, cuts, used, free, asked, wished)
    assert (cut.destroyed, cut.touched) == (len(free - made), made != used | free)


@given(problems())
@examples(100)
def test_what_a_card_offers_is_what_some_cut_has_free(
    problem: tuple[GeometryTable, Instances, Instances, Counter[str], Counter[str]],
) -> None:
    of, used, free, asked, _ = problem
    card, need = card_of(of, used, free), counts_of(asked.items())
    cuts = [*allowed_cuts(of.layout, used, {}, geometries_of(of)), used | free]
    reachable = {tuple(min(free_in(cut, used)[name], count) for name, count in need) for cut in cuts}
    options = card.options(need)
    assert set(options) <= reachable
    assert all(any(all(a <= b for a, b in zip(less, option, strict=True)) for option in options) for less in reachable)
    for profile in of.layout.profiles:
        assert card.max_free(profile.name) == max(free_in(cut, used)[profile.name] for cut in cuts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_bits_of_a_table_clash_as_the_rules_say(layout: Layout) -> None:
    of = table(Card(0, "GPU-0", layout.name, 200 * GIB if layout.slices == 8 else 24 * GIB))
    for cut in all_cuts(of.layout)[::7]:
        blocked = of.blocked(sum(of.bit[i] for i in cut))
        assert {i for i in of.instances if not of.bit[i] & blocked} == set(possible_instances(of.layout, cut))


def test_an_empty_card_is_cut_full_and_what_is_asked_lies_where_most_fits_beside_it() -> None:
    cut = card_of(table(A100)).partition((("2g.20gb", 1),))
    assert cut
    assert cut.slices == (*((i, "1g.10gb") for i in range(4)), (4, "2g.20gb"), (6, "1g.10gb"))
    assert cut.creatable == len(possible_instances(table(A100).layout, [Instance(4, "2g.20gb")]))


def test_free_slices_stay_where_that_costs_nothing() -> None:
    free = frozenset({Instance(0, "2g.20gb")})
    cut = card_of(table(A100), frozenset(), free).partition((("2g.20gb", 1), ("3g.40gb", 1)))
    assert cut
    assert free < {*cut.slices}
    assert cut.destroyed == 0


def test_the_order_of_the_configuration_decides_last() -> None:
    asked = (("1g.10gb", 1),)
    geometries = ({"2g.20gb": 2, "1g.10gb": 1}, {"1g.10gb": 1, "1g.20gb": 2})
    for order in (geometries, geometries[::-1]):
        cut = card_of(table(A100, {"NVIDIA-A100-SXM4-80GB": order})).partition(asked)
        assert cut
        assert Counter(profile for _, profile in cut.slices) == order[0]


def test_a_configured_geometry_is_all_of_a_card() -> None:
    card = card_of(table(A100, {"A100": ({"2g.20gb": 3}, {"1g.10gb": 7})}), frozenset({Instance(0, "2g.20gb")}))
    assert card.partition((("1g.10gb", 1),)) is None
    assert card.no_room_reason("1g.10gb") == "2g.20gb in use at 0: no room for 1g.10gb"
    cut = card.partition((("2g.20gb", 1),))
    assert cut
    assert cut.slices == ((0, "2g.20gb"), (2, "2g.20gb"), (4, "2g.20gb"))


def test_a_geometry_that_cannot_be_placed_and_one_of_another_model_are_as_if_not_there() -> None:
    assert not table(A100, {"A100": ({"3g.40gb": 3},)}).geometries
    assert table(A100, {"H100": ({"3g.40gb": 2},)}) is table(A100)


@pytest.mark.parametrize(
    ("used", "name", "why"),
    [
        ((Instance(0, "1g.10gb"), Instance(4, "1g.10gb")), "3g.40gb", "1g.10gb in use at 0, 4: no room for 3g.40gb"),
        ((Instance(0, "3g.40gb"), Instance(4, "1g.10gb")), "7g.80gb", "1g.10gb in use at 4, 3g.40gb in use at 0: "),
        ((), "3g.20gb", "A100-80 has no profile 3g.20gb"),
    ],
)
def test_a_card_says_why_it_has_no_room(used: tuple[Instance, ...], name: str, why: str) -> None:
    card = card_of(table(A100), frozenset(used))
    assert card.partition(((name, 1),)) is None
    assert card.no_room_reason(name).startswith(why)


@pytest.mark.parametrize(
    ("used", "why"),
    [
        ([(1, "3g.40gb")], "3g.40gb in use at 1, where it cannot be"),
        ([(0, "9g.90gb")], "9g.90gb in use at 0, where it cannot be"),
        ([(0, "3g.40gb"), (2, "2g.20gb")], "2g.20gb in use at 2, where it cannot be"),
    ],
)
def test_a_card_with_a_record_that_cannot_be_is_not_cut(used: list[tuple[int, str]], why: str) -> None:
    assert mig_card(table(A100), used, []) == why


def test_a_free_instance_in_the_place_of_a_used_one_that_is_to_be_made_again_does_not_count() -> None:
    card = card_of(table(A100), frozenset({Instance(0, "3g.40gb")}), frozenset({Instance(2, "2g.20gb")}))
    assert card.count_free("2g.20gb") == 0
    assert card.unchanged(()).slices == ((0, "3g.40gb"),)


def test_of_free_instances_that_cannot_lie_together_the_first_counts() -> None:
    card = mig_card(table(A100), [], [(0, "2g.20gb"), (1, "1g.10gb")])
    assert isinstance(card, MigCard)
    assert card.unchanged(()).slices == ((0, "2g.20gb"),)
