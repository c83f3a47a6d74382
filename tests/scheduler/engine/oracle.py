"""Exhaustive search, written from the specification and nothing else.

Source: docs/design/mgpu.md, "Allocate"; docs/design/design.md, "Placement".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import ceil

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, peak
from mgpu.model.pods import Stage
from scheduler.engine import POLICIES

Chosen = tuple[tuple[int, ...], ...]


def exhaustive(request: GpuRequest, cards: Sequence[CardState], policy: str, weight: int) -> Chosen | None:
    """The card indexes per container of the best placement, the lexicographically first of equals; None: no fit."""
    card_of = {state.card.index: state for state in cards}
    cost = cost_of(request, cards, policy, weight)
    worth = cache(lambda index, here: cost(here, card_of[index]))
    ranked = (
        (held(request, chosen, cards), sum(worth(i, on(chosen, i)) for i in card_of), chosen)
        for chosen in feasible(request, cards)
    )
    best = min(ranked, default=None)
    return best[-1] if best else None


def held(request: GpuRequest, chosen: Chosen, cards: Sequence[CardState]) -> int:
    """Return what the pod holds of all cards, each at its busiest moment there: percent of the largest, rounded up.

    Zero without init containers beside others. A whole card counts as the largest, memory in percent as percent.
    """
    if len(request.containers) == 1 or all(c.stage is not Stage.INIT for c in request.containers):
        return 0
    core, memory = max(s.card.core for s in cards), max(s.card.memory for s in cards)
    total = 0
    for state in cards:
        here = [request.containers[i] for i in on(chosen, state.card.index)]
        taken = peak((c.stage, c.amount_on(state.card)) for c in here)
        of_memory = Fraction(taken.ratio) if taken.ratio else Fraction(100 * taken.memory, memory)
        total += 200 if any(c.whole for c in here) else ceil(Fraction(100 * taken.core, core) + of_memory)
    return total


def feasible(request: GpuRequest, cards: Sequence[CardState]) -> Iterator[Chosen]:
    """All placements. What does not fit with the first containers cannot fit with more of them."""
    card_of = {state.card.index: state for state in cards}
    holds = cache(lambda index, here: fits(request, here, card_of[index]))

    def extend(chosen: Chosen) -> Iterator[Chosen]:
        if len(chosen) == len(request.containers):
            yield chosen
            return
        for more in combinations(sorted(card_of), request.containers[len(chosen)].cards):
            longer = (*chosen, more)
            if all(holds(i, on(longer, i)) for i in more):
                yield from extend(longer)

    return extend(())


def on(chosen: Chosen, index: int) -> tuple[int, ...]:
    """The positions in the ask of the containers on a card."""
    return tuple(position for position, cards in enumerate(chosen) if index in cards)


def fits(request: GpuRequest, here: tuple[int, ...], state: CardState) -> bool:
    containers = [request.containers[i] for i in here]
    taken = peak((c.stage, c.amount_on(state.card)) for c in containers)
    whole_beside_another = any(
        first.stage is not Stage.INIT and (first.whole or then.whole)
        for i, then in enumerate(containers)
        for first in containers[:i]
    )
    return (
        state.card.healthy
        and not state.gpuid
        and taken.core <= state.core_free
        and taken.memory <= state.memory_free
        and taken.ratio <= state.ratio_free
        and (not request.max_shares or state.shares + taken.shares <= request.max_shares)
        and not (state.shares and any(c.whole for c in containers))
        and not whole_beside_another
    )


def free(request: GpuRequest, here: tuple[int, ...], state: CardState, weight: int) -> Fraction:
    """One card's part of mgpu.md's formula, times 100·n."""
    taken = peak((request.containers[i].stage, request.containers[i].amount_on(state.card)) for i in here)
    c = Fraction(state.core_free - taken.core, state.card.core)
    m = Fraction(state.memory_free - taken.memory, state.card.memory)
    return weight * c * c + (100 - weight) * m * m


def remaining(request: GpuRequest, here: tuple[int, ...], state: CardState) -> int:
    """The memory that is left free of a card that the pod uses (docs/design/gpushare.md, "Extender")."""
    taken = peak((request.containers[i].stage, request.containers[i].amount_on(state.card)) for i in here)
    return state.memory_free - taken.memory if taken.core or taken.memory else 0


Cost = Callable[[tuple[int, ...], CardState], Fraction | int]
"""(containers of the request on a card, the card) → what that costs; the least sum over the cards is best."""


def cost_of(request: GpuRequest, cards: Sequence[CardState], policy: str, weight: int) -> Cost:
    """Return the cost under a policy of the registry: as its specification says where COSTS has that, else as it rates
    cards itself, so that the search is checked for it all the same.
    """
    if policy in COSTS:
        return lambda here, state: COSTS[policy](request, here, state, weight)
    position = {state.card.index: i for i, state in enumerate(cards)}
    score = POLICIES[policy].scoring(cards, weight)

    def by_itself(here: tuple[int, ...], state: CardState) -> int:
        taken = peak((request.containers[i].stage, request.containers[i].amount_on(state.card)) for i in here)
        return -score(position[state.card.index], taken.core, taken.memory)

    return by_itself


COSTS: Mapping[str, Callable[[GpuRequest, tuple[int, ...], CardState, int], Fraction | int]] = {
    "binpack": lambda request, here, state, weight: -free(request, here, state, weight),
    "spread": free,
    "minor": lambda *_: 0,
    "bestfit": lambda request, here, state, _: remaining(request, here, state),
}
"""What a card costs with these containers of the request on it, written from each policy's specification."""
