"""`place`: the best cards of a node for a pod, or why there are none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from operator import attrgetter

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, Rejection
from scheduler.engine.card_constraints import cards_of_spread_group, exclusions
from scheduler.engine.card_policy import CardScore, Policy
from scheduler.engine.configurations import Configuration, Kind, configurations, kinds_of, largest_of
from scheduler.engine.effort import FULL, LEAST, SHORT, Budget, Effort, Exhausted, Limits
from scheduler.engine.first_fit import Packing, first_fit, together
from scheduler.engine.rejections import emptied, impossible, not_together, unplaceable, without_proof
from scheduler.engine.solver import EDGE, Option, any_path, lowest, solve

_CONFIGURATION = 8  # steps that one configuration of one card takes to make
_ALONE = 8  # steps to see whether a card can serve a container by itself
_OPTION = 8  # steps to see whether a configuration fits a card, and for its score

_index = attrgetter("card.index")


def place(
    request: GpuRequest,
    cards: Sequence[CardState],
    policy: Policy,
    *,
    limits: Limits = FULL,
    effort: Effort | None = None,
) -> Placement | Rejection:
    """The best placement of `ask` on `cards`, all of the node's, in any order.

    Exact: of all placements that fit, the one that holds least (`largest_of`: init containers reuse cards), then on the
    fewest cards that others of its spread group hold, then with the highest sum of the policy's scores over all cards;
    of equal ones the one with the lowest card indexes, in the ask's order of containers. Where that takes more steps
    than `limits` allows, the best found, with `proven=False`.

    A Rejection that says "does not fit" is always proven. A search that had to end without an answer says just that,
    with `proven=False`. What is found with some limits is found with all higher ones as well, but for the choice among
    placements. effort: counts the steps, and may end the work (`Effort`).
    """
    effort = effort or Effort()
    cards = sorted(cards, key=_index)
    rejection = impossible(request, cards)
    if rejection is not None:
        return rejection
    effort.spend(_ALONE * len(cards) * len(request.containers))
    score, avoided = policy.scores(cards), cards_of_spread_group(request, cards)
    open_ = _open(request, cards)
    if len(request.containers) == 1:
        chosen = _of_one(request.containers[0], open_, request.max_shares, score, avoided)
        if chosen is not None:
            return _placement(request, cards, [chosen])
    rejection = unplaceable(request, cards)
    if rejection is not None:
        return rejection
    try:
        if request.constraints.same_card:
            found, proven = _on_one_card(request, open_, score, avoided, effort), True
        else:
            found, proven = _Several(request, open_, policy, score, avoided, effort).place(limits)
    except Exhausted:
        return without_proof(request)
    if found is not None:
        return _placement(request, cards, found, proven=proven)
    if all(state.idle for state in cards):
        return not_together(request, hopeless=True)
    less = Limits(min(limits.search, SHORT.search), min(limits.fallback, SHORT.fallback))
    when_empty = place(request, emptied(cards), policy, limits=less, effort=effort)
    return not_together(request, hopeless=isinstance(when_empty, Rejection) and when_empty.hopeless)


def _placement(
    request: GpuRequest, cards: Sequence[CardState], found: Sequence[Sequence[int]], *, proven: bool = True
) -> Placement:
    rows = zip(request.containers, found, strict=True)
    return Placement(tuple((c.container, tuple(cards[i].card.index for i in at)) for c, at in rows), proven)


def _open(request: GpuRequest, cards: Sequence[CardState]) -> Sequence[CardState]:
    """Return the cards with the excluded ones (`exclusions`) marked unhealthy. Policies see the true ones."""
    excluded = exclusions(request, cards)
    if not any(excluded):
        return cards
    return [
        replace(state, card=replace(state.card, healthy=False)) if exclusion else state
        for state, exclusion in zip(cards, excluded, strict=True)
    ]


def _of_one(
    container: ContainerRequest, cards: Sequence[CardState], max_shares: int, score: CardScore, avoided: Sequence[bool]
) -> Sequence[int] | None:
    """A single container: every card gains or loses by itself, so the best cards are the first of a sort."""
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
    return sorted(i for *_, i in sorted(losses)[: container.cards])


def _on_one_card(
    request: GpuRequest, cards: Sequence[CardState], score: CardScore, avoided: Sequence[bool], effort: Effort
) -> Sequence[Sequence[int]] | None:
    """All containers on one card, the best that has room for them together."""
    kinds = kinds_of(request)
    losses: list[tuple[bool, int, int]] = []
    for i, state in enumerate(cards):
        effort.spend(_ALONE * len(request.containers))
        all_of_them = together(kinds, state)
        if state.card.healthy and all_of_them is not None and all_of_them.fits(state, request.max_shares):
            loss = score(i, 0, 0) - score(i, all_of_them.need.core, all_of_them.need.memory)
            losses.append((avoided[i], loss, i))
    return [(min(losses)[2],)] * len(request.containers) if losses else None


@dataclass(frozen=True, slots=True)
class _Several:
    """Several containers, which may be on several cards: one call of `place`."""

    request: GpuRequest
    cards: Sequence[CardState]
    policy: Policy
    score: CardScore
    avoided: Sequence[bool]
    effort: Effort

    def place(self, limits: Limits) -> tuple[Sequence[Sequence[int]] | None, bool]:
        """The positions of each container's cards, None where it does not fit; and whether there is nothing better.

        Raises Exhausted. Where a search with high limits finds nothing, one with lower limits still may, since its
        narrow search keeps other states: they are asked as well, so that higher limits never find less.
        """
        kinds, largest = kinds_of(self.request), largest_of(self.request, self.cards)
        lower = (min(limits.search, less.search) for less in (SHORT, LEAST))
        for steps in sorted({limits.search, *lower}, reverse=True):
            found, proven = self._search(kinds, largest, steps)
            if found is not None or proven:
                return found, proven
        fallback = Budget(self.effort, limits.fallback)
        packing = Packing(kinds, self.cards, self.request.max_shares, self.score, self.avoided, largest, fallback)
        return first_fit(packing), False

    def _search(
        self, kinds: tuple[Kind, ...], largest: Amount | None, steps: int
    ) -> tuple[Sequence[Sequence[int]] | None, bool]:
        budget = Budget(self.effort, steps)
        setup = budget.part(steps // 2)
        try:
            fitting = self._fitting(kinds, setup, steps // (_CONFIGURATION * len(self.cards)))
        except Exhausted:
            return None, False
        budget.give_back(setup)
        options = [self._worths(i, here) for i, here in enumerate(fitting)]
        if any(self.avoided):
            rows = zip(self.avoided, fitting, strict=True)
            options = _worse(options, [[int(avoid and one.code > 0) for one in here] for avoid, here in rows])
        if largest is not None:
            options = _worse(options, [[one.held(largest) for one in here] for here in fitting])
        order = _equal_together(options)
        searching = budget.part(budget.left * 7 // 8)
        edges, proven = solve(kinds, [options[i] for i in order], searching)
        if not edges:
            return None, proven
        budget.give_back(searching)
        try:
            return lowest(kinds, order, edges, budget), proven
        except Exhausted:
            path = any_path(edges)
            linear = Budget(self.effort, EDGE * len(path) * sum(k.units + len(k.members) for k in kinds))
            return lowest(kinds, order, path, linear), False

    def _fitting(self, kinds: Sequence[Kind], budget: Budget, most: int) -> list[list[Configuration]]:
        """Per card what can be on it. Raises Exhausted."""
        sizes: dict[tuple[int, int], list[int]] = {}
        for i, state in enumerate(self.cards):
            if state.card.healthy:
                sizes.setdefault((state.card.core, state.card.memory), []).append(i)
        fitting: list[list[Configuration]] = [[] for _ in self.cards]
        shares, amounts = self.request.max_shares, 0
        scored: set[tuple[int, int]] = set()
        for positions in sizes.values():
            possible = configurations(kinds, [self.cards[i] for i in positions], shares, most, budget)
            if self.policy.steps:
                scored.update((one.need.core, one.need.memory) for one in possible)
                budget.take((len(scored) - amounts) * self.policy.steps)
                amounts = len(scored)
            budget.take(_OPTION * len(possible) * len(positions))
            for i in positions:
                fitting[i] = [one for one in possible if one.fits(self.cards[i], shares)]
        return fitting

    def _worths(self, i: int, fitting: Sequence[Configuration]) -> list[Option]:
        alone = self.score(i, 0, 0)
        return [(self.score(i, one.need.core, one.need.memory) - alone, one.code) for one in fitting]


def _worse(options: Sequence[Sequence[Option]], by: Sequence[Sequence[int]]) -> list[list[Option]]:
    """The same, where one more of `by`, in steps of what is common to all, is worse than all worths can make up for."""
    worths = [[worth for worth, _ in choice] or [0] for choice in options]
    step = gcd(*(number for numbers in by for number in numbers)) or 1
    much = 1 + sum(max(of_card) - min(of_card) for of_card in worths)
    return [
        [(worth - much * (number // step), code) for (worth, code), number in zip(choice, numbers, strict=True)]
        for choice, numbers in zip(options, by, strict=True)
    ]


def _equal_together(options: Sequence[Sequence[Option]]) -> list[int]:
    """The positions of the cards that can take anything, equal ones one after the other."""
    first: dict[tuple[Option, ...], int] = {}
    of = {i: first.setdefault(tuple(choice), i) for i, choice in enumerate(options) if len(choice) > 1}
    return sorted(of, key=lambda i: (of[i], i))
