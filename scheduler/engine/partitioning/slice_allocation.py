"""Decides which card of a node gives how many of the slices that one pod requests.

`find_allocation` is a depth-first search over the cards. What a card gives to the pod is called its gift. On each card
the search tries the largest vectors of slices that the card can give, those with the most memory first. The search is
complete: every allocation can be changed so that each card gives a largest vector of what the cards before it have left
over. A pair of a card and remaining slices that has failed is not tried again, and upper bounds on what the remaining
cards can give end hopeless branches early. `find_best_allocation` is a dynamic program. For each vector of remaining
slices it keeps the best allocation over the cards so far, which is exact because the costs of cards add up.
`partition_plan` calls both.

The time depends on the request. It can be hours for dozens of slices of many sizes, so every step is charged to a
budget (`scheduler.engine.effort`). A search that has too few steps has no answer and raises Exhausted. It must not
report "no allocation" unless it has tried or excluded all allocations. Answers are cached, because the nodes of a
cluster are often equal.
"""

from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import add, gt, le, sub
from typing import NamedTuple

from scheduler.engine.effort import Budget, Exhausted, full_budget
from scheduler.engine.partitioning.geometry import CardPartition, Counts, MigCard, Vector, counts_of, gigabytes_of
from scheduler.engine.partitioning.mps_shares import MpsCard

Cards = tuple[MigCard | MpsCard, ...]
Gifts = tuple[Vector, ...]
"""How many of each requested slice each card gives."""

_MAX_VECTORS = 400
"""The most vectors of remaining slices. If there are more, the pod gets the first allocation that is found."""
_MAX_COMPARISONS = 600_000
"""The most pairs of such vectors, multiplied by the number of cards. If there are more, the pod also gets the first
allocation that is found."""

_TRY_STEPS = 6  # steps to try one gift of one card
_SORT_STEPS = 4  # steps to sort one gift
_COMPARE_STEPS = 2  # steps to combine one gift with one `_Row`
_NO_BUDGET_SUFFICES = 1 << 62


class CardShare(NamedTuple):
    """What one card gives to the pod, and how the card is partitioned for that."""

    requested: Counts
    partition: CardPartition


@dataclass(slots=True)
class _Cached:
    """What earlier searches for one allocation have found.

    Attributes:
        is_answered: Whether the answer is known. `gifts` is the answer then.
        gifts: The allocation, or None if there is none.
        failed_steps: The most steps with which a search ended without an answer; -1 if none did.
    """

    is_answered: bool = False
    gifts: Gifts | None = None
    failed_steps: int = -1


@lru_cache(maxsize=10_000)
def _cached(_cards: Cards, _need: Counts) -> _Cached:
    return _Cached()


def find_allocation(cards: Cards, need: Counts, budget: Budget | None = None) -> Gifts | None:
    """Return how many of each slice each card could give so that the sum is `need`, or None if that is impossible.

    Raises Exhausted if the answer is not found. A search that has ended without an answer is not repeated with the same
    number of steps or fewer.
    """
    budget = full_budget() if budget is None else budget
    cached = _cached(cards, need)
    if not cached.is_answered:
        if budget.left <= cached.failed_steps:
            raise Exhausted
        search, steps = _Search(cards, need, budget), budget.left
        try:
            gifts = search.run()
        except Exhausted:
            cached.failed_steps = max(cached.failed_steps, steps)
            raise
        if gifts is None and not search.is_complete:
            cached.failed_steps = _NO_BUDGET_SUFFICES
            raise Exhausted
        cached.gifts = gifts
        cached.is_answered = True
    return cached.gifts


class _Search:
    """One depth-first search.

    Attributes:
        is_complete: Whether the search considered all options of the cards. If so, "no allocation" is proven.
    """

    def __init__(self, cards: Cards, need: Counts, budget: Budget) -> None:
        self._cards = cards
        self._need = need
        self._budget = budget
        self._names = tuple(name for name, _ in need)
        self._failed: set[tuple[int, Vector]] = set()
        self._upper_bounds: list[Vector] = []
        self._gifts_by_key: dict[tuple[Hashable, Vector], tuple[Vector, ...]] = {}
        self.is_complete = True

    def run(self) -> Gifts | None:
        self._budget.take((1 + len(self._need)) * len(self._cards))
        if any(sum(card.max_free(name) for card in self._cards) < count for name, count in self._need):
            return None
        return self._from_card(0, tuple(count for _, count in self._need))

    def _from_card(self, i: int, remaining: Vector) -> Gifts | None:
        if not any(remaining):
            return ((0,) * len(remaining),) * (len(self._cards) - i)
        if i == len(self._cards) or (i, remaining) in self._failed or self._is_too_much(i, remaining):
            return None
        for gift in self._gifts(self._cards[i], remaining):
            self._budget.take(_TRY_STEPS)
            rest = self._from_card(i + 1, tuple(map(sub, remaining, gift)))
            if rest is not None:
                return (gift, *rest)
        self._failed.add((i, remaining))
        return None

    def _is_too_much(self, i: int, remaining: Vector) -> bool:
        """Return whether the upper bounds show that the cards from number `i` on cannot give what remains."""
        if not self._failed:
            return False  # the first attempt mostly succeeds, and it costs less than the bounds
        if not self._upper_bounds:
            self._budget.take(len(self._need) * len(self._cards))
            bounds = (card.upper_bound(self._need, self._budget) for card in reversed(self._cards))
            self._upper_bounds.extend([*accumulate(bounds, lambda a, b: tuple(map(add, a, b)))][::-1])
        return any(map(gt, (*remaining, gigabytes_of(self._names, remaining)), self._upper_bounds[i]))

    def _gifts(self, card: MigCard | MpsCard, remaining: Vector) -> tuple[Vector, ...]:
        """Return the gifts that the card can give of the remaining slices, those with the most memory first."""
        key = (card.options_key, remaining)
        if key not in self._gifts_by_key:
            requested = tuple(zip(self._names, remaining, strict=True))
            options = card.options(requested, self._budget)
            self._budget.take(_SORT_STEPS * len(options))
            by_memory = sorted(options, key=lambda gift: (-gigabytes_of(self._names, gift), gift))
            self._gifts_by_key[key] = tuple(by_memory)
            self.is_complete &= card.has_all_options(requested)
        return self._gifts_by_key[key]


class _Row(NamedTuple):
    """The best allocation over the cards so far that leaves a certain vector of remaining slices.

    Attributes:
        cost: The sum of the costs of the cards. The lowest is best.
        order: The negative numbers of what each card gives. Among equal costs, the allocation in which the first cards
            give most is best.
        shares: What each card gives.
    """

    cost: tuple[int, ...]
    order: tuple[Vector, ...]
    shares: tuple[CardShare, ...]


def find_best_allocation(cards: Cards, need: Counts, budget: Budget | None = None) -> tuple[CardShare, ...] | None:
    """Return the best allocation of `need`, card by card, or None if there is none.

    The best allocation changes the fewest cards, then partitions the fewest whole cards, then uses the fewest cards,
    then destroys the fewest free slices, then has the highest sum of `CardPartition.creatable`, then has the most
    slices. Among equal ones the first cards give most. If there are too many allocations to compare, or the
    budget ends during the comparison, the result is that of `find_allocation`. Raises Exhausted if `find_allocation`
    does.
    """
    budget = full_budget() if budget is None else budget
    gifts = find_allocation(cards, need, budget)
    if gifts is None:
        return None
    vectors = prod(count + 1 for _, count in need)
    if vectors <= _MAX_VECTORS and vectors**2 * len(cards) <= _MAX_COMPARISONS:
        with suppress(Exhausted):
            return _compare_all(cards, need, budget)
    return tuple(_share(card, need, gift, budget.beyond()) for card, gift in zip(cards, gifts, strict=True))


def _compare_all(cards: Cards, need: Counts, budget: Budget) -> tuple[CardShare, ...]:
    all_slices = tuple(count for _, count in need)
    rows = {all_slices: _Row((0,) * 6, (), ())}
    for card in cards:
        gifts = [(gift, share, _cost(card, share)) for gift, share in _possible_shares(card, need, budget)]
        budget.take(_COMPARE_STEPS * len(rows) * len(gifts))
        next_rows: dict[Vector, _Row] = {}
        for remaining, row in rows.items():
            for gift, share, cost in gifts:
                if all(map(le, gift, remaining)):
                    total = tuple(map(add, row.cost, cost))
                    candidate = _Row(total, (*row.order, tuple(-n for n in gift)), (*row.shares, share))
                    after = tuple(map(sub, remaining, gift))
                    if after not in next_rows or candidate[:2] < next_rows[after][:2]:
                        next_rows[after] = candidate
        rows = next_rows
    return rows[(0,) * len(all_slices)].shares


def _possible_shares(card: MigCard | MpsCard, need: Counts, budget: Budget) -> Iterator[tuple[Vector, CardShare]]:
    options = card.options(need, budget)
    budget.take(len(options) * prod(count + 1 for _, count in need))
    for gift in product(*(range(count + 1) for _, count in need)):
        if any(all(map(le, gift, option)) for option in options):
            yield gift, _share(card, need, gift, budget)


def _share(card: MigCard | MpsCard, need: Counts, gift: Vector, budget: Budget) -> CardShare:
    requested = counts_of((name, count) for (name, _), count in zip(need, gift, strict=True))
    is_free = all(card.count_free(name) >= count for name, count in requested)
    partition = None if is_free else card.partition(requested, (), budget)
    return CardShare(requested, partition or card.unchanged(requested))


def _cost(card: MigCard | MpsCard, share: CardShare) -> tuple[int, ...]:
    new = share.partition
    uses_card = bool(share.requested)
    return (new.touched, new.touched and card.is_whole, uses_card, new.destroyed, -new.creatable, -len(new.slices))
