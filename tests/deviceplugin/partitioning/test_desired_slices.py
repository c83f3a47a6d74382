"""The desired slices for generated plans, existing slices and slices in use."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.partitioning.desired_slices import PlanNotApplicable, configured_slices, planned_instances
from mgpu.model.mig import Instance, Layout, arrange, invalid_reason, layout_of, possible_instances
from mgpu.model.node_slices import NodeSlices, Partitioning
from mgpu.model.slice_names import Slice, count_slices
from tests.deviceplugin.mig.rig import A30, A100, GIB, gpu

LAYOUTS = [layout for layout in (layout_of(A100, 80 * GIB), layout_of(A30, 24 * GIB)) if layout]


@st.composite
def cards(draw: st.DrawFn) -> tuple[Layout, frozenset[Instance], frozenset[Instance], dict[str, int]]:
    """Generate a layout, existing instances, those of them in use, and the planned number of each profile."""
    layout = draw(st.sampled_from(LAYOUTS))
    made: set[Instance] = set()
    for _ in range(draw(st.integers(0, 5))):
        if there := possible_instances(layout, made):
            made.add(draw(st.sampled_from(there)))
    used = draw(st.sets(st.sampled_from(sorted(made)))) if made else set()
    names = [p.name for p in layout.profiles]
    wanted = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 3), max_size=3))
    if draw(st.booleans()):
        wanted = {**wanted, **Counter(i.profile for i in used)}
    return layout, frozenset(made), frozenset(used), wanted


@given(cards())
def test_counts_are_arranged_wherever_they_fit_beside_slices_in_use(
    case: tuple[Layout, frozenset[Instance], frozenset[Instance], dict[str, int]],
) -> None:
    layout, made, used, wanted = case
    rest = Counter(wanted)
    rest.subtract(i.profile for i in used)
    possible = min(rest.values(), default=0) >= 0 and arrange(layout, used, rest) is not None
    found = NodeSlices("mig", Partitioning({0: wanted}, 1))
    try:
        result = planned_instances(found, {0: layout}, {0: made}, {}, {0: used})[0]
    except PlanNotApplicable:
        assert not possible
    else:
        assert possible
        assert Counter(i.profile for i in result) == Counter(wanted)
        assert used <= result
        assert invalid_reason(layout, result) is None
        assert planned_instances(found, {0: layout}, {0: result}, {}, {0: used})[0] == result


def test_planned_places_count_only_where_they_match_the_plan() -> None:
    layout, spec = LAYOUTS[0], {0: {"1g.10gb": 1}}
    there = {0: frozenset({Instance(3, "1g.10gb")})}
    planned = (Slice(0, 5, "1g.10gb"),)
    found = NodeSlices("mig", Partitioning(spec, 1), planned=planned)
    assert planned_instances(found, {0: layout}, there, {}, {}) == {0: {Instance(5, "1g.10gb")}}
    other = NodeSlices("mig", Partitioning(spec, 1), planned=(*planned, Slice(0, 6, "1g.10gb")))
    assert planned_instances(other, {0: layout}, there, {}, {}) == there


def test_last_good_state_is_preferred_to_the_observed_one() -> None:
    """After a reboot some or all instances are missing."""
    spec, before = {0: {"1g.10gb": 2}}, {0: frozenset({Instance(3, "1g.10gb"), Instance(5, "1g.10gb")})}
    found = NodeSlices("mig", Partitioning(spec, 1))
    assert planned_instances(found, {0: LAYOUTS[0]}, {0: frozenset()}, before, {}) == before


sizes = st.sampled_from(["2gb", "4gb", "10gb"])
configs = st.dictionaries(st.integers(0, 1), st.dictionaries(sizes, st.integers(0, 4), max_size=3), max_size=2)
slices = st.lists(
    st.builds(Slice, st.integers(0, 1), st.integers(0, 9), sizes), max_size=6, unique_by=lambda s: s.index
)


@given(configs, slices, st.data())
def test_shares_are_numbered_uniquely_and_used_ones_stay(
    config: dict[int, dict[str, int]], before: list[Slice], data: st.DataObject
) -> None:
    used = data.draw(st.sets(st.sampled_from(before))) if before else set()
    present = {c: {n: k for n, k in names.items() if k} for c, names in config.items() if any(names.values())}
    fits = all(
        n <= present.get(c, {}).get(name, 0) for c, names in count_slices(used).items() for name, n in names.items()
    )
    try:
        found = configured_slices(config, None, before, used, (gpu(0), gpu(1)), (), "m")
    except PlanNotApplicable:
        assert not fits
        return
    assert fits
    assert count_slices(found) == present
    assert len({s.index for s in found}) == len(found)
    assert {*used} <= {*found}
    assert configured_slices(config, None, found, used, (gpu(0), gpu(1)), (), "m") == found


@pytest.mark.parametrize("number", [48, 49])
def test_card_has_no_more_clients_than_mps(number: int) -> None:
    big = (gpu(0, gib=180),)
    if number > 48:
        with pytest.raises(PlanNotApplicable, match="49 slices of card 0, but an MPS daemon has at most 48 clients"):
            configured_slices({0: {"2gb": number}}, None, (), (), big, (), "m")
    else:
        assert len(configured_slices({0: {"2gb": number}}, None, (), (), big, (), "m")) == 48
