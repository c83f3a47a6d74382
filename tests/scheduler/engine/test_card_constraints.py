"""`place` with wishes against exhaustive search, and what its rejections say."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import Group, GroupCard
from mgpu.model.pod_constraints import Constraints
from scheduler.engine import FULL, Limits, place, policy_named
from scheduler.engine.card_constraints import same_card_group_rejection, score_on_fresh_cards, spread_group_score
from tests.builders import GIB, card, state
from tests.examples import examples
from tests.scheduler.engine.oracle import Chosen, cost_of, feasible, held, on
from tests.scheduler.engine.strategies import named, policies, problems

APART = Group("spread-group", "default", "web")
TOGETHER = Group("same-card-group", "default", "pair")
OTHER = Group("spread-group", "other", "web")
MODELS = ["NVIDIA A100-SXM4-80GB", "A100-PCIE", "T4"]
group_sets = st.frozensets(st.sampled_from([APART, TOGETHER, OTHER]))
names = st.lists(st.sampled_from(["A100", "a100-pcie", "T4"]), max_size=2).map(tuple)


@st.composite
def wishful(draw: st.DrawFn) -> tuple[GpuRequest, list[CardState]]:
    """The problems of strategies.py, with wishes, models, and groups on the cards that are in use."""
    request, cards = draw(problems())
    known = [
        replace(
            s,
            card=replace(s.card, model=draw(st.sampled_from(MODELS))),
            groups=draw(group_sets) if s.shares else frozenset(),
        )
        for s in cards
    ]
    uuids = draw(st.just(()) | st.lists(st.sampled_from([s.card.uuid for s in cards]), min_size=1).map(tuple))
    same_card = draw(st.sampled_from([None, None, TOGETHER]))
    if same_card:
        request = replace(request, containers=tuple(replace(c, cards=1) for c in request.containers))
    spread = draw(st.sampled_from([None, APART, APART]))
    return replace(request, constraints=Constraints("", draw(names), draw(names), uuids, spread, same_card)), known


def allowed(request: GpuRequest, cards: Sequence[CardState]) -> Iterator[Chosen]:
    """All placements that keep to the wishes, from their definitions."""
    constraints = request.constraints
    holding = {s.card.index for s in cards if TOGETHER in s.groups}
    may = {
        s.card.index
        for s in cards
        if constraints.allows_model(s.card.model) and (not constraints.uuids or s.card.uuid in constraints.uuids)
    }
    for chosen in feasible(request, cards):
        taken = {index for of_one in chosen for index in of_one}
        if taken <= may and not (constraints.same_card and (len(taken) > 1 or (holding and not taken <= holding))):
            yield chosen


def best(request: GpuRequest, cards: Sequence[CardState], policy: str, weight: int) -> Chosen | None:
    card_of = {s.card.index: s for s in cards}
    cost = cost_of(request, cards, policy, weight)
    worth = cache(lambda index, here: cost(here, card_of[index]))
    crowded = {s.card.index for s in cards if request.constraints.spread in s.groups}
    ranked = (
        (
            0 if request.constraints.same_card else held(request, chosen, cards),
            sum(any(i in of_one for of_one in chosen) for i in crowded),
            sum(worth(i, on(chosen, i)) for i in card_of),
            chosen,
        )
        for chosen in allowed(request, cards)
    )
    found = min(ranked, default=None)
    return found[-1] if found else None


def chosen(found: Placement | Rejection) -> Chosen | None:
    return None if isinstance(found, Rejection) else tuple(cards for _, cards in found.containers)


@given(wishful(), policies)
@examples(24)
def test_property_equals_exhaustive_search(
    problem: tuple[GpuRequest, list[CardState]], policy: tuple[str, int]
) -> None:
    request, cards = problem
    assert chosen(place(request, cards, named(policy))) == best(request, cards, *policy)


@given(wishful(), policies, st.sampled_from([0, 1, 50]))
@examples(12)
def test_property_without_search_budget_constraints_hold(
    problem: tuple[GpuRequest, list[CardState]], policy: tuple[str, int], budget: int
) -> None:
    request, cards = problem
    found = chosen(place(request, cards, named(policy), limits=Limits(budget, FULL.fallback)))
    every = set(allowed(request, cards))
    assert found in every if every else found is None


@given(wishful(), policies)
@examples(12)
def test_property_hopeless_rejection_is_what_no_eviction_changes(
    problem: tuple[GpuRequest, list[CardState]], policy: tuple[str, int]
) -> None:
    request, cards = problem
    found = place(request, cards, named(policy))
    assume(isinstance(found, Rejection))
    assert isinstance(found, Rejection)
    empty = [CardState(s.card, groups=s.groups, gpuid=s.gpuid) for s in cards]
    fits_when_empty = any(allowed(request, empty))
    assert not (found.hopeless and fits_when_empty)
    assert found.hopeless or fits_when_empty or len(request.containers) > 1


def one(core: int = 300, **constraints: object) -> GpuRequest:
    return GpuRequest("mgpu", (ContainerRequest("c", 1, core, 10 * GIB),), 16, constraints=Constraints(**constraints))  # type: ignore[arg-type]


def of(model: str, index: int = 0, groups: tuple[Group, ...] = (), core: int = 0) -> CardState:
    known = state(index, core)
    return replace(known, card=replace(known.card, model=model), groups=frozenset(groups))


REASONS = {
    "a model that is not there": (
        one(models=("H100",)),
        [of("T4"), of("T4", 1), of("A100", 2)],
        "3 cards: 2 model T4 not among card-models, 1 model A100 not among card-models",
        True,
    ),
    "a model whose cards are full": (
        one(models=("H100",)),
        [of("T4"), of("H100", 1, core=900)],
        "2 cards: 1 core 20 percent short, 1 model T4 not among card-models",
        False,
    ),
    "an excluded model": (
        one(excluded_models=("T4",)),
        [of("T4")],
        "1 card: 1 model T4 excluded by exclude-card-models",
        True,
    ),
    "a card of another name": (one(uuids=("GPU-x",)), [of("T4")], "1 card: 1 not among card-uuids", True),
    "a card that has the group, and is full": (
        one(same_card=TOGETHER),
        [of("T4"), of("T4", 1, (TOGETHER,), core=900)],
        "2 cards: 1 core 20 percent short, 1 same-card-group pair is on another card",
        False,
    ),
    "containers that fit no card together": (
        GpuRequest(
            "mgpu",
            (ContainerRequest("a", 1, 600), ContainerRequest("b", 1, 600)),
            constraints=Constraints(same_card=TOGETHER),
        ),
        [of("T4"), of("T4", 1)],
        "each of the 2 GPU containers fits alone, but not all of them on one card, as same-card-group pair requires",
        True,
    ),
    "more cards than the one": (
        GpuRequest("mgpu", (ContainerRequest("a", 2, 600),), constraints=Constraints(same_card=TOGETHER)),
        [of("T4"), of("T4", 1)],
        "container 'a' requests 2 cards, but the pods of same-card-group pair share one card",
        True,
    ),
}


KINDS = {
    "a model whose cards are full": RejectionKind.CORE,
    "a card that has the group, and is full": RejectionKind.CORE,
    "containers that fit no card together": RejectionKind.NOT_TOGETHER,
}


@pytest.mark.parametrize("name", REASONS)
def test_rejection_names_the_constraint(name: str) -> None:
    request, cards, reason, hopeless = REASONS[name]
    found = place(request, cards, policy_named("binpack", 20))
    assert isinstance(found, Rejection)
    assert (str(found), found.hopeless) == (reason, hopeless)
    assert found.kind is KINDS.get(name, RejectionKind.CONSTRAINT)


def test_same_card_group_on_another_node_rejects() -> None:
    request, here = one(same_card=TOGETHER), [CardState(card(0))]
    assert same_card_group_rejection(request, here, ()) is None
    assert same_card_group_rejection(one(), here, (GroupCard("n2", "3"),)) is None
    found = same_card_group_rejection(request, here, (GroupCard("n2", "3"), GroupCard("n3", "")))
    assert str(found) == "same-card-group pair is on card 3 of n2 and an unknown card of n3"
    assert same_card_group_rejection(request, [of("T4", 0, (TOGETHER,))], (GroupCard("n1", "0"),)) is None


@given(st.integers(0, 10), st.integers(0, 10))
def test_property_nodes_without_pods_of_spread_group_score_highest(first: int, second: int) -> None:
    request, cards = one(spread=APART), [of("T4", 0, (APART,)), of("T4", 1)]
    crowded = spread_group_score(first, request, Placement((("c", (0,)),)), cards)
    free_of_it = spread_group_score(second, request, Placement((("c", (1,)),)), cards)
    assert 0 <= crowded < free_of_it == score_on_fresh_cards(second) <= 10
    assert spread_group_score(first, one(), Placement((("c", (0,)),)), cards) == first
    assert score_on_fresh_cards(max(first, second)) >= score_on_fresh_cards(min(first, second))
