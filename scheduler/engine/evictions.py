"""Chooses the pods to evict from a node so that a pod fits on its cards: as few and as unimportant ones as possible.

`scheduler.decisions.preemption` calls `choose_victims`, and `scheduler.cluster.partitionable_nodes` calls
`without_usage`. Sets of pods are compared as kube-scheduler compares nodes (pickOneNodeForPreemption). The best set has
the fewest violations of disruption budgets. Among such sets it has the lowest priority of the most important pod, then
the smallest sum of priorities, then the fewest pods, and then the pods that started last. kube-scheduler itself only
spares pods one by one, the most important first. So it often evicts pods from several cards although one card would
suffice. docs/preemption.md promises the best set, or, if the search ends early, a set without a pod that could stay.

Why the result is best
    1. The priorities of the pods are tried in ascending order as the highest priority of the set. The other criteria
       are combined into one integer cost for each pod, so that the best set has the lowest sum (`_costs`).
    2. For one card, `_cheapest_on_card` finds the cheapest pods whose eviction frees enough for a configuration. It is
       a dynamic program over what is still needed, pod by pod, so it is exact.
    3. If every pod were on one card only, the costs of the cards would add up, and `solver` finds the best choice of a
       configuration for each card. A pod on several cards is divided: each card pays a part of its cost. The sum of
       these parts never exceeds the true cost, so the solver's result is a lower bound.
    4. If the true cost of that result is higher, a pod on several cards was only partly paid. Branch and bound decides
       the most expensive such pod: it is evicted, or it stays. Branches whose lower bound is no better than the best
       set so far are left out.
    5. The caller's function `fits` confirms every result. If a set is not proven to be best, the pods that need not be
       evicted are removed from it (`_necessary`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, le, sub
from typing import NamedTuple

from mgpu.model.cards import WHOLE_RATIO, CardState
from mgpu.model.gpu_requests import Amount, GpuRequest
from scheduler.engine.card_constraints import exclusions
from scheduler.engine.configurations import Configuration, configurations, kinds_of
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.solver import lowest, solve

_SOLVER_STEPS = 100_000  # the most steps of one search over the cards
_STATE_STEPS = 8  # steps for one pod and one state of the dynamic program
_COMPARE_STEPS = 2  # steps to compare two states
_MAX_CONFIGURATIONS = 500  # the most configurations for each size of cards
_MAX_STATES = 2_000  # the most states of the dynamic program once `_undominated` has removed useless ones
_PRUNE_ABOVE = 64  # with more states than this, `_undominated` is called

LOWEST_PRIORITY = -(1 << 31)
"""The lowest priority that a pod can have."""

Fits = Callable[[Sequence[CardState]], bool]
"""Returns whether the pod fits on the node's cards in this state. More free capacity never makes it False."""


@dataclass(frozen=True, slots=True)
class EvictablePod:
    """A pod that may be evicted.

    Attributes:
        uses: What the pod holds, by card index.
        started: The time at which it started, in RFC 3339 and UTC; "" if it has not started.
        violates: Whether its eviction violates a PodDisruptionBudget.
        leaving: Whether it is being deleted already, so that its eviction costs nothing.
    """

    uid: str
    priority: int
    uses: Mapping[int, Amount]
    started: str = ""
    violates: bool = False
    leaving: bool = False


def by_importance(pods: Sequence[EvictablePod]) -> list[EvictablePod]:
    """Sort pods as kube-scheduler does: first those with the highest priority, then those that started first."""
    return sorted(pods, key=lambda pod: (-pod.priority, not pod.started, pod.started, pod.uid))


def without_pods(cards: Sequence[CardState], evicted: Sequence[EvictablePod]) -> list[CardState]:
    """Return the cards without what the evicted pods hold.

    The cards keep their groups, because no pod is evicted to move a group to another card.
    """
    return [without_usage(state, [pod.uses for pod in evicted]) for state in cards]


def without_usage(state: CardState, usages: Sequence[Mapping[int, Amount]]) -> CardState:
    """Return the card without these usages, each of which is an amount by card index."""
    amounts = [uses[state.card.index] for uses in usages if state.card.index in uses]
    if not amounts:
        return state
    held = Amount(state.core_used, state.memory_used, state.shares, state.ratio_used)
    for amount in amounts:
        held = Amount(*map(sub, held, amount))
    return replace(state, core_used=held.core, memory_used=held.memory, shares=held.shares, ratio_used=held.ratio)


def choose_victims(
    request: GpuRequest,
    cards: Sequence[CardState],
    pods: Sequence[EvictablePod],
    fits: Fits,
    *,
    highest: int = LOWEST_PRIORITY,
    exact: Budget,
    budget: Budget,
) -> tuple[list[EvictablePod], bool] | None:
    """Return the pods to evict, the most important first, and whether that set is proven best; None if no set suffices.

    The set includes the pods that are being deleted already and whose cards the pod needs. Raises Exhausted if finding
    any set takes more than `budget`.

    Args:
        cards: The cards of the node, with everything that pods hold of them.
        highest: The highest priority of the pods that the caller evicts in any case. They are not in `pods`.
        exact: The budget of the search for the best set. If the search uses it up, the returned set still suffices, and
            none of its pods could stay.
        budget: The budget of everything else; `fits` charges it too.
    """
    leaving = [pod for pod in pods if pod.leaving]
    staying = by_importance([pod for pod in pods if not pod.leaving])
    cards = sorted(cards, key=attrgetter("card.index"))
    after_leaving = without_pods(cards, leaving)
    if fits(after_leaving):
        return _necessary(cards, leaving, (), fits, budget), True
    best: tuple[list[EvictablePod], bool] | None = None
    for priority in sorted({max(highest, pod.priority) for pod in staying}):
        candidates = [pod for pod in staying if pod.priority <= priority]
        if not _fits_without(after_leaving, candidates, fits, budget):
            continue
        found = _cheapest(request, after_leaving, candidates, fits, exact, budget)
        if best is None or _violations(found[0]) < _violations(best[0]):
            best = found
        if not _violations(best[0]):
            break
    return best and (_necessary(cards, leaving, best[0], fits, budget), best[1])


def _violations(pods: Sequence[EvictablePod]) -> int:
    return sum(pod.violates for pod in pods)


def _cheapest(
    request: GpuRequest,
    cards: Sequence[CardState],
    candidates: Sequence[EvictablePod],
    fits: Fits,
    exact: Budget,
    budget: Budget,
) -> tuple[list[EvictablePod], bool]:
    """Return a set of candidates, and whether it is proven to be the cheapest.

    If it is not proven, the set still contains no pod that could stay.
    """
    costs = _costs(candidates)
    try:
        uids, proven = _BranchAndBound(request, cards, {pod.uid: pod.uses for pod in candidates}, costs, exact).run()
    except Exhausted:
        uids, proven = frozenset(costs), False
    chosen = [pod for pod in candidates if pod.uid in uids]
    if not chosen or not _fits_without(cards, chosen, fits, budget):
        chosen, proven = list(candidates), False
    return (chosen, True) if proven else (_necessary(cards, chosen, (), fits, budget), False)


def _costs(pods: Sequence[EvictablePod]) -> dict[str, int]:
    """Return the cost of each pod's eviction, a positive integer.

    The integer has four fields: the violation in the highest bits, then the priority, then a 1 that counts the pod,
    then the rank by age. The fields are so wide that their sums over all pods do not overflow.
    """
    n = len(pods)
    age_bits, count_bits, priority_bits = (n * n).bit_length(), n.bit_length(), 33 + n.bit_length()
    costs = {}
    for rank, pod in enumerate(reversed(by_importance(pods))):
        cost = (pod.violates << priority_bits) + pod.priority - LOWEST_PRIORITY
        costs[pod.uid] = (((cost << count_bits) + 1) << age_bits) + rank
    return costs


def _fits_without(cards: Sequence[CardState], evicted: Sequence[EvictablePod], fits: Fits, budget: Budget) -> bool:
    budget.take(len(cards) * (8 + len(evicted) // 4))
    return fits(without_pods(cards, evicted))


def _necessary(
    cards: Sequence[CardState],
    chosen: Sequence[EvictablePod],
    certain: Sequence[EvictablePod],
    fits: Fits,
    budget: Budget,
) -> list[EvictablePod]:
    """Return the certain pods, and those chosen pods that must be evicted too, the most important first.

    The function tries to spare the chosen pods one by one: first those whose eviction violates a disruption budget,
    then the most important ones.
    """
    needed = sorted(by_importance(chosen), key=lambda pod: not pod.violates)
    for pod in tuple(needed):
        others = [other for other in needed if other is not pod]
        if _fits_without(cards, [*others, *certain], fits, budget):
            needed = others
    return by_importance([*needed, *certain])


class _Evictions(NamedTuple):
    """Pods and the cost of their eviction. In a lower bound, the cost is the sum of the parts that the cards pay."""

    cost: int
    uids: frozenset[str]


class _BranchAndBound:
    """The search for the cheapest set of pods that must be evicted from one node.

    Args:
        uses: By UID, what each pod that may be evicted holds, by card index.
        costs: By UID, the cost of each pod, which is above 0.
        budget: The budget of all searches together. If it is used up, the constructor raises Exhausted, and so does
            `run` if it has not found a set yet.
    """

    def __init__(
        self,
        request: GpuRequest,
        cards: Sequence[CardState],
        uses: Mapping[str, Mapping[int, Amount]],
        costs: Mapping[str, int],
        budget: Budget,
    ) -> None:
        self._request = request
        self._cards = cards
        self._uses = uses
        self._costs = costs
        self._budget = budget
        self._kinds = kinds_of(request)
        self._pods_of_card = [frozenset(uid for uid in costs if state.card.index in uses[uid]) for state in cards]
        self._configurations = self._configurations_if_empty()
        self._options_cache: dict[tuple[int, frozenset[str], frozenset[str]], dict[int, _Evictions]] = {}

    def run(self) -> tuple[frozenset[str], bool]:
        """Return the cheapest set of pods that suffices, and whether it is proven to be the cheapest.

        The set is empty if no set suffices.
        """
        best: _Evictions | None = None
        branches: list[tuple[frozenset[str], frozenset[str]]] = [(frozenset(), frozenset())]
        while branches:
            evicted, kept = branches.pop()
            try:
                bound = self._lower_bound(evicted, kept)
            except Exhausted:
                if best is None:
                    raise
                return best.uids, False
            paid = self._cost(evicted)
            if bound is None or (best is not None and paid + bound.cost >= best.cost):
                continue
            uids = evicted | bound.uids
            cost = self._cost(uids)
            if best is None or cost < best.cost:
                best = _Evictions(cost, uids)
            if cost > paid + bound.cost:
                several_cards = (uid for uid in bound.uids if len(self._uses[uid]) > 1)
                undecided = max(several_cards, key=lambda uid: (self._costs[uid], uid))
                branches += [(evicted, kept | {undecided}), (evicted | {undecided}, kept)]
        return best.uids if best else frozenset(), True

    def _cost(self, uids: frozenset[str]) -> int:
        return sum(self._costs[uid] for uid in uids)

    def _lower_bound(self, evicted: frozenset[str], kept: frozenset[str]) -> _Evictions | None:
        """Return the cheapest further evictions if each card pays only its part of a pod, or None if none suffice."""
        evictions = [self._options(i, evicted & pods, kept & pods) for i, pods in enumerate(self._pods_of_card)]
        options = [[(-one.cost, code) for code, one in of_card.items()] for of_card in evictions]
        order = sorted((i for i, of_card in enumerate(options) if len(of_card) > 1), key=lambda i: (options[i], i))
        if not order:
            return None
        part = self._budget.part(_SOLVER_STEPS)
        edges, proven = solve(self._kinds, [options[i] for i in order], part)
        self._budget.give_back(part)
        if not proven:
            raise Exhausted
        if not edges:
            return None
        codes = [0] * len(evictions)
        positions = lowest(self._kinds, order, edges, self._budget)
        for kind in self._kinds:
            for i in (i for member in kind.members for i in positions[member]):
                codes[i] += 1 << kind.shift
        chosen = [of_card[code] for of_card, code in zip(evictions, codes, strict=True) if code]
        return _Evictions(sum(one.cost for one in chosen), frozenset(uid for one in chosen for uid in one.uids))

    def _options(self, i: int, evicted: frozenset[str], kept: frozenset[str]) -> dict[int, _Evictions]:
        """Return, by the code of each configuration that can be on a card, the cheapest evictions that make it fit.

        These evictions contain neither the evicted nor the kept pods.
        """
        options = self._options_cache.get((i, evicted, kept))
        if options is None:
            index, max_shares = self._cards[i].card.index, self._request.max_shares
            state = without_usage(self._cards[i], [self._uses[uid] for uid in evicted])
            undecided = self._pods_of_card[i] - evicted - kept
            emptied = without_usage(state, [self._uses[uid] for uid in undecided])
            pods = [(self._part_of_cost(uid, index), self._uses[uid][index], uid) for uid in undecided]
            options = self._options_cache[i, evicted, kept] = {
                one.code: _cheapest_on_card(_missing(state, one, max_shares), pods, self._budget)
                for one in self._configurations[i]
                if one.fits(emptied, max_shares)
            }
        return options

    def _configurations_if_empty(self) -> list[list[Configuration]]:
        """Return the configurations that each card could have if all pods that may be evicted were evicted."""
        emptied = [without_usage(state, list(self._uses.values())) for state in self._cards]
        positions_by_size: dict[tuple[int, int], list[int]] = {}
        for i, (state, exclusion) in enumerate(zip(self._cards, exclusions(self._request, self._cards), strict=True)):
            if state.card.healthy and not exclusion:
                positions_by_size.setdefault((state.card.core, state.card.memory), []).append(i)
        found: list[list[Configuration]] = [[] for _ in self._cards]
        all_containers = sum(kind.units << kind.shift for kind in self._kinds)
        for positions in positions_by_size.values():
            states = [emptied[i] for i in positions]
            limit = self._request.max_shares
            possible = configurations(self._kinds, states, limit, _MAX_CONFIGURATIONS, self._budget)
            if self._request.constraints.same_card:
                possible = [one for one in possible if one.code in (0, all_containers)]
            for i in positions:
                found[i] = possible
        return found

    def _part_of_cost(self, uid: str, index: int) -> int:
        """Return the part of a pod's cost that a card pays. The pod's first card also pays the remainder."""
        part, remainder = divmod(self._costs[uid], len(self._uses[uid]))
        return part + (remainder if index == min(self._uses[uid]) else 0)


def _missing(state: CardState, configuration: Configuration, max_shares: int) -> Amount:
    """Return how much of the card must be freed for the configuration."""
    # Pods may hold more than the size of a card. A configuration that takes no core does not need core to be freed, and
    # the same is true of memory, shares and ratio.
    core, memory, shares, ratio = configuration.need
    missing_shares = max(0, state.shares + shares - max_shares) if max_shares and shares else 0
    return Amount(
        max(0, core + state.core_used - state.card.core) if core else 0,
        max(0, memory + state.memory_used - state.card.memory) if memory else 0,
        state.shares if configuration.whole else missing_shares,
        max(0, ratio + state.ratio_used - WHOLE_RATIO) if ratio else 0,
    )


def _cheapest_on_card(missing: Amount, pods: Sequence[tuple[int, Amount, str]], budget: Budget) -> _Evictions:
    """Return the cheapest set of these pods that frees what is missing. All of them together must free it.

    Pod by pod, the dynamic program keeps the cheapest set for each amount that is still missing.

    Args:
        pods: The cost of each pod, what its eviction frees, and its UID.
    """
    nothing = Amount()
    ways: dict[Amount, tuple[int, tuple[str, ...]]] = {missing: (0, ())}
    for cost, frees, uid in sorted(pods, key=lambda row: (row[0], row[2])):
        budget.take(_STATE_STEPS * len(ways))
        best = ways[nothing][0] if nothing in ways else None
        for remainder, (paid, uids) in list(ways.items()):
            after = Amount(*(max(0, still - freed) for still, freed in zip(remainder, frees, strict=True)))
            total = paid + cost
            if after == remainder or (best is not None and total >= best):
                continue
            if after not in ways or total < ways[after][0]:
                ways[after] = total, (*uids, uid)
        if len(ways) > _PRUNE_ABOVE:
            ways = _undominated(ways, budget)
    paid, uids = ways[nothing]
    return _Evictions(paid, frozenset(uids))


def _undominated(
    ways: Mapping[Amount, tuple[int, tuple[str, ...]]], budget: Budget
) -> dict[Amount, tuple[int, tuple[str, ...]]]:
    """Remove the ways that are useless because another way costs at most as much and leaves at most as much missing.

    Raises Exhausted if more than _MAX_STATES ways remain.
    """
    kept: dict[Amount, tuple[int, tuple[str, ...]]] = {}
    for remainder, way in sorted(ways.items(), key=lambda row: (row[1], row[0])):
        budget.take(1 + _COMPARE_STEPS * len(kept))
        if not any(all(map(le, other, remainder)) for other in kept):
            kept[remainder] = way
    if len(kept) > _MAX_STATES:
        raise Exhausted
    return kept
