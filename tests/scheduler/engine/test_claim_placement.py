"""`place_claim` case by case, and compared with an exhaustive search that is written from its specification."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import (
    CardRefusal,
    ContainerRequest,
    GpuRequest,
    Placement,
    Rejection,
    RejectionKind,
    whole_cards,
)
from mgpu.model.groups import Group
from mgpu.model.pod_constraints import Constraints
from mgpu.model.pods import Stage
from mgpu.model.resource_claims import AttributeConstraint
from scheduler.engine import FULL, LEAST, QUICK, SHORT, Limits, Policy, place, policy_named
from scheduler.engine.card_policy import CardScore
from scheduler.engine.claim_placement import place_claim, qualified_attributes
from tests.builders import GIB, state
from tests.examples import examples
from tests.scheduler.engine import oracle, strategies

SPREAD_GROUP = Group("spread-group", "default", "s")
SAME_CARD_GROUP = Group("same-card-group", "default", "g")
Chosen = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Problem:
    request: GpuRequest
    constraints: tuple[AttributeConstraint, ...]
    cards: list[CardState]
    policy: tuple[str, int]
    excluded: Mapping[str, Mapping[int, str]]

    def place(self, limits: Limits = FULL, cards: list[CardState] | None = None) -> Placement | Rejection:
        policy = strategies.named(self.policy)
        return place_claim(self.request, self.constraints, cards or self.cards, policy, self.excluded, limits=limits)


def share(name: str = "gpu", cards: int = 1, core: int = 300, gib: int = 10) -> ContainerRequest:
    return ContainerRequest(name, cards, core, gib * GIB)


def match(attribute: str, *requests: str) -> AttributeConstraint:
    return AttributeConstraint(requests, f"gpu.mgpu.io/{attribute}")


def distinct(attribute: str, *requests: str) -> AttributeConstraint:
    return AttributeConstraint(requests, f"gpu.mgpu.io/{attribute}", distinct=True)


def on_numa(state: CardState, numa: int | None) -> CardState:
    return replace(state, card=replace(state.card, numa=numa))


def claim(*requests: ContainerRequest, constraints: Constraints = Constraints()) -> GpuRequest:  # noqa: B008
    return GpuRequest("dra", requests, constraints=constraints)


@st.composite
def requests(draw: st.DrawFn, cards: int, *, crowded: bool) -> GpuRequest:
    """Crowded: several small shares of each request, more than the node has cards."""
    containers: list[ContainerRequest] = []
    for i in range(draw(st.integers(1, 3))):
        one = draw(strategies.containers(f"r{i}", Stage.APP, cards))
        if crowded and not one.whole:
            one = share(f"r{i}", core=draw(st.sampled_from([100, 200])), gib=draw(st.sampled_from([1, 2])))
        is_alike = draw(st.booleans())
        if containers and is_alike:
            one = replace(containers[-1], container=f"r{i}")
        results = sum(container.cards for container in containers)
        count = 1 if one.whole and crowded else draw(st.integers(1 + crowded, 3))
        containers.append(replace(one, cards=max(1, min(count, 6 - results))))
    groups = draw(st.sampled_from([Constraints()] * 4 + [Constraints(spread=SPREAD_GROUP)] * 2))
    if draw(st.integers(0, 9)) == 9:
        groups = Constraints(same_card=SAME_CARD_GROUP)
    return GpuRequest("dra", tuple(containers), draw(st.sampled_from([0, 0, 0, 4])), constraints=groups)


@st.composite
def problems(draw: st.DrawFn, *, crowded: bool = False) -> Problem:
    most = 2 if crowded else 4
    indexes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=most, unique=True))
    cards = []
    for index in indexes:
        found = draw(strategies.states(index))
        model = draw(st.sampled_from(["A", "A", "B", ""]))
        minor = draw(st.sampled_from([None, None, 9 - index]))
        card = replace(found.card, model=model, numa=draw(st.sampled_from([0, 0, 1, None])), minor=minor)
        in_group = draw(st.integers(0, 2)) == 0 and found.shares
        groups = {draw(st.sampled_from([SPREAD_GROUP, SAME_CARD_GROUP]))} if in_group else set()
        cards.append(replace(found, card=card, groups=frozenset(groups)))
    request = draw(requests(len(cards), crowded=crowded))
    names = [container.container for container in request.containers]
    constraints = []
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        attribute = draw(st.sampled_from(["model", "numa", "index"]))
        concerned = draw(st.sampled_from([(), (names[0],), tuple(names[:2]), tuple(names[-2:])]))
        constraints.append(AttributeConstraint(concerned, f"gpu.mgpu.io/{attribute}", draw(st.booleans())))
    excluded: dict[str, dict[int, str]] = {}
    for name in names:
        if draw(st.integers(0, 2)) == 0:
            excluded[name] = dict.fromkeys(draw(st.sets(st.sampled_from(indexes), max_size=2)), "by selector")
    return Problem(request, tuple(constraints), cards, draw(strategies.policies), excluded)


def exhaustive(problem: Problem) -> Chosen | None:
    """The best placement: different cards for each request if that is possible at all."""
    for choices in (combinations, combinations_with_replacement):
        usable = [candidates(problem, container) for container in problem.request.containers]
        options = [
            combinations(cards, one.cards) if one.whole else choices(cards, one.cards)
            for cards, one in zip(usable, problem.request.containers, strict=True)
        ]
        best = min((ranked(problem, chosen) for chosen in product(*options) if feasible(problem, chosen)), default=None)
        if best is not None:
            return best[-1]
    return None


def candidates(problem: Problem, container: ContainerRequest) -> list[int]:
    group = problem.request.constraints.same_card
    here = any(group in state.groups for state in problem.cards) if group else False
    excluded = problem.excluded.get(container.container, {})
    return sorted(
        state.card.index
        for state in problem.cards
        if state.card.index not in excluded and not (here and group not in state.groups)
    )


def results(problem: Problem, chosen: Chosen) -> Iterator[tuple[ContainerRequest, int]]:
    for container, indexes in zip(problem.request.containers, chosen, strict=True):
        for index in indexes:
            yield replace(container, cards=1), index


def feasible(problem: Problem, chosen: Chosen) -> bool:
    found = list(results(problem, chosen))
    if problem.request.constraints.same_card and len({index for _, index in found}) > 1:
        return False
    card_of = {state.card.index: state.card for state in problem.cards}
    for constraint in problem.constraints:
        concerned = [index for one, index in found if not constraint.requests or one.container in constraint.requests]
        values = [qualified_attributes(card_of[index]).get(constraint.attribute) for index in concerned]
        if None in values or (values and len(set(values)) != (len(values) if constraint.distinct else 1)):
            return False
    singles = replace(problem.request, containers=tuple(one for one, _ in found))
    return all(oracle.fits(singles, here(found, state), state) for state in problem.cards if here(found, state))


def here(found: list[tuple[ContainerRequest, int]], state: CardState) -> tuple[int, ...]:
    return tuple(position for position, (_, index) in enumerate(found) if index == state.card.index)


def ranked(problem: Problem, chosen: Chosen) -> tuple[int, Fraction | int, Chosen]:
    found = list(results(problem, chosen))
    singles = replace(problem.request, containers=tuple(one for one, _ in found))
    name, weight = problem.policy
    # The policy `minor` has no cost where the minors have the order of the indexes, which the oracle assumes.
    cost = oracle.cost_of(singles, problem.cards, name, weight) if name != "minor" else by_minor(problem)
    group = problem.request.constraints.spread
    beside = sum(group in state.groups for state in problem.cards if here(found, state)) if group else 0
    return beside, sum(cost(here(found, state), state) for state in problem.cards), chosen


def by_minor(problem: Problem) -> oracle.Cost:
    ordered = sorted(problem.cards, key=lambda state: state.card.index)
    minors = [state.card.index if state.card.minor is None else state.card.minor for state in ordered]
    containers = [one for one, _ in results(problem, tuple((0,) * c.cards for c in problem.request.containers))]

    def cost(on_card: tuple[int, ...], state: CardState) -> int:
        amounts = [containers[i].amount_on(state.card) for i in on_card]
        is_used = any(one.core or one.memory for one in amounts)
        return minors[ordered.index(state)] if is_used and minors != sorted(minors) else 0

    return cost


def indexes(found: Placement | Rejection) -> Chosen | None:
    return tuple(chosen for _, chosen in found.containers) if isinstance(found, Placement) else None


@examples(250)
@given(problems())
def test_place_claim_returns_what_an_exhaustive_search_finds(problem: Problem) -> None:
    found = problem.place()
    assert found.proven
    assert indexes(found) == exhaustive(problem), found


@examples(250)
@given(problems(crowded=True))
def test_place_claim_on_few_cards_returns_what_an_exhaustive_search_finds(problem: Problem) -> None:
    found = problem.place()
    assert found.proven
    assert indexes(found) == exhaustive(problem), found


@examples(50)
@given(problems())
def test_order_of_the_cards_changes_nothing(problem: Problem) -> None:
    assert problem.place() == problem.place(cards=problem.cards[::-1])


@examples(80)
@given(
    problems() | problems(crowded=True),
    st.sampled_from([QUICK, LEAST, Limits(0, 0), Limits(40, 0), Limits(150, 60), Limits(400, 0)]),
)
def test_place_claim_with_low_limits_is_right_about_what_it_has_proven(problem: Problem, limits: Limits) -> None:
    found = problem.place(limits)
    best = exhaustive(problem)
    if found.proven:
        assert indexes(found) == best
    elif isinstance(found, Placement):
        assert feasible(problem, tuple(chosen for _, chosen in found.containers))
    else:
        assert not found.hopeless


@examples(50)
@given(problems() | problems(crowded=True), st.integers(0, 600))
def test_higher_limits_find_what_lower_ones_find(problem: Problem, steps: int) -> None:
    if isinstance(problem.place(Limits(steps, steps)), Placement):
        assert isinstance(problem.place(Limits(steps + 150, steps + 150)), Placement)
        assert isinstance(problem.place(), Placement)


@examples(60)
@given(strategies.problems(), strategies.policies)
def test_claim_without_selectors_and_constraints_is_placed_as_a_pod(
    problem: tuple[GpuRequest, list[CardState]], policy: tuple[str, int]
) -> None:
    request, cards = problem
    request = replace(request, containers=tuple(replace(one, stage=Stage.APP) for one in request.containers))
    as_pod = place(request, cards, strategies.named(policy))
    found = place_claim(request, (), cards, strategies.named(policy), {})
    if isinstance(as_pod, Placement) or all(one.cards == 1 for one in request.containers):
        assert found == as_pod


@examples(60)
@given(problems())
def test_hopeless_claim_does_not_fit_on_empty_cards(problem: Problem) -> None:
    found = problem.place()
    if isinstance(found, Rejection) and found.hopeless:
        empty = [CardState(state.card, groups=state.groups, gpuid=state.gpuid) for state in problem.cards]
        assert exhaustive(replace(problem, cards=empty)) is None


NUMA = [on_numa(state(0), 0), on_numa(state(1, 500, 20), 1), on_numa(state(2), 1), on_numa(state(3), None)]

CASES = {
    "the cards of a request are different": (claim(share(cards=2)), (), [state(0), state(1)], {}, [(0, 1)]),
    "one card serves several results if the others do not fit": (
        claim(share(cards=2)),
        (),
        [state(0), state(1, 900)],
        {},
        [(0, 0)],
    ),
    "one card serves several results if a selector excludes the others": (
        claim(share(cards=3)),
        (),
        [state(0), state(1)],
        {"gpu": {0: "model is not B"}},
        [(1, 1, 1)],
    ),
    "a card is shared by requests": (claim(share("a"), share("b")), (), [state(0), state(1)], {}, [(0,), (0,)]),
    "a card is shared by requests with different selectors": (
        claim(share("a"), share("b")),
        (),
        [state(0), state(1), state(2, 600, 40)],
        {"a": {2: "too small"}},
        [(0,), (2,)],
    ),
    "each request gets the card that only it can have": (
        claim(share("a", core=900), share("b", core=900)),
        (),
        [state(0), state(1)],
        {"b": {1: "no"}},
        [(1,), (0,)],
    ),
    "all devices have the same attribute": (claim(share(cards=2)), (match("numa"),), NUMA, {}, [(1, 2)]),
    "a card without the attribute is not taken": (claim(share()), (match("numa"),), NUMA[3:] + NUMA[:1], {}, [(0,)]),
    "the devices of two requests have the same attribute": (
        claim(share("a"), share("b"), whole_cards("c", 1)),
        (match("numa", "a", "c"),),
        NUMA,
        {},
        [(1,), (0,), (2,)],
    ),
    "all devices have different attributes": (claim(share(cards=2)), (distinct("numa"),), NUMA, {}, [(0, 1)]),
    "devices of different requests have different attributes": (
        claim(share("a"), share("b")),
        (distinct("numa"),),
        NUMA,
        {},
        [(0,), (1,)],
    ),
    "a constraint for a request concerns its alternatives": (
        claim(share("a/small"), share("b")),
        (distinct("index", "a", "b"),),
        [state(0), state(1)],
        {},
        [(0,), (1,)],
    ),
    "a text is not equal to a number": (claim(share("a")), (match("model"), match("index")), NUMA, {}, [(1,)]),
    "whole cards are different although the shares are not": (
        claim(whole_cards("a", 2), share("b", 2)),
        (),
        [state(0), state(1), state(2)],
        {},
        [(0, 1), (2, 2)],
    ),
    "whole cards are idle and different": (
        claim(whole_cards("a", 2), share("b")),
        (distinct("index"),),
        [state(0, 100, 1), state(1), state(2)],
        {},
        [(1, 2), (0,)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_place_claim_returns_the_best_cards(name: str) -> None:
    request, constraints, cards, excluded, expected = CASES[name]
    found = place_claim(request, constraints, cards, policy_named("binpack", 20), excluded)
    assert isinstance(found, Placement), str(found)
    assert found.proven
    assert [chosen for _, chosen in found.containers] == expected


def rejected(
    request: GpuRequest,
    cards: list[CardState],
    *constraints: AttributeConstraint,
    excluded: Mapping[str, Mapping[int, str]] | None = None,
) -> Rejection:
    found = place_claim(request, constraints, cards, policy_named("binpack", 20), excluded or {})
    assert isinstance(found, Rejection), str(found)
    return found


def test_card_excluded_by_a_selector_has_the_reason_in_the_rejection() -> None:
    found = rejected(claim(share()), [state(0), state(1, 900)], excluded={"gpu": {0: "model is A100"}})
    assert found.cards == (
        CardRefusal(0, RejectionKind.CONSTRAINT, "model is A100"),
        CardRefusal(1, RejectionKind.CORE, "core 20 percent short"),
    )
    assert not found.hopeless


def test_card_without_an_attribute_has_the_reason_in_the_rejection() -> None:
    found = rejected(claim(share()), NUMA[3:], match("numa"))
    assert str(found) == "1 card: 1 no attribute gpu.mgpu.io/numa"
    assert found.hopeless


def test_devices_that_do_not_agree_are_rejected_with_the_attribute() -> None:
    found = rejected(claim(share(cards=3)), NUMA, distinct("numa"))
    assert found.kind is RejectionKind.NOT_TOGETHER
    expected = "each of the 3 requested cards is available alone, but not all of them with different gpu.mgpu.io/numa"
    assert str(found) == expected
    assert found.hopeless


def test_repeated_card_is_refused_where_a_constraint_requires_different_ones() -> None:
    assert rejected(claim(share(cards=3)), [state(0), state(1)], distinct("uuid")).hopeless


def test_whole_cards_are_not_repeated() -> None:
    found = rejected(claim(whole_cards("gpu", 3)), [state(0), state(1)])
    assert found.kind is RejectionKind.NO_DEVICE
    assert found.hopeless


def test_shares_that_one_card_cannot_hold_do_not_fit_together() -> None:
    found = rejected(claim(share(cards=3, core=500)), [state(0)])
    assert str(found) == "each of the 3 requested cards is available alone, but not all of them together"
    assert found.hopeless


def test_claim_that_would_fit_on_empty_cards_is_not_hopeless() -> None:
    cards = [on_numa(state(0, 900), 0), on_numa(state(1), 1)]
    assert not rejected(claim(share("a"), share("b")), cards, distinct("numa")).hopeless


def test_card_of_the_spread_group_counts_once_for_several_results() -> None:
    """The policy prefers two cards, but one card of the group is better than two."""
    cards = [replace(state(i, 100, 1), groups=frozenset({SPREAD_GROUP})) for i in range(2)]
    wanted = claim(share("a"), share("b"), constraints=Constraints(spread=SPREAD_GROUP))
    excluded = {"a": {2: "no"}, "b": {3: "no"}}
    full = [state(2, 1000, 80), state(3, 1000, 80)]
    found = place_claim(wanted, (), cards + full, policy_named("spread", 20), excluded)
    assert indexes(found) == ((0,), (0,))


def test_policy_rates_the_cards_as_they_are_although_some_are_excluded() -> None:
    def scoring(states: Sequence[CardState], _weight: int) -> CardScore:
        assert all(state.card.healthy for state in states)
        return lambda position, core, memory: position  # noqa: ARG005

    cards = [state(0), state(1)]
    found = place_claim(claim(share()), (), cards, Policy(scoring, 20), {"gpu": {0: "model is not B"}})
    assert indexes(found) == ((1,),)


def test_claim_without_shares_needs_no_cards() -> None:
    assert place_claim(claim(), (), [], policy_named("binpack", 20), {}) == Placement(())


def test_node_without_cards_is_rejected() -> None:
    assert rejected(claim(share()), []).kind is RejectionKind.NO_DEVICE


def test_constraint_between_some_requests_is_proven_for_many_cards() -> None:
    """Each second card of 64 is on the other NUMA node, and the cards are used differently."""
    cards = [on_numa(state(i, 100 * (i % 5), i % 7), i % 4) for i in range(64)]
    wanted = claim(share("a", 2), share("b", 4, core=200), share("c", 2, gib=5))
    constraints = (match("numa", "a", "b"), distinct("index"))
    found = place_claim(wanted, constraints, cards, policy_named("binpack", 20), {}, limits=SHORT)
    assert isinstance(found, Placement)


def test_large_claim_is_placed_without_a_proof() -> None:
    """32 results on 64 used cards, of which each request excludes others."""
    cards = [on_numa(state(i, 100 * (i % 5), i % 11), i % 4) for i in range(64)]
    wanted = claim(*(share(f"r{i}", core=100 + 10 * i, gib=1 + i % 5) for i in range(32)))
    excluded = {f"r{i}": {i: "no", i + 1: "no"} for i in range(32)}
    found = place_claim(wanted, (distinct("uuid"),), cards, policy_named("spread", 20), excluded)
    assert isinstance(found, Placement)
    assert len({chosen for _, chosen in found.containers}) == 32
