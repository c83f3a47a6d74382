"""`choose_victims` finds the same victims as an exhaustive search over all sets of pods."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, whole_cards
from mgpu.model.groups import Group
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Stage
from scheduler.engine import Effort, place, policy_named
from scheduler.engine.effort import Budget
from scheduler.engine.evictions import EvictablePod, by_importance, choose_victims, without_pods
from tests import builders as b
from tests.examples import examples

GROUP = Group("same-card-group", "default", "g")
POLICY = policy_named("binpack", 50)

Key = tuple[int, int, int, int]


def request(*containers: ContainerRequest, max_shares: int = 0) -> GpuRequest:
    return GpuRequest("mgpu", containers, max_shares)


def share(core: int, gib: int = 0, cards: int = 1, name: str = "c", stage: Stage = Stage.APP) -> ContainerRequest:
    return ContainerRequest(name, cards, core, gib * b.GIB, stage=stage)


def tenant(uid: str, priority: int, *on: int, core: int = 500, gib: int = 0, **more: object) -> EvictablePod:
    return EvictablePod(uid, priority, {i: Amount(core, gib * b.GIB, 1) for i in on}, **more)  # type: ignore[arg-type]


def cards_with(tenants: Sequence[EvictablePod], count: int, kept: Sequence[EvictablePod] = ()) -> list[CardState]:
    negative = without_pods([CardState(card) for card in b.cards(count)], [*tenants, *kept])
    return [CardState(s.card, -s.core_used, -s.memory_used, -s.shares, ratio_used=-s.ratio_used) for s in negative]


def fitting(wanted: GpuRequest, cards: Sequence[CardState]) -> bool:
    return isinstance(place(wanted, cards, POLICY), Placement)


def found_victims(
    wanted: GpuRequest, cards: Sequence[CardState], pods: Sequence[EvictablePod], exact: int = 10_000_000
) -> tuple[list[EvictablePod], bool] | None:
    budget = Budget(Effort(), 10_000_000)
    return choose_victims(
        wanted, cards, pods, lambda states: fitting(wanted, states), exact=Budget(Effort(), exact), budget=budget
    )


def key(chosen: Sequence[EvictablePod]) -> Key:
    staying = [t for t in chosen if not t.leaving]
    highest = max((t.priority for t in staying), default=-(1 << 31))
    return (
        sum(t.violates for t in staying),
        highest,
        sum(t.priority + (1 << 31) for t in staying),
        len(staying),
    )


def exhaustive(wanted: GpuRequest, cards: Sequence[CardState], tenants: Sequence[EvictablePod]) -> Key | None:
    sets = (chosen for n in range(len(tenants) + 1) for chosen in combinations(tenants, n))
    return min((key(chosen) for chosen in sets if fitting(wanted, without_pods(cards, chosen))), default=None)


amounts = st.builds(
    Amount,
    st.sampled_from((100, 200, 300, 500, 1000)),
    st.sampled_from((0, 8 * b.GIB, 30 * b.GIB)),
    st.just(1),
    st.sampled_from((0, 0, 30, 60)),
)


@st.composite
def tenants_on(draw: st.DrawFn, cards: int) -> list[EvictablePod]:
    found = []
    for i in range(draw(st.integers(0, 7))):
        on = draw(st.sets(st.integers(0, cards - 1), min_size=1, max_size=draw(st.sampled_from((1, 1, 1, 2, cards)))))
        found.append(
            EvictablePod(
                f"u{i}",
                draw(st.sampled_from((-5, 0, 0, 3, 1000))),
                dict.fromkeys(sorted(on), draw(amounts)),
                draw(st.sampled_from(("", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"))),
                draw(st.sampled_from((False, False, False, True))),
                draw(st.sampled_from((False, False, False, False, True))),
            )
        )
    return found


containers = st.one_of(
    st.builds(share, st.sampled_from((0, 300, 600, 1000)), st.sampled_from((0, 40, 80)), st.integers(1, 2)),
    st.builds(
        lambda ratio, n: ContainerRequest("r", n, ratio=ratio), st.sampled_from((30, 60, 100)), st.integers(1, 2)
    ),
    st.builds(lambda n: whole_cards("w", n), st.integers(1, 2)),
)


@st.composite
def requests(draw: st.DrawFn) -> GpuRequest:
    some = draw(st.lists(containers, min_size=1, max_size=3))
    stages = [draw(st.sampled_from((Stage.APP, Stage.APP, Stage.SIDECAR, Stage.INIT))) for _ in some]
    named = [
        replace(c, container=f"c{i}", stage=stage)
        for i, (c, stage) in enumerate(zip(some, sorted(stages, key=lambda s: s is Stage.APP), strict=True))
    ]
    constraints = draw(
        st.sampled_from(
            (NO_CONSTRAINTS, NO_CONSTRAINTS, Constraints(uuids=("GPU-n1-1",)), Constraints(same_card=GROUP))
        )
    )
    if constraints.same_card:
        named = [replace(c, cards=1) for c in named]
    return GpuRequest("mgpu", tuple(named), draw(st.sampled_from((0, 0, 2))), constraints=constraints)


@examples(18)
@given(st.data())
def test_property_victims_equal_exhaustive_search(data: st.DataObject) -> None:
    """After the evictions the pod fits; no smaller and no less important set of the same node would do."""
    count = data.draw(st.integers(1, 3))
    tenants, wanted = data.draw(tenants_on(count)), data.draw(requests())
    kept = [tenant("kept", 0, *on) for on in data.draw(st.sampled_from(([], [[0]])))]
    group = data.draw(st.sampled_from((None, None, 0)))  # has a pod on this card that stays
    cards = [
        replace(s, groups=frozenset([GROUP] * (i == group))) for i, s in enumerate(cards_with(tenants, count, kept))
    ]
    best = exhaustive(wanted, cards, tenants)
    found = found_victims(wanted, cards, data.draw(st.permutations(tenants)))
    event(f"{'none' if found is None else len(found[0])} victims")
    if found is None:
        assert best is None
        return
    chosen, proven = found
    assert proven
    assert key(chosen) == best
    assert fitting(wanted, without_pods(cards, chosen))
    assert not any(fitting(wanted, without_pods(cards, [t for t in chosen if t is not one])) for one in chosen)
    assert chosen == by_importance(chosen)
    assert found == found_victims(wanted, cards, tenants)


@examples(10)
@given(st.data())
def test_property_victims_without_exact_budget_suffice_and_none_could_stay(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    tenants, wanted = data.draw(tenants_on(count)), data.draw(requests())
    cards = cards_with(tenants, count)
    best = exhaustive(wanted, cards, tenants)
    found = found_victims(wanted, cards, tenants, exact=0)
    assert (found is None) == (best is None)
    if found is not None:
        assert fitting(wanted, without_pods(cards, found[0]))
        assert not any(fitting(wanted, without_pods(cards, [t for t in found[0] if t is not one])) for one in found[0])


@pytest.mark.parametrize(
    ("wanted", "tenants", "expected"),
    [
        # By the sum over the node, a and d would suffice, but they are on two cards.
        (request(share(1000)), [tenant("a", 1, 0), tenant("b", 3, 0), tenant("c", 2, 1), tenant("d", 1, 1)], "cd"),
        # One pod on both cards rather than two of the same priority; two if that one does not suffice.
        (request(share(500, cards=2)), [tenant("a", 1, 0), tenant("b", 1, 1), tenant("c", 1, 0, 1)], "c"),
        (request(share(600, cards=2)), [tenant("a", 1, 0), tenant("b", 1, 1), tenant("c", 1, 0, 1, core=400)], "ab"),
        # A lower priority before fewer pods.
        (request(share(1000)), [tenant("a", 2, 0, core=1000), tenant("b", 1, 1), tenant("c", 1, 1)], "cb"),
        # Of equal ones the younger.
        (
            request(whole_cards("c", 1)),
            [tenant("a", 1, 0, started="2026-01-02T00:00:00Z"), tenant("b", 1, 1, started="2026-01-01T00:00:00Z")],
            "a",
        ),
        # A disruption budget counts before the priority; a pod that is leaving anyway costs nothing.
        (request(share(1000)), [tenant("a", 1, 0, violates=True), tenant("b", 2, 1)], "b"),
        (request(share(1000)), [tenant("a", 1, 0), tenant("b", 2, 1, leaving=True)], "b"),
    ],
)
def test_victims_follow_the_order_of_kube_scheduler(
    wanted: GpuRequest, tenants: list[EvictablePod], expected: str
) -> None:
    found = found_victims(wanted, cards_with(tenants, 2), tenants)
    assert found is not None
    assert ("".join(sorted(t.uid for t in found[0])), found[1]) == ("".join(sorted(expected)), True)


def test_victims_of_pod_that_fits_are_none() -> None:
    tenants = [tenant("a", 1, 0)]
    wanted = request(share(500))
    assert found_victims(wanted, cards_with(tenants, 1), tenants) == ([], True)
