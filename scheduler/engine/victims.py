"""Which pods to evict from a node so that another one fits on its cards: as few and as unimportant as possible."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount, GpuRequest
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.eviction_search import Freeing, freed

LOWEST = -(1 << 31)
"""The lowest priority of a pod."""

Fits = Callable[[Sequence[CardState]], bool]
"""Whether the pod fits on the node's cards in this state; where it does, it does with more of them free."""


@dataclass(frozen=True, slots=True)
class Tenant:
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


def by_importance(tenants: Sequence[Tenant]) -> list[Tenant]:
    """The most important first, as kube-scheduler sees it: priority, then the time for which it has been running."""
    return sorted(tenants, key=lambda t: (-t.priority, not t.started, t.started, t.uid))


def without(cards: Sequence[CardState], evicted: Sequence[Tenant]) -> list[CardState]:
    """The cards once the evicted pods are gone. Their groups stay where they are: nobody is evicted to move one."""
    return [freed(state, [t.uses for t in evicted]) for state in cards]


def victims(
    request: GpuRequest,
    cards: Sequence[CardState],
    tenants: Sequence[Tenant],
    fits: Fits,
    *,
    highest: int = LOWEST,
    exact: Budget,
    budget: Budget,
) -> tuple[list[Tenant], bool] | None:
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
    once_left = without(cards, leaving)
    if fits(once_left):
        return _needed(cards, leaving, (), fits, budget), True
    best: tuple[list[Tenant], bool] | None = None
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


def _violations(tenants: Sequence[Tenant]) -> int:
    return sum(t.violates for t in tenants)


def _cheapest(
    request: GpuRequest, cards: Sequence[CardState], able: Sequence[Tenant], fits: Fits, exact: Budget, budget: Budget
) -> tuple[list[Tenant], bool]:
    """Of these pods the set with the least cost, else one without a pod that could stay; whether it is the former."""
    costs = _costs(able)
    try:
        chosen, proven = Freeing(request, cards, {t.uid: t.uses for t in able}, costs, exact).least()
    except Exhausted:
        chosen, proven = set(costs), False
    found = [t for t in able if t.uid in chosen]
    fitting = bool(found) and _fits_without(cards, found, fits, budget)
    if proven and fitting:
        return found, True
    return _needed(cards, found if fitting else able, (), fits, budget), False


def _costs(tenants: Sequence[Tenant]) -> dict[str, int]:
    """What the eviction of each costs: positive integers whose sums compare as `victims` says."""
    n = len(tenants)
    ages, count, priorities = (n * n).bit_length(), n.bit_length(), 33 + n.bit_length()
    costs = {}
    for rank, t in enumerate(reversed(by_importance(tenants))):
        cost = (t.violates << priorities) + t.priority - LOWEST
        costs[t.uid] = (((cost << count) + 1) << ages) + rank
    return costs


def _fits_without(cards: Sequence[CardState], evicted: Sequence[Tenant], fits: Fits, budget: Budget) -> bool:
    budget.take(len(cards) * (8 + len(evicted) // 4))
    return fits(without(cards, evicted))


def _needed(
    cards: Sequence[CardState], chosen: Sequence[Tenant], going: Sequence[Tenant], fits: Fits, budget: Budget
) -> list[Tenant]:
    """Those that go, and those of the chosen without whom the pod would not fit; the most important are spared first.

    The most important first.
    """
    needed = sorted(by_importance(chosen), key=lambda t: not t.violates)
    for tenant in tuple(needed):
        others = [t for t in needed if t is not tenant]
        if _fits_without(cards, [*others, *going], fits, budget):
            needed = others
    return by_importance([*needed, *going])
