"""`place` against exhaustive search."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import Amount, GpuRequest, Placement, Rejection, peak
from scheduler.engine import FULL, Limits, place, solver
from tests.builders import GIB
from tests.examples import examples
from tests.scheduler.engine.oracle import Chosen, exhaustive, feasible
from tests.scheduler.engine.strategies import named, policies, problems, whole_card_pods

Problem = tuple[GpuRequest, list[CardState]]


def chosen(found: Placement | Rejection, request: GpuRequest) -> Chosen | None:
    """The cards per container of the ask; None for a rejection."""
    if isinstance(found, Rejection):
        return None
    assert [name for name, _ in found.containers] == [c.container for c in request.containers]
    return tuple(cards for _, cards in found.containers)


# Small problems need no prices and no table of all states; these thresholds bring both into play.
WAYS = {
    "as it is": {},
    "with prices": {"_MAX_PLAIN": 0, "_ROW_STEPS": 10**6},
    "with a table": {"_MAX_PLAIN": 0, "_ROW_STEPS": 0, "_CELLS_PER_STEP": 10**9},
}


@pytest.mark.parametrize("way", WAYS)
@given(problem=problems(), policy=policies)
@examples(12)
def test_property_equals_exhaustive_search(way: str, problem: Problem, policy: tuple[str, int]) -> None:
    request, cards = problem
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(solver, name, value)
        found = place(request, cards, named(policy))
    assert chosen(found, request) == exhaustive(request, cards, *policy)
    assert isinstance(found, Rejection) or found.proven


@given(problems(), policies, st.randoms(use_true_random=False))
def test_property_shuffled_cards_get_the_same_placement(
    problem: Problem, policy: tuple[str, int], random: Random
) -> None:
    request, cards = problem
    shuffled = list(cards)
    random.shuffle(shuffled)
    assert place(request, shuffled, named(policy)) == place(request, cards, named(policy))


@given(problems(), policies, st.sampled_from([0, 1, 50, 500]))
def test_property_without_search_budget_place_fits_exactly_if_possible(
    problem: Problem, policy: tuple[str, int], budget: int
) -> None:
    request, cards = problem
    result = place(request, cards, named(policy), limits=Limits(budget, FULL.fallback))
    every = set(feasible(request, cards))
    assert chosen(result, request) in every if every else isinstance(result, Rejection)
    if isinstance(result, Placement) and result.proven:
        assert chosen(result, request) == exhaustive(request, cards, *policy)


@given(whole_card_pods(), policies, st.sampled_from([0, 500, FULL.search]))
def test_property_whole_cards_held_equal_those_that_a_quota_counts(
    request: GpuRequest, policy: tuple[str, int], budget: int
) -> None:
    """A pod with init containers under `spread` held a card for each of them, under a quota of one."""
    cards = [CardState(Card(i, f"GPU-{i}", "", 80 * GIB)) for i in range(8)]
    counted = peak((c.stage, Amount(shares=c.cards)) for c in request.containers).shares
    found = place(request, cards, named(policy), limits=Limits(budget, FULL.fallback))
    if counted > len(cards):
        assert isinstance(found, Rejection)
    else:
        assert isinstance(found, Placement)
        assert len({index for _, at in found.containers for index in at}) == counted
