"""Partitions of one MIG card, against all geometries that it could have."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.mig import LAYOUTS, Instance, Layout, possible_instances
from scheduler.engine.partitioning.geometry import CardPartition, GeometryTable, MigCard, counts_of, mig_card, table_of
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


def partitioned(card: MigCard, *requested: tuple[str, int]) -> CardPartition:
    partition = card.partition(requested)
    assert partition
    return partition


@st.composite
def problems(draw: st.DrawFn) -> tuple[GeometryTable, Instances, Instances, Counter[str], Counter[str]]:
    """A table, the used and the free instances of a card, the requested and the extra slices."""
    of = table(draw(st.sampled_from([A30, A100])), draw(st.sampled_from([None, {"A100": KNOWN}])))
    partition = draw(st.sampled_from(all_cuts(of.layout)))
    used = frozenset(i for i in sorted(partition) if draw(st.booleans()))
    names = st.sampled_from([p.name for p in of.layout.profiles])
    asked, wished = (Counter(draw(st.lists(names, max_size=3))) for _ in range(2))
    return of, used, partition - used, asked, wished


def geometries_of(of: GeometryTable) -> tuple[Mapping[str, int], ...] | None:
    return KNOWN if of.is_configured else None


@given(problems())
@examples(32)
def test_property_partition_equals_exhaustive_search(
    problem: tuple[GeometryTable, Instances, Instances, Counter[str], Counter[str]],
) -> None:
    of, used, free, asked, wished = problem
    partition = card_of(of, used, free).partition(counts_of(asked.items()), counts_of(wished.items()))
    cuts = allowed_cuts(of.layout, used, asked, geometries_of(of))
    if partition is None:
        assert not cuts
        return
    made = frozenset(Instance(*place) for place in partition.slices)
    assert made in cuts
    served = (free_in(made, used) - asked) & wished
    assert dict(partition.served) == dict(served)
    found = (served.total(), len(made), len(free - made), partition.creatable)
    assert found == best_of(of.layout, cuts, used, free, asked, wished)
    assert (partition.destroyed, partition.touched) == (len(free - made), made != used | free)


@given(problems())
@examples(12)
def test_property_options_are_what_some_geometry_has_free(
    problem: tuple[GeometryTable, Instances, Instances, Counter[str], Counter[str]],
) -> None:
    of, used, free, asked, _ = problem
    card, need = card_of(of, used, free), counts_of(asked.items())
    cuts = [*allowed_cuts(of.layout, used, {}, geometries_of(of)), used | free]
    reachable = {tuple(min(free_in(partition, used)[name], count) for name, count in need) for partition in cuts}
    options = card.options(need)
    assert set(options) <= reachable
    assert all(any(all(a <= b for a, b in zip(less, option, strict=True)) for option in options) for less in reachable)
    for profile in of.layout.profiles:
        assert card.max_free(profile.name) == max(free_in(partition, used)[profile.name] for partition in cuts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_table_clashes_equal_the_placement_rules(layout: Layout) -> None:
    of = table(Card(0, "GPU-0", layout.name, 200 * GIB if layout.slices == 8 else 24 * GIB))
    for partition in all_cuts(of.layout)[::20]:
        blocked = of.blocked(sum(of.bit[i] for i in partition))
        assert {i for i in of.instances if not of.bit[i] & blocked} == set(possible_instances(of.layout, partition))


def test_empty_card_is_filled_with_requested_instance_where_most_fits_beside() -> None:
    partition = partitioned(card_of(table(A100)), ("2g.20gb", 1))
    assert partition.slices == (*((i, "1g.10gb") for i in range(4)), (4, "2g.20gb"), (6, "1g.10gb"))
    assert partition.creatable == len(possible_instances(table(A100).layout, [Instance(4, "2g.20gb")]))


def test_free_slices_stay_if_possible() -> None:
    free = frozenset({Instance(0, "2g.20gb")})
    partition = partitioned(card_of(table(A100), frozenset(), free), ("2g.20gb", 1), ("3g.40gb", 1))
    assert free < {*partition.slices}
    assert partition.destroyed == 0


def test_order_of_configured_geometries_breaks_ties() -> None:
    asked = (("1g.10gb", 1),)
    geometries = ({"2g.20gb": 2, "1g.10gb": 1}, {"1g.10gb": 1, "1g.20gb": 2})
    for order in (geometries, geometries[::-1]):
        partition = partitioned(card_of(table(A100, {"NVIDIA-A100-SXM4-80GB": order})), *asked)
        assert Counter(profile for _, profile in partition.slices) == order[0]


def test_configured_geometry_is_complete() -> None:
    card = card_of(table(A100, {"A100": ({"2g.20gb": 3}, {"1g.10gb": 7})}), frozenset({Instance(0, "2g.20gb")}))
    assert card.partition((("1g.10gb", 1),)) is None
    assert card.no_room_reason("1g.10gb") == "2g.20gb in use at 0: no room for 1g.10gb"
    partition = partitioned(card, ("2g.20gb", 1))
    assert partition.slices == ((0, "2g.20gb"), (2, "2g.20gb"), (4, "2g.20gb"))


def test_geometries_that_cannot_be_placed_or_of_other_models_are_ignored() -> None:
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
def test_full_card_has_a_reason(used: tuple[Instance, ...], name: str, why: str) -> None:
    card = card_of(table(A100), frozenset(used))
    assert card.partition(((name, 1),)) is None
    assert card.no_room_reason(name).startswith(why)


@pytest.mark.parametrize(
    ("used", "why"),
    [
        ([(1, "3g.40gb")], "a 3g.40gb is in use at 1, where it cannot exist"),
        ([(0, "9g.90gb")], "a 9g.90gb is in use at 0, where it cannot exist"),
        ([(0, "3g.40gb"), (2, "2g.20gb")], "a 2g.20gb is in use at 2, where it cannot exist"),
    ],
)
def test_card_with_impossible_used_instances_is_rejected(used: list[tuple[int, str]], why: str) -> None:
    assert mig_card(table(A100), used, []) == why


def test_free_instance_in_place_of_a_missing_used_one_is_ignored() -> None:
    card = card_of(table(A100), frozenset({Instance(0, "3g.40gb")}), frozenset({Instance(2, "2g.20gb")}))
    assert card.count_free("2g.20gb") == 0
    assert card.unchanged(()).slices == ((0, "3g.40gb"),)


def test_of_free_instances_that_clash_the_first_counts() -> None:
    card = mig_card(table(A100), [], [(0, "2g.20gb"), (1, "1g.10gb")])
    assert isinstance(card, MigCard)
    assert card.unchanged(()).slices == ((0, "2g.20gb"),)
