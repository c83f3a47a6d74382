"""Which card of a node gives how many slices to one pod. Pure."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import add, gt, le, sub
from typing import NamedTuple

from scheduler.slices.geometry import Counts, Cut, MigCard, Vector, counts_of, memory_of
from scheduler.slices.mps import MpsCard

Cards = tuple[MigCard | MpsCard, ...]

STEPS = 2000
"""Of the search for one way that serves a pod. Hardly any takes more than one step a card; for dozens of slices of many
kinds which nearly fill the node it could take hours. Then it is as if there were none."""
MOST_WAYS = 400
"""Of taking slices away from what a pod asks for. With more of them it gets the way that was found, not the best."""
MOST_STEPS = 600_000
"""Nor does it where trying each of them after each other one on all cards takes more than some 0.2 s."""


class Share(NamedTuple):
    """What one card gives to the pod, and how it is cut for that."""

    asked: Counts
    cut: Cut


@lru_cache(maxsize=10_000)
def found_way(cards: Cards, need: Counts) -> tuple[Vector, ...] | None:
    """How many of each slice each card could give, so that it is all of `need`; None: there is no way (see STEPS).

    Cached: the nodes of a cluster are often alike.
    """
    names = tuple(name for name, _ in need)
    failed = set[tuple[int, Vector]]()
    ahead: list[Vector] = []  # at most so much do the cards have from each on

    def too_much(i: int, left: Vector) -> bool:
        if not failed:
            return False  # most of the time the first try is the last, and needs no bounds
        if not ahead:
            at_most = (card.at_most(need) for card in reversed(cards))
            ahead.extend([*accumulate(at_most, lambda a, b: tuple(map(add, a, b)))][::-1])
        return any(map(gt, (*left, memory_of(names, left)), ahead[i]))

    def from_card(i: int, left: Vector) -> tuple[Vector, ...] | None:
        if not any(left):
            return ((0,) * len(left),) * (len(cards) - i)
        if i == len(cards) or len(failed) > STEPS or (i, left) in failed or too_much(i, left):
            return None
        gifts = cards[i].options(tuple(zip(names, left, strict=True)))
        for gift in sorted(gifts, key=lambda gift: (-memory_of(names, gift), gift)):
            rest = from_card(i + 1, tuple(map(sub, left, gift)))
            if rest is not None:
                return (gift, *rest)
        failed.add((i, left))
        return None

    return from_card(0, tuple(count for _, count in need))


class _Row(NamedTuple):
    """Cards up to one of them. cost: to be least. order: how many each gives, negative, so that the first give most."""

    cost: tuple[int, ...]
    order: tuple[Vector, ...]
    shares: tuple[Share, ...]


def shared_out(cards: Cards, need: Counts) -> tuple[Share, ...] | None:
    """By card, the best way to share `need` out; None: there is none.

    In this order: fewest cards are changed; fewest whole cards are cut; the pod is on the fewest; fewest free slices
    are destroyed; most room is left; most slices; the first cards.
    """
    way = found_way(cards, need)
    if way is None:
        return None
    whole = tuple(count for _, count in need)
    ways = prod(count + 1 for count in whole)
    if ways > MOST_WAYS or ways**2 * len(cards) > MOST_STEPS:
        return tuple(_share(card, need, gift) for card, gift in zip(cards, way, strict=True))
    rows = {whole: _Row((0,) * 6, (), ())}
    for card in cards:
        gifts = [(gift, share, _cost(card, share)) for gift, share in _gifts(card, need)]
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


def _gifts(card: MigCard | MpsCard, need: Counts) -> Iterator[tuple[Vector, Share]]:
    options = card.options(need)
    for gift in product(*(range(count + 1) for _, count in need)):
        if any(all(map(le, gift, option)) for option in options):
            yield gift, _share(card, need, gift)


def _share(card: MigCard | MpsCard, need: Counts, gift: Vector) -> Share:
    asked = counts_of((name, count) for (name, _), count in zip(need, gift, strict=True))
    cut = None if all(card.has(name) >= count for name, count in asked) else card.cut(asked)
    return Share(asked, cut or card.kept(asked))


def _cost(card: MigCard | MpsCard, share: Share) -> tuple[int, ...]:
    cut = share.cut
    return (cut.touched, cut.touched and card.whole, bool(share.asked), cut.destroyed, -cut.room, -len(cut.slices))
