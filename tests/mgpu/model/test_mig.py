"""MIG's rule of placement against NVIDIA's tables and against trying everything."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.mig import (
    LAYOUTS,
    Instance,
    Layout,
    arrange,
    canonical,
    invalid_geometry_reason,
    invalid_reason,
    layout_of,
    possible_instances,
)
from tests import data
from tests.examples import examples

PROFILES = data.load("mig_profiles")
GEOMETRIES = [
    pytest.param(model, geometry, id=f"{model}: {', '.join(f'{n} {name}' for name, n in geometry.items())}")
    for model, geometries in data.load("mig_partitioner")["geometries"].items()
    for geometry in geometries
]
GIB = 1 << 30
BY_NAME = {layout.name: layout for layout in LAYOUTS}
A100, A30 = BY_NAME["A100-80"], BY_NAME["A30-24"]


def every(layout: Layout) -> list[Instance]:
    """Each instance that a card of this layout could have."""
    return [Instance(start, p.name) for p in layout.profiles for start in p.starts]


def lies_well(layout: Layout, instances: Iterable[Instance]) -> bool:
    """NVIDIA's rule in other words than the code's: memory slice by memory slice."""
    chosen = list(instances)
    taken: list[int] = []
    for start, name in chosen:
        profile = next((p for p in layout.profiles if p.name == name), None)
        if profile is None or start not in profile.starts:
            return False
        taken += range(start, start + profile.size)
    per_profile = Counter(name for _, name in chosen)
    return (
        len(taken) == len(set(taken))
        and all(n <= next(p.most for p in layout.profiles if p.name == name) for name, n in per_profile.items())
        and sum("+me" in name for _, name in chosen) <= 1
    )


def by_search(layout: Layout, fixed: tuple[Instance, ...], wanted: Mapping[str, int]) -> tuple[Instance, ...] | None:
    """`arrange` by trying every set of instances of the right size."""
    names = sorted(n for name, count in wanted.items() for n in [name] * count)
    candidates = [instance for instance in every(layout) if instance.profile in wanted and instance not in fixed]
    ways = [
        tuple(sorted(made))
        for made in combinations(candidates, len(names))
        if sorted(i.profile for i in made) == names and lies_well(layout, (*fixed, *made))
    ]

    def left(made: tuple[Instance, ...]) -> int:
        return sum(lies_well(layout, (*fixed, *made, more)) for more in every(layout) if more not in (*fixed, *made))

    return min(ways, key=lambda made: (-left(made), made), default=None)


layouts = st.sampled_from([A100, A30])


@st.composite
def cut_cards(draw: st.DrawFn) -> tuple[Layout, tuple[Instance, ...]]:
    """A layout and instances on a card that lie well."""
    layout = draw(layouts)
    made: tuple[Instance, ...] = ()
    for instance in draw(st.lists(st.sampled_from(every(layout)), max_size=4, unique=True)):
        made = (*made, instance) if lies_well(layout, (*made, instance)) else made
    return layout, made


@st.composite
def asked_of_cut_cards(draw: st.DrawFn) -> tuple[Layout, tuple[Instance, ...], dict[str, int]]:
    layout, made = draw(cut_cards())
    names = st.sampled_from([p.name for p in layout.profiles])
    return layout, made, dict(Counter(draw(st.lists(names, min_size=1, max_size=3))))


@given(asked_of_cut_cards())
@examples(50)
def test_property_arrange_finds_what_trying_everything_finds(
    case: tuple[Layout, tuple[Instance, ...], dict[str, int]],
) -> None:
    layout, fixed, wanted = case
    assert arrange(layout, fixed, wanted) == by_search(layout, fixed, wanted)


@given(cut_cards(), st.randoms(use_true_random=False))
@examples(50)
def test_property_openings_are_what_lies_well_beside_the_others_in_any_order(case: Any, random: Any) -> None:
    layout, made = case
    shuffled = random.sample(made, len(made))
    assert possible_instances(layout, shuffled) == possible_instances(layout, made)
    assert set(possible_instances(layout, made)) == {
        more for more in every(layout) if more not in made and lies_well(layout, (*made, more))
    }


@given(st.data())
@examples(66)
def test_property_a_problem_is_named_exactly_where_the_rule_is_broken(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    strange = [Instance(1, "2g.20gb"), Instance(0, "9g.99gb"), Instance(7, "1g.10gb")]
    chosen = data.draw(st.lists(st.sampled_from([*every(layout), *strange]), max_size=4))
    assert (invalid_reason(layout, chosen) is None) == lies_well(layout, chosen)


@pytest.mark.parametrize(
    ("instances", "text"),
    [
        ([(0, "1g.5gb")], "A100-80 has no profile 1g.5gb; it has 1g.10gb, 1g.10gb+me"),
        ([(1, "2g.20gb")], "2g.20gb cannot start at 1, only at 0, 2, 4"),
        ([(0, "3g.40gb"), (2, "2g.20gb")], "2g.20gb at 2 overlaps another instance"),
        ([(0, "1g.10gb+me"), (1, "1g.10gb+me")], "a card has at most 1 of 1g.10gb+me"),
    ],
)
def test_why_a_card_cannot_be_cut_so(instances: list[tuple[int, str]], text: str) -> None:
    assert (invalid_reason(A100, [Instance(*i) for i in instances]) or "").startswith(text)


def test_two_profiles_with_media_engines_are_one_too_many() -> None:
    both = [Instance(0, "1g.6gb+me"), Instance(2, "2g.12gb+me")]
    assert invalid_reason(A30, both) == "a card has at most one instance with media engines (+me)"
    assert Instance(2, "2g.12gb+me") not in possible_instances(A30, both[:1])


def test_the_most_stays_open() -> None:
    assert arrange(A100, (), {"1g.10gb": 1}) == ((6, "1g.10gb"),)
    assert arrange(A100, (), {"3g.40gb": 1}) == ((4, "3g.40gb"),)
    assert arrange(A100, [Instance(6, "1g.10gb")], {"2g.20gb": 1, "1g.10gb": 0}) == ((4, "2g.20gb"),)
    assert arrange(A100, [Instance(0, "1g.10gb")], {"7g.80gb": 1}) is None
    assert arrange(A100, (), {}) == ()
    assert arrange(A100, (), {"9g.99gb": 1}) is None


@pytest.mark.parametrize(
    ("model", "gib", "layout"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80"),
        ("A100-SXM4-40GB", 40, "A100-40"),
        ("NVIDIA A30", 24, "A30-24"),
        ("NVIDIA H100 80GB HBM3", 79, "H100-80"),
        ("NVIDIA H100 NVL", 93, "H100-NVL-94"),
        ("NVIDIA A800-SXM4-80GB", 80, "A100-80"),
        ("NVIDIA A800 40GB Active", 40, "A100-40"),
        ("NVIDIA H800", 79, "H100-80"),
        ("NVIDIA H800 NVL", 93, "H100-NVL-94"),
        ("nvidia-h200", 140, "H200-141"),
        ("NVIDIA B200", 179, "B200-180"),
        ("NVIDIA A10", 24, None),
        ("NVIDIA GH200 480GB", 96, None),
        ("Tesla V100-SXM2-32GB", 32, None),
        ("", 80, None),
    ],
)
def test_the_layout_of_a_model(model: str, gib: int, layout: str | None) -> None:
    found = layout_of(model, gib * GIB)
    assert (found.name if found else None) == layout


@pytest.mark.parametrize(
    ("model", "geometry", "text"),
    [
        ("NVIDIA-A100-SXM4-80GB", {"1g.10gb": 3, "4g.40gb": 1}, ""),
        ("A100", {"1g.5gb": 7}, ""),
        ("A100", {"1g.10gb": 7}, ""),
        ("A100", {"1g.10gb": 8}, "A100-80 cannot be partitioned into 8 of 1g.10gb"),
        ("A100-40GB", {"1g.10gb": 5}, "A100-40 cannot be partitioned into 5 of 1g.10gb"),
        ("H100-80GB", {"3g.40gb": 2, "1g.10gb": 1}, "H100-80 cannot be partitioned into 2 of 3g.40gb, 1 of 1g.10gb"),
        ("A30", {"1g.5gb": 1}, "A30-24 has no profile 1g.5gb"),
        ("Z900", {"1g.5gb": 900}, ""),
        ("Z900-80GB", {"1g.5gb": 900}, ""),
        ("A100-80GB", {"1g.10gb": 10**9}, "A100-80 cannot be partitioned into"),
    ],
)
def test_whether_cards_of_a_name_can_be_cut_so(model: str, geometry: dict[str, int], text: str) -> None:
    found = invalid_geometry_reason(model, geometry)
    assert (found or "").startswith(text)
    assert bool(found) == bool(text)


def test_another_drivers_name() -> None:
    assert (canonical("7g.79gb"), canonical("7g.80gb")) == ("7g.80gb", "7g.80gb")


def test_the_tables_have_the_models_of_nvidia() -> None:
    assert BY_NAME.keys() == PROFILES.keys()


@pytest.mark.parametrize(("name", "facts"), PROFILES.items(), ids=PROFILES)
def test_the_table_of_a_model_is_nvidias(name: str, facts: dict[str, Any]) -> None:
    layout = BY_NAME[name]
    assert layout.inferred == facts["inferred"]
    assert {(p.name, p.compute, p.size, p.starts, p.most) for p in layout.profiles} == {
        (profile, row["compute"], row["memory"], tuple(row["starts"]), row["most"])
        for profile, row in facts["profiles"].items()
    }


@pytest.mark.parametrize(("model", "geometry"), GEOMETRIES)
def test_a_geometry_that_another_partitioner_allows_can_be_placed(model: str, geometry: dict[str, int]) -> None:
    made = arrange(BY_NAME[model], (), geometry)
    assert made is not None
    assert Counter(instance.profile for instance in made) == geometry
    assert lies_well(BY_NAME[model], made)
