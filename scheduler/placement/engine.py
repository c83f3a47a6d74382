"""`place`: the best cards of a node for a pod, or why there are none."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from mgpu.model.asks import Ask, ContainerAsk, Placement, Rejection
from mgpu.model.cards import CardState
from scheduler.placement.configurations import Kind, configurations, kinds_of
from scheduler.placement.first_fit import Undecided, configuration, first_fit
from scheduler.placement.policies import CardScore, Policy
from scheduler.placement.problem import Option
from scheduler.placement.refusals import emptied, impossible, not_together, unplaceable, without_proof
from scheduler.placement.search import search
from scheduler.placement.ties import lowest
from scheduler.placement.wishing import bars, crowded

DEFAULT_BUDGET = 1_000_000
"""Steps of the search, some tenths of a second. Eight containers on 16 cards take 1,000 to 150,000; what exceeds it
are, for example, 14 different small containers on 16 idle cards."""

_CONFIGURATION = 8  # steps that one configuration of one card takes to make

_index = attrgetter("card.index")


def place(
    ask: Ask, cards: Sequence[CardState], policy: Policy, *, budget: int = DEFAULT_BUDGET
) -> Placement | Rejection:
    """The best placement of `ask` on `cards`, all of the node's, in any order.

    Exact: of all placements that fit, the one on the fewest cards that others of its spread group hold, then with the
    highest sum of the policy's scores over all cards; of equal ones the one with the lowest card indexes, in the ask's
    order of containers. Where that takes more than `budget`
    steps, the best found, with `proven=False`. A Rejection that says "does not fit" is always proven; a search that
    had to end without an answer says just that.
    """
    cards = sorted(cards, key=_index)
    rejection = impossible(ask, cards)
    if rejection is not None:
        return rejection
    score, avoided = policy.scores(cards), crowded(ask, cards)
    open_ = _open(ask, cards)
    if len(ask.containers) == 1:
        chosen = _of_one(ask.containers[0], open_, ask.max_shares, score, avoided)
        if chosen is not None:
            return _placement(ask, cards, [chosen])
    rejection = unplaceable(ask, cards)
    if rejection is not None:
        return rejection
    try:
        if ask.wishes.same_card:
            found, proven = _on_one_card(ask, open_, score, avoided), True
        else:
            found, proven = _of_several(ask, open_, score, avoided, budget)
    except Undecided:
        return without_proof(ask)
    if found is not None:
        return _placement(ask, cards, found, proven=proven)
    if all(state.idle for state in cards):
        return not_together(ask, hopeless=True)
    when_empty = place(ask, emptied(cards), policy, budget=budget)
    return not_together(ask, hopeless=isinstance(when_empty, Rejection) and when_empty.hopeless)


def _placement(
    ask: Ask, cards: Sequence[CardState], found: Sequence[Sequence[int]], *, proven: bool = True
) -> Placement:
    rows = zip(ask.containers, found, strict=True)
    return Placement(tuple((c.container, tuple(cards[i].card.index for i in at)) for c, at in rows), proven)


def _open(ask: Ask, cards: Sequence[CardState]) -> Sequence[CardState]:
    """The same cards, those that are out (`bars`) as good as unhealthy. Policies see the true ones."""
    barred = bars(ask, cards)
    if not any(barred):
        return cards
    return [
        replace(state, card=replace(state.card, healthy=False)) if bar else state
        for state, bar in zip(cards, barred, strict=True)
    ]


def _of_one(
    container: ContainerAsk, cards: Sequence[CardState], max_shares: int, score: CardScore, avoided: Sequence[bool]
) -> Sequence[int] | None:
    """A single container: every card gains or loses by itself, so the best cards are the first of a sort."""
    losses: list[tuple[bool, int, int]] = []
    for i, state in enumerate(cards):
        usable = state.card.healthy and not (container.whole and state.shares)
        if not usable or (max_shares and state.shares >= max_shares):
            continue
        core, memory, _, ratio = container.takes(state.card)
        if core <= state.core_free and memory <= state.memory_free and ratio <= state.ratio_free:
            losses.append((avoided[i], score(i, 0, 0) - score(i, core, memory), i))
    if len(losses) < container.cards:
        return None
    if container.cards == 1:
        return (min(losses)[2],)
    return sorted(i for *_, i in sorted(losses)[: container.cards])


def _on_one_card(
    ask: Ask, cards: Sequence[CardState], score: CardScore, avoided: Sequence[bool]
) -> Sequence[Sequence[int]] | None:
    """All containers on one card, the best that has room for them together."""
    kinds = kinds_of(ask)
    losses: list[tuple[bool, int, int]] = []
    for i, state in enumerate(cards):
        all_of_them = configuration(kinds, tuple(len(kind.members) for kind in kinds), state)
        if state.card.healthy and all_of_them is not None and all_of_them.fits(state, ask.max_shares):
            loss = score(i, 0, 0) - score(i, all_of_them.need.core, all_of_them.need.memory)
            losses.append((avoided[i], loss, i))
    return [(min(losses)[2],)] * len(ask.containers) if losses else None


def _of_several(
    ask: Ask, cards: Sequence[CardState], score: CardScore, avoided: Sequence[bool], budget: int
) -> tuple[Sequence[Sequence[int]] | None, bool]:
    """The positions of each container's cards, None where it does not fit; and whether there is nothing better."""
    kinds = kinds_of(ask)
    options = _options(ask, kinds, cards, score, budget)
    if options is not None and any(avoided):
        options = _avoiding(options, avoided)
    if options is not None:
        order = _equal_together(options)
        steps, proven = search(kinds, [options[i] for i in order], budget)
        if steps:
            return lowest(kinds, order, steps), proven
        if proven:
            return None, True
    return first_fit(kinds, cards, ask.max_shares, score, avoided), False


def _options(
    ask: Ask, kinds: Sequence[Kind], cards: Sequence[CardState], score: CardScore, budget: int
) -> list[list[Option]] | None:
    """Per card what can be on it, and its worth. None: more than the budget allows."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for i, state in enumerate(cards):
        if state.card.healthy:
            sizes.setdefault((state.card.core, state.card.memory), []).append(i)
    options: list[list[Option]] = [[] for _ in cards]
    for positions in sizes.values():
        most = budget // (_CONFIGURATION * len(cards))
        possible = configurations(kinds, [cards[i] for i in positions], ask.max_shares, most)
        if possible is None:
            return None
        for i in positions:
            alone = score(i, 0, 0)
            options[i] = [
                (score(i, one.need.core, one.need.memory) - alone, one.code)
                for one in possible
                if one.fits(cards[i], ask.max_shares)
            ]
    return options


def _avoiding(options: Sequence[Sequence[Option]], avoided: Sequence[bool]) -> list[list[Option]]:
    """The same, where using one avoided card more is worse than anything that the policy can tell apart."""
    worths = [[worth for worth, _ in choice] or [0] for choice in options]
    much = 1 + sum(max(of_card) - min(of_card) for of_card in worths)
    return [
        [(worth - much if avoid and code else worth, code) for worth, code in choice]
        for choice, avoid in zip(options, avoided, strict=True)
    ]


def _equal_together(options: Sequence[Sequence[Option]]) -> list[int]:
    """The positions of the cards that can take anything, equal ones one after the other."""
    first: dict[tuple[Option, ...], int] = {}
    of = {i: first.setdefault(tuple(choice), i) for i, choice in enumerate(options) if len(choice) > 1}
    return sorted(of, key=lambda i: (of[i], i))
