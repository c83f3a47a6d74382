"""What a node's annotations say of its slices, and how its two writers keep out of each other's way."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.node_slices import (
    ANNOTATION,
    EXISTING,
    LABEL,
    NO_SLICES,
    PLANNED,
    UNKNOWN_POD,
    NodeSlices,
    Partitioning,
    next_plan,
    read_partitioning,
    read_slices,
    shares_by_pod,
    slice_devices,
    unpartitioned_cards,
    with_spec,
    with_status,
    write_existing,
    write_planned,
)
from mgpu.model.pods import Node
from mgpu.model.slice_names import Slice, count_slices
from tests.builders import GIB, card, cards
from tests.examples import examples

SEED = (
    '{"spec-gpu-0-2gb": 2, "spec-partitioning-plan": 123456, "status-gpu-0-2gb-used": 1,'
    ' "status-partitioning-plan": 123456}'
)
A, B, C = Slice(0, 0, "1g.10gb"), Slice(0, 4, "3g.40gb"), Slice(1, 2, "2g.20gb")


def node(mode: str = "mig", **annotations: str | None) -> Node:
    """`node("mps", shared="…", made="…", planned="…")`."""
    keys = {"shared": ANNOTATION, "made": EXISTING, "planned": PLANNED}
    return Node("n", {LABEL: mode} if mode else {}, {keys[k]: v for k, v in annotations.items() if v is not None})


def problems(read: Any) -> list[str]:
    with pytest.raises(BadObject) as error:
        read()
    return [str(problem) for problem in error.value.problems]


# The annotation of the seed.


def test_the_seeds_example() -> None:
    found = read_partitioning(SEED)
    assert found == Partitioning({0: {"2gb": 2}}, 123456, {0: {"2gb": 1}}, {}, 123456)
    read = read_slices(node("mps", shared=SEED))
    assert read.existing == (Slice(0, 0, "2gb", pod=UNKNOWN_POD), Slice(0, 1, "2gb"))  # free = spec - used
    assert (read.has_positions, read.has_pending_plan, read.available) == (False, False, read.existing)


@pytest.mark.parametrize("said", [{"status-gpu-0-2gb-free": 0}, {"status-gpu-1-4gb-free": 1}])
def test_a_status_that_says_what_is_free_says_all_of_it(said: dict[str, int]) -> None:
    text = json.dumps(json.loads(SEED) | said)
    free = [s for s in read_slices(node("mps", shared=text)).available if not s.pod]
    assert [(s.card, s.name) for s in free] == [(1, "4gb")] * said.get("status-gpu-1-4gb-free", 0)


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_nothing_said(text: str | None) -> None:
    assert read_partitioning(text) == Partitioning()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "metadata.annotations[dynamicgpuslice]: is not JSON"),
        ("[" * 100_000, "metadata.annotations[dynamicgpuslice]: is not JSON"),
        ("[]", "metadata.annotations[dynamicgpuslice]: must be a JSON object"),
        ('{"spec-gpu-0-2gb": "2"}', "metadata.annotations[dynamicgpuslice][spec-gpu-0-2gb]: must be an integer of at"),
        ('{"spec-gpu-0-2gb": true}', "metadata.annotations[dynamicgpuslice][spec-gpu-0-2gb]: must be an integer of at"),
        ('{"spec-gpu-0-2gb": -1}', "metadata.annotations[dynamicgpuslice][spec-gpu-0-2gb]: must be an integer of at"),
        (
            '{"spec-gpu-0-foo": 1}',
            "metadata.annotations[dynamicgpuslice][spec-gpu-0-foo]: 'foo' is not the name of a slice such as",
        ),
        (
            '{"status-gpu-0-2g-used": 1}',
            "metadata.annotations[dynamicgpuslice][status-gpu-0-2g-used]: '2g' is not the name of a slice",
        ),
        (
            '{"spec-partitioning-plan": 1.5}',
            "metadata.annotations[dynamicgpuslice][spec-partitioning-plan]: must be an integer of at least 0, not 1.5",
        ),
    ],
)
def test_a_bad_value_is_named_by_its_path(text: str, problem: str) -> None:
    (found,) = problems(lambda: read_partitioning(text))
    assert found.startswith(problem)
    if "JSON" in problem:
        assert problems(lambda: with_spec(text, {}, 1)) == problems(lambda: with_status(text, (), 1)) == [found]


@pytest.mark.parametrize("key", ["spec-gpu-0-2gb", "status-gpu-0-2gb-used", "status-gpu-0-2gb-free"])
def test_more_slices_than_a_card_can_have_are_no_slices(key: str) -> None:
    """A billion of them would end the scheduler."""
    most = {"spec-gpu-0-4gb": 8, "status-gpu-0-4gb-used": 4, "status-gpu-0-1gb-free": 4}
    assert read_partitioning(json.dumps(most | {key: 40}))
    (found,) = problems(lambda: read_partitioning(json.dumps(most | {key: 10**9})))
    what = key.partition("-")[0]
    assert found == (
        f"metadata.annotations[dynamicgpuslice]: has {10**9 + 8} slices of card 0 in its {what}, "
        "but a card has at most 48"
    )


def test_every_bad_value_is_named_at_once() -> None:
    assert len(problems(lambda: read_partitioning('{"spec-gpu-0-x": 1, "spec-gpu-1-y": 1}'))) == 2


def test_other_drivers_names_and_zeroes() -> None:
    found = read_partitioning('{"spec-gpu-0-7g.79gb": 1, "spec-gpu-1-1g.10gb+me": 1, "spec-gpu-2-4gb": 0}')
    assert found.spec == {0: {"7g.80gb": 1}, 1: {"1g.10gb+me": 1}}


def test_the_spec_replaces_the_spec_alone() -> None:
    text = with_spec(SEED, {0: {"4gb": 1}, 2: {"2gb": 3, "8gb": 0}}, 123457)
    assert json.loads(text) == {
        "spec-gpu-0-4gb": 1,
        "spec-gpu-2-2gb": 3,
        "spec-partitioning-plan": 123457,
        "status-gpu-0-2gb-used": 1,
        "status-partitioning-plan": 123456,
    }


def test_the_status_replaces_the_status_alone() -> None:
    made = [Slice(0, 0, "2gb", pod="u"), Slice(0, 1, "2gb"), Slice(0, 2, "2gb"), Slice(1, 0, "8gb", pod="v")]
    both = {"status-gpu-0-2gb-free": 2, "status-gpu-0-2gb-used": 1, "status-gpu-1-8gb-used": 1}
    spec = {"spec-gpu-0-2gb": 2, "spec-partitioning-plan": 123456}
    assert json.loads(with_status(SEED, made, 9)) == {**both, **spec, "status-partitioning-plan": 9}
    assert json.loads(with_status(SEED, made, None)) == {**both, **spec, "status-partitioning-plan": 123456}
    assert json.loads(with_status(None, (), None)) == {}


slices = st.lists(
    st.builds(
        Slice,
        st.integers(0, 7),
        st.integers(0, 47),
        st.sampled_from(["1g.10gb", "1g.10gb+me", "2g.20gb"]),
        pod=st.sampled_from(["", "u"]),
    ),
    max_size=6,
    unique_by=lambda s: (s.card, s.start),
)
specs = st.dictionaries(
    st.integers(0, 7), st.dictionaries(st.sampled_from(["1g.10gb", "4gb"]), st.integers(0, 7), max_size=2), max_size=3
)
unknown = st.dictionaries(
    st.sampled_from(["team", "spec-gpus", "xspec-gpu-0-2gb", "status-gpu-0-2gb", "spec-gpu-a-2gb", "status-gpu--used"]),
    st.none() | st.text(max_size=3) | st.integers() | st.lists(st.integers(), max_size=2),
)


@given(unknown, specs, slices, st.integers(0, 99), st.none() | st.integers(0, 99), st.integers(0, 4))
@examples(66)
def test_property_two_writers_lose_nothing_of_each_other(
    other: dict[str, Any], spec: Any, made: list[Slice], plan: int, applied: int | None, order: int
) -> None:
    before = with_status(with_spec(json.dumps(other), {5: {"1g.10gb": 1}}, 7), [A], 7)
    spec_first = with_status(with_spec(before, spec, plan), made, applied)
    status_first = with_spec(with_status(before, made, applied), spec, plan)
    assert spec_first == status_first
    found = read_partitioning(spec_first)
    written = {card: {name: n for name, n in names.items() if n} for card, names in spec.items()}
    assert found.spec == {card: names for card, names in written.items() if names}
    assert (found.plan, found.applied) == (plan, 7 if applied is None else applied)
    assert found.used == count_slices(s for s in made if s.pod)
    assert found.free == count_slices(s for s in made if not s.pod)
    assert other.items() <= json.loads(spec_first).items()
    again = spec_first
    for _ in range(order):
        again = with_spec(with_status(again, made, applied), spec, plan)
    assert again == spec_first


@given(st.none() | st.integers(0, 2**40), st.integers(0, 2**40))
def test_property_plans_grow_whatever_the_clock_does(before: int | None, now: int) -> None:
    plan = next_plan(before, now)
    assert plan >= now
    assert before is None or plan > before


# All annotations of a node.


def test_a_node_without_the_label_has_none_whatever_it_says() -> None:
    assert read_slices(node("", shared="nonsense", made="nonsense")) == NO_SLICES


def test_another_value_of_the_label_is_a_bad_object() -> None:
    assert problems(lambda: read_slices(node("MIG"))) == [
        f"metadata.labels[{LABEL}]: must be mig, mps or mig-claims, not 'MIG'"
    ]


@given(slices, st.sets(st.integers(0, 9)), st.none() | st.tuples(st.integers(0, 99), st.text(max_size=5)))
@examples(33)
def test_property_what_the_agent_says_reads_back(
    made: list[Slice], cut: set[int], refused: tuple[int, str] | None
) -> None:
    found = read_slices(node(made=write_existing(made, cut, refused)))
    assert found.existing == tuple(sorted(made))
    assert found.cards == cut | {s.card for s in made}
    assert (found.refused, found.has_positions) == (refused, True)


@given(slices, st.integers(0, 99))
@examples(33)
def test_property_what_is_planned_reads_back_as_places(planned: list[Slice], plan: int) -> None:
    shared = with_spec(None, count_slices(planned), plan)
    found = read_slices(node(shared=shared, planned=write_planned(planned, plan)))
    assert found.planned == tuple(sorted(s.place for s in planned))
    assert read_slices(node(shared=shared, planned=write_planned(planned, plan + 1))).planned is None
    assert read_slices(node(planned=write_planned(planned, plan))).planned is None


ROW = '{"cards": {"0": [{"profile": "4gb", "start": 0}]}}'


@pytest.mark.parametrize(
    ("mode", "text", "problem"),
    [
        ("mig", "nonsense", f"metadata.annotations[{EXISTING}]: is not JSON"),
        ("mig", "{}", f"metadata.annotations[{EXISTING}].cards: must be an object whose keys are card indexes"),
        (
            "mig",
            '{"cards": []}',
            f"metadata.annotations[{EXISTING}].cards: must be an object whose keys are card indexes",
        ),
        ("mig", '{"cards": {"a": []}}', f"metadata.annotations[{EXISTING}].cards: must be an object whose keys"),
        (
            "mig",
            '{"cards": {"0": 7}}',
            f"metadata.annotations[{EXISTING}].cards[0][0]: must have a profile (the name of a slice) and",
        ),
        (
            "mps",
            ROW.replace(": 0}", ": 100}"),
            f"metadata.annotations[{EXISTING}].cards[0][0]: must have a profile (the name of a slice)",
        ),
        (
            "mps",
            ROW.replace(": 0}", ": true}"),
            f"metadata.annotations[{EXISTING}].cards[0][0]: must have a profile (the name of a slice)",
        ),
        (
            "mps",
            ROW.replace(": 0}", ': 0, "uuid": 7}'),
            f"metadata.annotations[{EXISTING}].cards[0][0]: must have a profile",
        ),
        (
            "mps",
            '{"cards": {"3": [{"profile": "4gb", "start": 1}, {"profile": "2gb", "start": 1}]}}',
            f"metadata.annotations[{EXISTING}].cards[3]: has two slices that start at 1",
        ),
        ("mps", '{"cards": {}, "refused": 7}', f"metadata.annotations[{EXISTING}].refused: must have plan and why"),
    ],
)
def test_what_the_agent_cannot_have_said_is_named_by_its_path(mode: str, text: str, problem: str) -> None:
    (found,) = problems(lambda: read_slices(node(mode, made=text)))
    assert found.startswith(problem)


def test_a_bad_plan_is_named_by_its_path() -> None:
    planned = '{"plan": 5, "cards": {"0": [{"profile": "4g", "start": 0}]}}'
    (found,) = problems(lambda: read_slices(node("mig", shared=with_spec(None, {}, 5), planned=planned)))
    assert found.startswith(
        f"metadata.annotations[{PLANNED}].cards[0][0]: must have a profile (the name of a slice) and"
    )


def test_what_is_of_before_the_label_was_changed_means_nothing() -> None:
    shared = with_spec(with_status(None, [Slice(0, 0, "1g.10gb")], 5), {0: {"1g.10gb": 1}}, 5)
    planned = write_planned([Slice(0, 0, "1g.10gb")], 5)
    found = read_slices(
        node("mps", shared=shared, made=write_existing([Slice(0, 0, "1g.10gb")], [0], None), planned=planned)
    )
    assert (found.existing, found.cards, found.planned, found.has_positions) == ((), frozenset(), None, False)
    assert found.partitioning == Partitioning(plan=5, applied=5)


# Who may have what.


def state(made: tuple[Slice, ...], spec: Mapping[int, Mapping[str, int]] | None, **more: Any) -> NodeSlices:
    """spec None: no plan was ever made; else plan 2 over the plan 1 that is in force."""
    partitioning = Partitioning(spec or {}, None if spec is None else 2, applied=1)
    return NodeSlices("mig", partitioning, made, frozenset({0, 1}), **more)


def test_a_plan_is_waited_for_until_it_is_in_force_or_refused() -> None:
    assert not state((A,), None).has_pending_plan
    assert state((A,), {0: {}}).has_pending_plan
    assert state((A,), {0: {}}, refused=(1, "an older one")).has_pending_plan
    assert not state((A,), {0: {}}, refused=(2, "no room")).has_pending_plan
    assert not replace(state((A,), {}), partitioning=Partitioning({}, 2, applied=2)).has_pending_plan


def test_while_a_plan_is_under_way_only_what_stays_is_offered() -> None:
    made = (replace(A, uuid="MIG-a"), replace(B, uuid="MIG-b", pod="u"), C)
    assert state(made, None).available == made
    assert state(made, {0: {"3g.40gb": 1}}, planned=(B,)).available == (made[1],)
    assert state(made, {}, planned=()).available == ()


def test_of_a_plan_that_says_only_counts_those_in_use_stay_first() -> None:
    free, used = Slice(0, 0, "1g.10gb"), Slice(0, 3, "1g.10gb", pod="u")
    assert state((free, used, C), {0: {"1g.10gb": 1}}).available == (used,)
    assert state((free, used, C), {0: {"1g.10gb": 2}, 1: {"2g.20gb": 5}}).available == (free, used, C)


def test_slices_are_devices_with_their_part_of_the_card() -> None:
    made = (replace(A, uuid="MIG-a"), C, Slice(7, 0, "1g.10gb"))
    gpus = (card(0), card(1, healthy=False))
    first, second = slice_devices(state(made, None), gpus)
    assert first == Card(0, "MIG-a", "A100-SXM4-80GB", 10 * GIB, 142, minor=99, type="mig-1g.10gb")
    assert (second.index, second.uuid, second.healthy) == (102, "GPU-n1-1/2g.20gb/2", False)
    assert (second.memory, second.core, second.type) == (20 * GIB, 285, "mig-2g.20gb")


def test_shares_under_mps_are_devices_too() -> None:
    made = (Slice(0, 0, "4gb"), Slice(0, 1, "160gb"), Slice(0, 2, "2gb", pod=UNKNOWN_POD))
    found = slice_devices(NodeSlices("mps", existing=made), cards(1))
    assert [(d.type, d.index, d.memory, d.core, d.minor) for d in found] == [
        ("gpu-4gb", 0, 4 * GIB, 50, 0),
        ("gpu-160gb", 1, 160 * GIB, 1000, 1),
    ]


def test_the_free_instance_of_the_highest_start_comes_first() -> None:
    made = tuple(Slice(0, start, "1g.10gb") for start in range(3))
    found = sorted(slice_devices(state(made, None), cards(1)), key=lambda d: d.minor or 0)
    assert [device.index for device in found] == [2, 1, 0]


def test_cards_that_are_cut_are_nobody_elses() -> None:
    gpus = (*cards(3), replace(card(3), model="Tesla T4", memory=16 * GIB))
    assert unpartitioned_cards(NO_SLICES, gpus) == gpus
    assert [c.index for c in unpartitioned_cards(NodeSlices("mig"), gpus)] == [3]
    of_mps = NodeSlices("mps", Partitioning({2: {"4gb": 1}}), (Slice(0, 0, "4gb"),))
    assert [c.index for c in unpartitioned_cards(of_mps, gpus)] == [1, 3]


def test_what_the_node_gave_out_is_held_by_its_pods() -> None:
    made = (replace(A, pod="u"), replace(B, pod="u"), C, Slice(1, 0, "1g.10gb", pod=UNKNOWN_POD))
    assert shares_by_pod(state(made, None)) == {
        "u": (Share("", 0, whole=True, type="mig-1g.10gb"), Share("", 4, whole=True, type="mig-3g.40gb"))
    }
