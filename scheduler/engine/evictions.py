"""Which pods to evict from a node so that a pod fits on its cards: as few and as unimportant as possible."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le, sub
from typing import NamedTuple

from mgpu.model.cards import WHOLE_RATIO, CardState
from mgpu.model.gpu_requests import Amount, GpuRequest
from scheduler.engine.card_constraints import exclusions
from scheduler.engine.configurations import Configuration, configurations, kinds_of
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.solver import lowest, solve

_SEARCH = 100_000  # steps of one search over the cards
_WAY = 8  # steps for one pod and one way to free a part of a card
_COMPARED = 2  # steps to compare two ways
_CONFIGURATIONS = 500  # per card size
_LABELS = 2_000  # ways to free a part of one card, of which none is better than another in all respects
_CROWDED = 64

_Need = Amount
"""What of a card is still to be freed."""


class _Evicted(NamedTuple):
    """The pods that go, and what they cost: in a relaxed solution only the parts that were paid."""

    cost: int
    uids: frozenset[str]


class CheapestEvictions:
    """One node and ask. uses: what each pod that may go holds, by card index. costs: of its going, all positive.

    budget: for all searches together. Raises Exhausted.
    """

    def __init__(
        self,
        request: GpuRequest,
        cards: Sequence[CardState],
        uses: Mapping[str, Mapping[int, Amount]],
        costs: Mapping[str, int],
        budget: Budget,
    ) -> None:
        self._ask, self._cards, self._uses, self._costs, self._budget = request, cards, uses, costs, budget
        self._kinds = kinds_of(request)
        self._on = [frozenset(uid for uid in costs if state.card.index in uses[uid]) for state in cards]
        self._possible = self._configurations()
        self._known: dict[tuple[int, frozenset[str], frozenset[str]], dict[int, _Evicted]] = {}

    def least(self) -> tuple[set[str], bool]:
        """The pods whose going makes room at the least cost, and whether that is proven; none where none would do.

        Raises Exhausted.
        """
        best: _Evicted | None = None
        open_: list[tuple[frozenset[str], frozenset[str]]] = [(frozenset(), frozenset())]
        while open_:
            goes, stays = open_.pop()
            try:
                relaxed = self._relaxed(goes, stays)
            except Exhausted:
                if best is None:
                    raise
                return set(best.uids), False
            paid = sum(self._costs[uid] for uid in goes)
            if relaxed is None or (best is not None and paid + relaxed.cost >= best.cost):
                continue
            uids = goes | relaxed.uids
            found = _Evicted(sum(self._costs[uid] for uid in uids), uids)
            if best is None or found.cost < best.cost:
                best = found
            if found.cost > paid + relaxed.cost:
                shared = max((uid for uid in relaxed.uids if len(self._uses[uid]) > 1), key=self._by_cost)
                open_ += [(goes, stays | {shared}), (goes | {shared}, stays)]
        return set(best.uids if best else ()), True

    def _by_cost(self, uid: str) -> tuple[int, str]:
        return self._costs[uid], uid

    def _relaxed(self, goes: frozenset[str], stays: frozenset[str]) -> _Evicted | None:
        """The least that has to be paid where each card pays its part; None: no set would do. Raises Exhausted."""
        cards = [self._card(i, goes & self._on[i], stays & self._on[i]) for i in range(len(self._cards))]
        options = [[(-going.cost, code) for code, going in card.items()] for card in cards]
        order = sorted((i for i, choice in enumerate(options) if len(choice) > 1), key=lambda i: (options[i], i))
        if not order:
            return None
        part = self._budget.part(_SEARCH)
        steps, proven = solve(self._kinds, [options[i] for i in order], part)
        self._budget.give_back(part)
        if not proven:
            raise Exhausted
        if not steps:
            return None
        codes = [0] * len(cards)
        rows = lowest(self._kinds, order, steps, self._budget)
        for kind in self._kinds:
            for i in (i for member in kind.members for i in rows[member]):
                codes[i] += 1 << kind.shift
        chosen = [card[code] for card, code in zip(cards, codes, strict=True) if code]
        return _Evicted(sum(c.cost for c in chosen), frozenset(uid for c in chosen for uid in c.uids))

    def _card(self, i: int, goes: frozenset[str], stays: frozenset[str]) -> dict[int, _Evicted]:
        """What can be on a card, by code, and who goes for it; goes, stays: those of its pods that are decided."""
        known = self._known.get((i, goes, stays))
        if known is None:
            state, index = self._cards[i], self._cards[i].card.index
            state = without_usage(state, [self._uses[uid] for uid in goes])
            open_ = self._on[i] - goes - stays
            emptied = without_usage(state, [self._uses[uid] for uid in open_])
            pods = [(self._part(uid, index), self._uses[uid][index], uid) for uid in open_]
            shares = self._ask.max_shares
            known = self._known[i, goes, stays] = {
                one.code: _cover(_need(state, one, shares), pods, self._budget)
                for one in self._possible[i]
                if one.fits(emptied, shares)
            }
        return known

    def _configurations(self) -> list[list[Configuration]]:
        """Per card what could be on it if all went that may. Raises Exhausted."""
        emptied = [without_usage(state, list(self._uses.values())) for state in self._cards]
        sizes: dict[tuple[int, int], list[int]] = {}
        for i, (state, exclusion) in enumerate(zip(self._cards, exclusions(self._ask, self._cards), strict=True)):
            if state.card.healthy and not exclusion:
                sizes.setdefault((state.card.core, state.card.memory), []).append(i)
        found: list[list[Configuration]] = [[] for _ in self._cards]
        everything = sum(kind.units << kind.shift for kind in self._kinds)
        for positions in sizes.values():
            states = [emptied[i] for i in positions]
            possible = configurations(self._kinds, states, self._ask.max_shares, _CONFIGURATIONS, self._budget)
            if self._ask.constraints.same_card:
                possible = [one for one in possible if one.code in (0, everything)]
            for i in positions:
                found[i] = possible
        return found

    def _part(self, uid: str, index: int) -> int:
        """What a card pays of a pod's cost; the pod's first card what cannot be divided."""
        part, rest = divmod(self._costs[uid], len(self._uses[uid]))
        return part + (rest if index == min(self._uses[uid]) else 0)


def without_usage(state: CardState, gone: Sequence[Mapping[int, Amount]]) -> CardState:
    index = state.card.index
    amounts = [uses[index] for uses in gone if index in uses]
    if not amounts:
        return state
    held = Amount(state.core_used, state.memory_used, state.shares, state.ratio_used)
    for amount in amounts:
        held = Amount(*map(sub, held, amount))
    return replace(state, core_used=held.core, memory_used=held.memory, shares=held.shares, ratio_used=held.ratio)


def _need(state: CardState, one: Configuration, max_shares: int) -> _Need:
    # A card may be held beyond its size: who asks for nothing more of it needs nothing freed.
    core, memory, shares, ratio = one.need
    return Amount(
        max(0, core + state.core_used - state.card.core) if core else 0,
        max(0, memory + state.memory_used - state.card.memory) if memory else 0,
        state.shares if one.whole else max(0, state.shares + shares - max_shares) if max_shares and shares else 0,
        max(0, ratio + state.ratio_used - WHOLE_RATIO) if ratio else 0,
    )


def _cover(need: _Need, tenants: Sequence[tuple[int, Amount, str]], budget: Budget) -> _Evicted:
    """The cheapest pods that together free `need`; they do, all together. tenants: (cost, what it frees, uid).

    Pod by pod, the least cost of every need that can be left. Raises Exhausted.
    """
    done = Amount()
    ways: dict[_Need, tuple[int, tuple[str, ...]]] = {need: (0, ())}
    for cost, frees, uid in sorted(tenants, key=lambda row: (row[0], row[2])):
        budget.take(_WAY * len(ways))
        most = ways[done][0] if done in ways else None
        for left, (paid, uids) in list(ways.items()):
            after = Amount(*(max(0, still - gone) for still, gone in zip(left, frees, strict=True)))
            total = paid + cost
            if after == left or (most is not None and total >= most):
                continue
            if after not in ways or total < ways[after][0]:
                ways[after] = total, (*uids, uid)
        if len(ways) > _CROWDED:
            ways = _undominated(ways, budget)
    paid, uids = ways[done]
    return _Evicted(paid, frozenset(uids))


def _undominated(
    ways: Mapping[_Need, tuple[int, tuple[str, ...]]], budget: Budget
) -> dict[_Need, tuple[int, tuple[str, ...]]]:
    """Without the ways that leave at least as much of everything as one that costs no more. Raises Exhausted."""
    kept: dict[_Need, tuple[int, tuple[str, ...]]] = {}
    for left, way in sorted(ways.items(), key=lambda row: (row[1], row[0])):
        budget.take(1 + _COMPARED * len(kept))
        if not any(all(map(le, k, left)) for k in kept):
            kept[left] = way
    if len(kept) > _LABELS:
        raise Exhausted
    return kept


LOWEST_PRIORITY = -(1 << 31)
"""The lowest priority of a pod."""

Fits = Callable[[Sequence[CardState]], bool]
"""Whether the pod fits on the node's cards in this state; where it does, it does with more of them free."""


@dataclass(frozen=True, slots=True)
class EvictablePod:
    """A pod that may be evicted.

    uses: what it holds, by card index. started: RFC 3339, in UTC; "": it has not. violates: a PodDisruptionBudget is
    against its eviction. leaving: it is being deleted already, so that naming it costs nothing.
    """

    uid: str
    priority: int
    uses: Mapping[int, Amount]
    started: str = ""
    violates: bool = False
    leaving: bool = False


def by_importance(tenants: Sequence[EvictablePod]) -> list[EvictablePod]:
    """The most important first, as kube-scheduler sees it: priority, then the time for which it has been running."""
    return sorted(tenants, key=lambda t: (-t.priority, not t.started, t.started, t.uid))


def without_pods(cards: Sequence[CardState], evicted: Sequence[EvictablePod]) -> list[CardState]:
    """The cards once the evicted pods are gone. Their groups stay where they are: nobody is evicted to move one."""
    return [without_usage(state, [t.uses for t in evicted]) for state in cards]


def choose_victims(
    request: GpuRequest,
    cards: Sequence[CardState],
    tenants: Sequence[EvictablePod],
    fits: Fits,
    *,
    highest: int = LOWEST_PRIORITY,
    exact: Budget,
    budget: Budget,
) -> tuple[list[EvictablePod], bool] | None:
    """The pods to evict, the most important first, and whether no better set exists; None: no set would do.

    cards: with everything that is held of them. What is best is decided in this order, kube-scheduler's own for
    nodes (pickOneNodeForPreemption): the fewest violations of disruption budgets, the lowest highest priority, the
    smallest sum of priorities (each + 2^31), the fewest pods, those that started last. Pods that are leaving count
    for nothing. highest: the highest priority of pods that go beside these. Where the search for the
    best set takes more than `exact`, the set is still one that fits, of the lowest highest priority, and without a pod
    that could stay. Raises Exhausted where finding that takes more than `budget`, which `fits` charges as well.
    """
    leaving = [t for t in tenants if t.leaving]
    staying = by_importance([t for t in tenants if not t.leaving])
    cards = sorted(cards, key=lambda state: state.card.index)
    once_left = without_pods(cards, leaving)
    if fits(once_left):
        return _needed(cards, leaving, (), fits, budget), True
    best: tuple[list[EvictablePod], bool] | None = None
    for priority in sorted({max(highest, t.priority) for t in staying}):
        able = [t for t in staying if t.priority <= priority]
        if not _fits_without(once_left, able, fits, budget):
            continue
        found = _cheapest(request, once_left, able, fits, exact, budget)
        if best is None or _violations(found[0]) < _violations(best[0]):
            best = found
        if not _violations(best[0]):
            break
    return best and (_needed(cards, leaving, best[0], fits, budget), best[1])


def _violations(tenants: Sequence[EvictablePod]) -> int:
    return sum(t.violates for t in tenants)


def _cheapest(
    request: GpuRequest,
    cards: Sequence[CardState],
    able: Sequence[EvictablePod],
    fits: Fits,
    exact: Budget,
    budget: Budget,
) -> tuple[list[EvictablePod], bool]:
    """Of these pods the set with the least cost, else one without a pod that could stay; whether it is the former."""
    costs = _costs(able)
    try:
        chosen, proven = CheapestEvictions(request, cards, {t.uid: t.uses for t in able}, costs, exact).least()
    except Exhausted:
        chosen, proven = set(costs), False
    found = [t for t in able if t.uid in chosen]
    fitting = bool(found) and _fits_without(cards, found, fits, budget)
    if proven and fitting:
        return found, True
    return _needed(cards, found if fitting else able, (), fits, budget), False


def _costs(tenants: Sequence[EvictablePod]) -> dict[str, int]:
    """What the eviction of each costs: positive integers whose sums compare as `victims` says."""
    n = len(tenants)
    ages, count, priorities = (n * n).bit_length(), n.bit_length(), 33 + n.bit_length()
    costs = {}
    for rank, t in enumerate(reversed(by_importance(tenants))):
        cost = (t.violates << priorities) + t.priority - LOWEST_PRIORITY
        costs[t.uid] = (((cost << count) + 1) << ages) + rank
    return costs


def _fits_without(cards: Sequence[CardState], evicted: Sequence[EvictablePod], fits: Fits, budget: Budget) -> bool:
    budget.take(len(cards) * (8 + len(evicted) // 4))
    return fits(without_pods(cards, evicted))


def _needed(
    cards: Sequence[CardState],
    chosen: Sequence[EvictablePod],
    going: Sequence[EvictablePod],
    fits: Fits,
    budget: Budget,
) -> list[EvictablePod]:
    """Those that go, and those of the chosen without whom the pod would not fit; the most important are spared first.

    The most important first.
    """
    needed = sorted(by_importance(chosen), key=lambda t: not t.violates)
    for tenant in tuple(needed):
        others = [t for t in needed if t is not tenant]
        if _fits_without(cards, [*others, *going], fits, budget):
            needed = others
    return by_importance([*needed, *going])
