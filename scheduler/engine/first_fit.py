"""Any placement at all, for asks that are too large for the exact search.

Single passes come first: each puts one container after the other onto a card and never takes one back, so that a pass
costs containers × cards at most. Several orders are tried, since each of them fails on other pods. What they do not
solve a depth-first search tries until its budget is used up.

Whether a placement is found may depend on the policy, by whose score the first pass and the depth-first search prefer
cards. Callers that have to agree on whether a pod fits must ask with the same policy
(`scheduler/decisions/decider.py`).
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount
from mgpu.model.pods import Stage
from scheduler.engine.card_policy import CardScore
from scheduler.engine.configurations import Configuration, Kind, grow
from scheduler.engine.effort import Budget

_TRY = 8  # steps to look at one card for one container
_GROW = 8  # steps per container that is put together anew
_MOST_SEEN = 20_000  # states that are remembered, of some hundreds of bytes each

Chosen = tuple[int, ...]
"""The positions of the cards of one container."""

Prefer = Callable[[int, "Situation", "Situation"], tuple[int, ...]]
"""(position of a card, its situation now, and with the container on it) → what to sort cards by; the least is taken."""

_Turn = tuple[int, int]
"""(number of a kind, member)."""


class Situation:
    """What of the ask is on a card of some state: equal for equal cards with equal containers on them.

    held: numbers of kinds, ascending, which is their start order. after: by kind, what one container more makes of it;
    None: that does not fit. worth: by position of the card, since some policies tell equal cards apart.
    """

    __slots__ = ("after", "configuration", "held", "id", "state", "worth")

    def __init__(self, number: int, state: CardState, held: tuple[int, ...], configuration: Configuration) -> None:
        self.id = number
        self.state = state
        self.held = held
        self.configuration = configuration
        self.after: dict[int, Situation | None] = {}
        self.worth: dict[int, int] = {}


class Packing:
    """The cards of a node with the ask's containers on them, card by card."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        cards: Sequence[CardState],
        max_shares: int,
        score: CardScore,
        avoided: Sequence[bool],
        largest: Amount | None,
        budget: Budget,
    ) -> None:
        self.kinds, self.cards, self._max_shares = kinds, cards, max_shares
        self._score, self._avoided, self._largest, self.budget = score, avoided, largest, budget
        self._apps_only = all(kind.container.stage is Stage.APP for kind in kinds)
        self._known: dict[tuple[object, ...], Situation] = {}
        self.empty = tuple(self._situation(i, (), Configuration()) for i in range(len(cards)))

    def _situation(self, i: int, held: tuple[int, ...], configuration: Configuration) -> Situation:
        s = self.cards[i]
        free = (s.core_free, s.memory_free, s.ratio_free, s.shares)
        key = (s.card.healthy, self._avoided[i], s.card.core, s.card.memory, *free, held)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Situation(len(self._known), s, held, configuration)
        return found

    def with_one_more(self, i: int, now: Situation, k: int) -> Situation | None:
        """The card with a container of kind `k` on it too; None: it does not fit. Raises Exhausted."""
        self.budget.take(_TRY)
        if k not in now.after:
            now.after[k] = self._grown(i, now, k)
        return now.after[k]

    def _grown(self, i: int, now: Situation, k: int) -> Situation | None:
        state = self.cards[i]
        if not state.card.healthy:
            return None
        held = list(now.held)
        insort(held, k)
        # Containers that all start at the same time need the same in any order; others are put together anew.
        parts = [k] if self._apps_only else held
        self.budget.take(_GROW * len(parts) + len(held))
        configuration: Configuration | None = now.configuration if self._apps_only else Configuration()
        for part in parts:
            configuration = grow(configuration, self.kinds[part], state.card) if configuration else None
        if configuration is None or not configuration.fits(state, self._max_shares):
            return None
        return self._situation(i, tuple(held), configuration)

    def gain(self, i: int, now: Situation, after: Situation) -> tuple[int, ...]:
        """What the policy prefers: the card that gains most, those that are avoided last."""
        return self._avoided[i] and not now.held, self._worth(i, now) - self._worth(i, after)

    def _worth(self, i: int, situation: Situation) -> int:
        worth = situation.worth.get(i)
        if worth is None:
            self.budget.take(_GROW)
            need = situation.configuration.need
            worth = situation.worth[i] = self._score(i, need.core, need.memory)
        return worth

    def _held(self, situation: Situation) -> int:
        return 0 if self._largest is None else situation.configuration.held(self._largest)

    def able(self, situations: Sequence[Situation], k: int, prefer: Prefer) -> tuple[list[int], dict[int, Situation]]:
        """The cards that have room for one more container of kind `k`: those of which the pod then holds least more
        come first, and of these the preferred ones.
        """
        ranked: list[tuple[tuple[int, ...], int]] = []
        grown: dict[int, Situation] = {}
        for i, now in enumerate(situations):
            after = self.with_one_more(i, now, k)
            if after is not None:
                ranked.append(((self._held(after) - self._held(now), *prefer(i, now, after)), i))
                grown[i] = after
        return [i for _, i in sorted(ranked)], grown


def first_fit(packing: Packing) -> list[Chosen] | None:
    """Per container of the ask the positions of its cards; None: no placement exists. Raises Exhausted.

    Exhausted says nothing about whether there is a placement.
    """
    kinds, cards = packing.kinds, packing.cards
    packing.budget.take(8 * len(kinds) + 4 * sum(kind.units for kind in kinds))
    if _more_than_is_free(kinds, cards):
        return None
    hardest, by_memory, by_core = _orders(kinds, cards)
    for order, prefer in (
        (by_memory, packing.gain),
        (hardest, _tightest),
        (by_memory, _tightest),
        (by_core, _tightest),
        (hardest, _emptiest),
    ):
        path = _pass(packing, order, prefer)
        if path is not None:
            return _by_member(order, path)
    path = _depth_first(packing, by_memory, packing.gain)
    return None if path is None else _by_member(by_memory, path)


def _pass(packing: Packing, order: Sequence[_Turn], prefer: Prefer) -> list[Chosen] | None:
    """One container after the other on the cards that are preferred then; None: this way one finds no room."""
    situations = list(packing.empty)
    path: list[Chosen] = []
    for k, _ in order:
        wanted = packing.kinds[k].container.cards
        ranked, grown = packing.able(situations, k, prefer)
        if len(ranked) < wanted:
            return None
        for i in ranked[:wanted]:
            situations[i] = grown[i]
        path.append(tuple(sorted(ranked[:wanted])))
    return path


def _depth_first(packing: Packing, order: Sequence[_Turn], prefer: Prefer) -> list[Chosen] | None:
    """The hardest containers first, each on the preferred cards first; what has failed once is not tried again."""
    situations = packing.empty
    seen: set[tuple[int, ...]] = set()
    path: list[Chosen] = []
    trials: list[Iterator[tuple[Chosen, tuple[Situation, ...]]]] = []
    while len(path) < len(order):
        if len(trials) == len(path):
            trials.append(_steps(packing, order[len(path)][0], situations, prefer))
        step = next(trials[-1], None)
        if step is None:
            trials.pop()
            if not trials:
                return None
            path.pop()
            continue
        chosen, after = step
        # Equal cards are one: their situations have the same number.
        state = (len(path), *sorted(situation.id for situation in after))
        packing.budget.take(len(after))
        if state not in seen:
            if len(seen) < _MOST_SEEN:
                seen.add(state)
            path.append(chosen)
            situations = after
    return path


def _steps(
    packing: Packing, k: int, situations: tuple[Situation, ...], prefer: Prefer
) -> Iterator[tuple[Chosen, tuple[Situation, ...]]]:
    """All ways to place one more container of kind `k`, the preferred cards first."""
    ranked, grown = packing.able(situations, k, prefer)
    for chosen in combinations(ranked, packing.kinds[k].container.cards):
        packing.budget.take(2 * len(situations))
        yield tuple(sorted(chosen)), tuple(grown[i] if i in chosen else now for i, now in enumerate(situations))


def _by_member(order: Sequence[_Turn], path: Sequence[Chosen]) -> list[Chosen]:
    return [chosen for _, chosen in sorted((member, chosen) for (_, member), chosen in zip(order, path, strict=True))]


def _orders(kinds: Sequence[Kind], cards: Sequence[CardState]) -> tuple[list[_Turn], list[_Turn], list[_Turn]]:
    """The hardest containers first: by the larger part of a card that they take, by memory, by core."""
    core, memory = (max(1, *sizes) for sizes in zip(*((s.card.core, s.card.memory) for s in cards), strict=True))

    def turns(size: Callable[[Kind], int]) -> list[_Turn]:
        keyed = [(-k.container.whole, -k.container.cards * (1 + size(k)), number) for number, k in enumerate(kinds)]
        return [(number, member) for *_, number in sorted(keyed) for member in kinds[number].members]

    return (
        turns(lambda kind: max(kind.container.core * memory, _memory(kind, cards) * core)),
        turns(lambda kind: _memory(kind, cards)),
        turns(lambda kind: kind.container.core),
    )


def _left(after: Situation) -> int:
    """How much of the card is left of what there is less of, in millionths."""
    need, state = after.configuration.need, after.state
    core = (state.core_free - need.core) * 1_000_000 // max(1, state.card.core)
    memory = (state.memory_free - need.memory) * 1_000_000 // max(1, state.card.memory)
    return core + memory


def _tightest(_i: int, _now: Situation, after: Situation) -> tuple[int, ...]:
    return (_left(after),)


def _emptiest(_i: int, _now: Situation, after: Situation) -> tuple[int, ...]:
    return (-_left(after),)


def _memory(kind: Kind, cards: Sequence[CardState]) -> int:
    """What a container takes of a card, for a comparison: what is asked for in percent is of the first card."""
    return kind.container.memory or (kind.container.ratio or 0) * cards[0].card.memory // 100


def _more_than_is_free(kinds: Sequence[Kind], cards: Sequence[CardState]) -> bool:
    """Whether what runs at the same time is too much for all cards together, by amount or by number.

    By number: no card holds more containers than it holds of the smallest.
    """
    running = [kind for kind in kinds if kind.container.stage is not Stage.INIT]
    healthy = [state for state in cards if state.card.healthy]
    for sizes, free in (
        ([k.container.core for k in running for _ in range(k.units)], [s.core_free for s in healthy]),
        ([k.container.memory for k in running for _ in range(k.units)], [s.memory_free for s in healthy]),
        ([k.container.ratio or 0 for k in running for _ in range(k.units)], [s.ratio_free for s in healthy]),
    ):
        smallest = list(accumulate(sorted(sizes)))
        if sum(sizes) > sum(free) or sum(bisect_right(smallest, room) for room in free) < len(sizes):
            return True
    return False


def together(kinds: Sequence[Kind], state: CardState) -> Configuration | None:
    """What all these containers need of one card together; None: two of them exclude each other."""
    found: Configuration | None = Configuration()
    for kind in kinds:
        for _ in kind.members:
            found = grow(found, kind, state.card) if found else None
    return found
