"""Places a pod on the cards of a node: `place` returns the best placement, or why there is none.

Mainly `node_assessment` calls `place`. The result must depend only on the arguments, and a search with higher limits
must find a placement if one with lower limits does.

For a single container it suffices to sort the cards by how much the container lowers their scores, because the scores
of the cards are added up. The containers of a pod in a same-card group must be on one card, so the cards are tried one
by one. In all other cases the exact `solver` chooses a configuration, which says how many containers of each kind are
on the card, for each card. The worth of a configuration is the change of the card's score under the policy. Some
criteria come before the policy. They are subtracted from the worth as penalties, whose unit is larger than all
differences of worth together (`_penalize`), so one search decides everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from operator import attrgetter

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, Rejection
from scheduler.engine.card_constraints import cards_of_spread_group, exclusions
from scheduler.engine.card_policy import CardScore, Policy
from scheduler.engine.configurations import (
    Configuration,
    Kind,
    all_on_one_card,
    configurations,
    kinds_of,
    largest_of,
)
from scheduler.engine.effort import FULL, LEAST, SHORT, Budget, Effort, Exhausted, Limits
from scheduler.engine.first_fit import CardPositions, Packing, first_fit
from scheduler.engine.rejections import (
    empty_cards,
    impossible_request,
    not_together_rejection,
    unplaceable_container,
    unproven_rejection,
)
from scheduler.engine.solver import EDGE, Option, any_path, lowest, solve

_CONFIGURATION_STEPS = 8  # steps to create one configuration of one card
_CONTAINER_STEPS = 8  # steps to check whether a card can take a container alone
_OPTION_STEPS = 8  # steps to check whether a configuration fits a card, and to rate it


def place(
    request: GpuRequest,
    cards: Sequence[CardState],
    policy: Policy,
    *,
    limits: Limits = FULL,
    effort: Effort | None = None,
) -> Placement | Rejection:
    """Return the best placement of a request on the cards of a node, or why there is none.

    These criteria decide which placement is best, the first one first:

    1. The pod holds the least of the cards: init containers use the cards of other containers (`largest_of`).
    2. The pod uses the fewest cards on which other pods of its spread group are.
    3. The sum of the policy's scores over all cards of the node is highest.
    4. The card indexes are lowest, container by container in the order of the request.

    If the search takes more steps than `limits` allows, the placement may not be the best one; it then has
    `proven=False`. If the search ends before it is known whether the pod fits, the Rejection has `proven=False`. Every
    other Rejection is proven.

    Args:
        cards: All cards of the node, in any order.
        effort: Counts the steps. Its checkpoint may end the search by an exception.
    """
    effort = effort or Effort()
    cards = sorted(cards, key=attrgetter("card.index"))
    rejection = impossible_request(request, cards)
    if rejection is not None:
        return rejection
    effort.spend(_CONTAINER_STEPS * len(cards) * len(request.containers))
    score = policy.scores(cards)
    avoided = cards_of_spread_group(request, cards)
    usable = _without_excluded(request, cards)
    if len(request.containers) == 1:
        chosen = _place_one(request.containers[0], usable, request.max_shares, score, avoided)
        if chosen is not None:
            return _placement(request, cards, [chosen])
    rejection = unplaceable_container(request, cards)
    if rejection is not None:
        return rejection
    proven = True
    try:
        if request.constraints.same_card:
            found = _place_on_one_card(request, usable, score, avoided, effort)
        else:
            found, proven = _Search(request, usable, policy, score, avoided, effort).run(limits)
    except Exhausted:
        return unproven_rejection(request)
    if found is not None:
        return _placement(request, cards, found, proven=proven)
    if all(state.idle for state in cards):
        return not_together_rejection(request, hopeless=True)
    lower = Limits(min(limits.search, SHORT.search), min(limits.fallback, SHORT.fallback))
    when_empty = place(request, empty_cards(cards), policy, limits=lower, effort=effort)
    return not_together_rejection(request, hopeless=isinstance(when_empty, Rejection) and when_empty.hopeless)


def _placement(
    request: GpuRequest, cards: Sequence[CardState], chosen: Sequence[CardPositions], *, proven: bool = True
) -> Placement:
    rows = zip(request.containers, chosen, strict=True)
    return Placement(
        tuple((c.container, tuple(cards[i].card.index for i in positions)) for c, positions in rows), proven
    )


def _without_excluded(request: GpuRequest, cards: Sequence[CardState]) -> Sequence[CardState]:
    """Return the cards with the excluded ones (`exclusions`) marked unhealthy. Policies rate the original cards."""
    excluded = exclusions(request, cards)
    if not any(excluded):
        return cards
    return [
        replace(state, card=replace(state.card, healthy=False)) if exclusion else state
        for state, exclusion in zip(cards, excluded, strict=True)
    ]


def _place_one(
    container: ContainerRequest, cards: Sequence[CardState], max_shares: int, score: CardScore, avoided: Sequence[bool]
) -> CardPositions | None:
    """Return the best cards for a single container, or None if too few fit.

    Cards without a pod of the spread group come first, then those whose score decreases least.
    """
    losses: list[tuple[bool, int, int]] = []
    for i, state in enumerate(cards):
        usable = state.card.healthy and not (container.whole and state.shares)
        if not usable or (max_shares and state.shares >= max_shares):
            continue
        core, memory, _, ratio = container.amount_on(state.card)
        if core <= state.core_free and memory <= state.memory_free and ratio <= state.ratio_free:
            losses.append((avoided[i], score(i, 0, 0) - score(i, core, memory), i))
    if len(losses) < container.cards:
        return None
    if container.cards == 1:
        return (min(losses)[2],)
    return tuple(sorted(i for *_, i in sorted(losses)[: container.cards]))


def _place_on_one_card(
    request: GpuRequest, cards: Sequence[CardState], score: CardScore, avoided: Sequence[bool], effort: Effort
) -> Sequence[CardPositions] | None:
    """Return the best card on which all containers fit together, once for each container; None if there is none."""
    kinds = kinds_of(request)
    losses: list[tuple[bool, int, int]] = []
    for i, state in enumerate(cards):
        effort.spend(_CONTAINER_STEPS * len(request.containers))
        together = all_on_one_card(kinds, state.card)
        if state.card.healthy and together is not None and together.fits(state, request.max_shares):
            loss = score(i, 0, 0) - score(i, together.need.core, together.need.memory)
            losses.append((avoided[i], loss, i))
    return [(min(losses)[2],)] * len(request.containers) if losses else None


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for a placement of several containers, which may be on several cards."""

    request: GpuRequest
    cards: Sequence[CardState]
    policy: Policy
    score: CardScore
    avoided: Sequence[bool]
    effort: Effort

    def run(self, limits: Limits) -> tuple[Sequence[CardPositions] | None, bool]:
        """Return the positions of each container's cards, and whether they are proven to be the best ones.

        The positions are None if the containers do not fit. Raises Exhausted if it is not known whether they fit. The
        narrow search of `solver` keeps other states under lower limits, and may find a placement that it does not find
        under higher ones. So lower limits are tried too.
        """
        kinds, largest = kinds_of(self.request), largest_of(self.request, self.cards)
        lower = (min(limits.search, less.search) for less in (SHORT, LEAST))
        for steps in sorted({limits.search, *lower}, reverse=True):
            found, proven = self._solve(kinds, largest, steps)
            if found is not None or proven:
                return found, proven
        fallback = Budget(self.effort, limits.fallback)
        packing = Packing(kinds, self.cards, self.request.max_shares, self.score, self.avoided, largest, fallback)
        return first_fit(packing), False

    def _solve(
        self, kinds: tuple[Kind, ...], largest: Amount | None, steps: int
    ) -> tuple[Sequence[CardPositions] | None, bool]:
        budget = Budget(self.effort, steps)
        setup = budget.part(steps // 2)
        try:
            fitting = self._fitting(kinds, setup, steps // (_CONFIGURATION_STEPS * len(self.cards)))
        except Exhausted:
            return None, False
        budget.give_back(setup)
        options = [self._rate(i, of_card) for i, of_card in enumerate(fitting)]
        if any(self.avoided):
            rows = zip(self.avoided, fitting, strict=True)
            options = _penalize(options, [[int(avoid and one.code > 0) for one in of_card] for avoid, of_card in rows])
        if largest is not None:
            options = _penalize(options, [[one.held(largest) for one in of_card] for of_card in fitting])
        order = _equal_cards_together(options)
        search = budget.part(budget.left * 7 // 8)
        edges, proven = solve(kinds, [options[i] for i in order], search)
        if not edges:
            return None, proven
        budget.give_back(search)
        try:
            return lowest(kinds, order, edges, budget), proven
        except Exhausted:
            path = any_path(edges)
            linear = Budget(self.effort, EDGE * len(path) * sum(k.units + len(k.members) for k in kinds))
            return lowest(kinds, order, path, linear), False

    def _fitting(self, kinds: Sequence[Kind], budget: Budget, limit: int) -> list[list[Configuration]]:
        """Return the configurations that fit each card. Raises Exhausted if the budget or `limit` does not suffice."""
        positions_by_size: dict[tuple[int, int], list[int]] = {}
        for i, state in enumerate(self.cards):
            if state.card.healthy:
                positions_by_size.setdefault((state.card.core, state.card.memory), []).append(i)
        fitting: list[list[Configuration]] = [[] for _ in self.cards]
        max_shares, charged = self.request.max_shares, 0
        amounts: set[tuple[int, int]] = set()
        for positions in positions_by_size.values():
            possible = configurations(kinds, [self.cards[i] for i in positions], max_shares, limit, budget)
            if self.policy.steps:
                amounts.update((one.need.core, one.need.memory) for one in possible)
                budget.take((len(amounts) - charged) * self.policy.steps)
                charged = len(amounts)
            budget.take(_OPTION_STEPS * len(possible) * len(positions))
            for i in positions:
                fitting[i] = [one for one in possible if one.fits(self.cards[i], max_shares)]
        return fitting

    def _rate(self, i: int, fitting: Sequence[Configuration]) -> list[Option]:
        alone = self.score(i, 0, 0)
        return [(self.score(i, one.need.core, one.need.memory) - alone, one.code) for one in fitting]


def _penalize(options: Sequence[Sequence[Option]], penalties: Sequence[Sequence[int]]) -> list[list[Option]]:
    """Return the options with their penalties subtracted, so that a smaller sum of penalties beats any sum of worth.

    The unit of a penalty is larger than all differences of worth together. To keep the numbers small, the penalties are
    divided by their greatest common divisor first.
    """
    values = [[worth for worth, _ in of_card] or [0] for of_card in options]
    divisor = gcd(*(penalty for of_card in penalties for penalty in of_card)) or 1
    unit = 1 + sum(max(of_card) - min(of_card) for of_card in values)
    return [
        [(worth - unit * (penalty // divisor), code) for (worth, code), penalty in zip(of_card, row, strict=True)]
        for of_card, row in zip(options, penalties, strict=True)
    ]


def _equal_cards_together(options: Sequence[Sequence[Option]]) -> list[int]:
    """Return the positions of the cards that can take at least one container, with equal cards side by side."""
    first: dict[tuple[Option, ...], int] = {}
    group = {i: first.setdefault(tuple(of_card), i) for i, of_card in enumerate(options) if len(of_card) > 1}
    return sorted(group, key=lambda i: (group[i], i))
