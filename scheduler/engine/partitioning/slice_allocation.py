"""Which card of a node gives how many slices to one pod. Pure.

The time that this takes depends on what the pod asks for, and may be hours for dozens of slices of many sizes. All of
it is charged to a budget (`scheduler/engine/effort.py`). A search that ends for want of steps has no answer: it
raises Exhausted, and its caller reports "not proven". Answers are cached, since the nodes of a cluster are often alike;
a cache saves steps and changes no answer.
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
from scheduler.engine.partitioning.geometry import Counts, Cut, MigCard, Vector, counts_of, memory_of
from scheduler.engine.partitioning.mps_shares import MpsCard

Cards = tuple[MigCard | MpsCard, ...]

MOST_WAYS = 400
"""Of taking slices away from what a pod asks for. With more of them it gets the way that was found, not the best."""
MOST_STEPS = 600_000
"""Nor does it where there are more ways than so many to try each of them after each other one on all cards."""

_TRY = 6
"""Steps of trying one gift of one card."""
_SORT = 4
"""Steps of sorting one gift."""
_ROW = 2
"""Steps of comparing one gift with one row."""
_NO_STEPS_HELP = 1 << 62


class Share(NamedTuple):
    """What one card gives to the pod, and how it is cut for that."""

    asked: Counts
    cut: Cut


@dataclass(slots=True)
class _Known:
    """What is known of one question. ended: a search of so many steps has ended without an answer."""

    answer: "_Way | None" = None
    ended: int = -1


class _Way(NamedTuple):
    gifts: tuple[Vector, ...] | None


@lru_cache(maxsize=10_000)
def _known(_cards: Cards, _need: Counts) -> _Known:
    return _Known()


def find_allocation(cards: Cards, need: Counts, budget: Budget | None = None) -> tuple[Vector, ...] | None:
    """Return how many of each slice each card could give, so that it is all of `need`; None: there is no way.

    Raises Exhausted where the budget ends before that is known. The same search is not begun again with no more steps.
    """
    budget = full_budget() if budget is None else budget
    known = _known(cards, need)
    if known.answer is None:
        if budget.left <= known.ended:
            raise Exhausted
        search, steps = _Search(cards, need, budget), budget.left
        try:
            gifts = search.way()
        except Exhausted:
            known.ended = max(known.ended, steps)
            raise
        if gifts is None and not search.complete:
            known.ended = _NO_STEPS_HELP
            raise Exhausted
        known.answer = _Way(gifts)
    return known.answer.gifts


class _Search:
    """complete: nothing was left out so far, so that what was not found does not exist."""

    def __init__(self, cards: Cards, need: Counts, budget: Budget) -> None:
        self._cards, self._need, self._budget = cards, need, budget
        self._names = tuple(name for name, _ in need)
        self._failed: set[tuple[int, Vector]] = set()
        self._at_most: list[Vector] = []
        self._known: dict[tuple[Hashable, Vector], tuple[Vector, ...]] = {}
        self.complete = True

    def way(self) -> tuple[Vector, ...] | None:
        self._budget.take((1 + len(self._need)) * len(self._cards))
        if any(sum(card.most(name) for card in self._cards) < count for name, count in self._need):
            return None
        return self._from_card(0, tuple(count for _, count in self._need))

    def _from_card(self, i: int, left: Vector) -> tuple[Vector, ...] | None:
        if not any(left):
            return ((0,) * len(left),) * (len(self._cards) - i)
        if i == len(self._cards) or (i, left) in self._failed or self._is_too_much(i, left):
            return None
        for gift in self._gifts(self._cards[i], left):
            self._budget.take(_TRY)
            rest = self._from_card(i + 1, tuple(map(sub, left, gift)))
            if rest is not None:
                return (gift, *rest)
        self._failed.add((i, left))
        return None

    def _is_too_much(self, i: int, left: Vector) -> bool:
        if not self._failed:
            return False  # most of the time the first try is the last, and needs no bounds
        if not self._at_most:
            self._budget.take(len(self._need) * len(self._cards))
            at_most = (card.at_most(self._need, self._budget) for card in reversed(self._cards))
            self._at_most.extend([*accumulate(at_most, lambda a, b: tuple(map(add, a, b)))][::-1])
        return any(map(gt, (*left, memory_of(self._names, left)), self._at_most[i]))

    def _gifts(self, card: MigCard | MpsCard, left: Vector) -> tuple[Vector, ...]:
        """Return what the card can give of what is left, most memory first."""
        key = (card.alike, left)
        if key not in self._known:
            asked = tuple(zip(self._names, left, strict=True))
            options = card.options(asked, self._budget)
            self._budget.take(_SORT * len(options))
            self._known[key] = tuple(sorted(options, key=lambda gift: (-memory_of(self._names, gift), gift)))
            self.complete &= card.complete(asked)
        return self._known[key]


class _Row(NamedTuple):
    """Cards up to one of them. cost: to be least. order: how many each gives, negative, so that the first give most."""

    cost: tuple[int, ...]
    order: tuple[Vector, ...]
    shares: tuple[Share, ...]


def find_best_allocation(cards: Cards, need: Counts, budget: Budget | None = None) -> tuple[Share, ...] | None:
    """Return the best way to share `need` out, by card; None: there is none.

    In this order: fewest cards are changed; fewest whole cards are cut; the pod is on the fewest; fewest free slices
    are destroyed; most room is left; most slices; the first cards. Where that takes too many steps, it is the way that
    `find_allocation` has found. Raises Exhausted where that has found none in time.
    """
    budget = full_budget() if budget is None else budget
    way = find_allocation(cards, need, budget)
    if way is None:
        return None
    ways = prod(count + 1 for _, count in need)
    if ways <= MOST_WAYS and ways**2 * len(cards) <= MOST_STEPS:
        with suppress(Exhausted):
            return _best(cards, need, budget)
    return tuple(_share(card, need, gift, budget.beyond()) for card, gift in zip(cards, way, strict=True))


def _best(cards: Cards, need: Counts, budget: Budget) -> tuple[Share, ...]:
    whole = tuple(count for _, count in need)
    rows = {whole: _Row((0,) * 6, (), ())}
    for card in cards:
        gifts = [(gift, share, _cost(card, share)) for gift, share in _gifts(card, need, budget)]
        budget.take(_ROW * len(rows) * len(gifts))
        reached: dict[Vector, _Row] = {}
        for left, row in rows.items():
            for gift, share, cost in gifts:
                if all(map(le, gift, left)):
                    total = tuple(map(add, row.cost, cost))
                    candidate = _Row(total, (*row.order, tuple(-n for n in gift)), (*row.shares, share))
                    after = tuple(map(sub, left, gift))
                    if after not in reached or candidate[:2] < reached[after][:2]:
                        reached[after] = candidate
        rows = reached
    return rows[(0,) * len(whole)].shares


def _gifts(card: MigCard | MpsCard, need: Counts, budget: Budget) -> Iterator[tuple[Vector, Share]]:
    options = card.options(need, budget)
    budget.take(len(options) * prod(count + 1 for _, count in need))
    for gift in product(*(range(count + 1) for _, count in need)):
        if any(all(map(le, gift, option)) for option in options):
            yield gift, _share(card, need, gift, budget)


def _share(card: MigCard | MpsCard, need: Counts, gift: Vector, budget: Budget) -> Share:
    asked = counts_of((name, count) for (name, _), count in zip(need, gift, strict=True))
    cut = None if all(card.has(name) >= count for name, count in asked) else card.cut(asked, (), budget)
    return Share(asked, cut or card.kept(asked))


def _cost(card: MigCard | MpsCard, share: Share) -> tuple[int, ...]:
    cut = share.cut
    return (cut.touched, cut.touched and card.whole, bool(share.asked), cut.destroyed, -cut.room, -len(cut.slices))
