"""The search written down in integers.

Card by card, a state is the number of cards that each kind of containers still needs. Every option of a card, what
can be put on it, has a loss: what it gives up against the card's best option at given prices. The total loss of a
placement is a constant minus its worth, so a search that has seen all placements up to some loss, and found one, has
found the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

from scheduler.engine.configurations import Kind

Option = tuple[int, int]
"""(worth of a configuration on a card against leaving the card alone, its code)."""

Layers = list[dict[int, int]]
"""Before each card, and after the last: the states reached and the least loss of each."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What to search, card by card. States are packed like configurations, with the guard bit of every field set.

    options: (loss, code), least loss first. equal: whether a card is as good as the one before it. caps: what the
    cards from this one on can take, and one more for the end. most_lost: no placement loses more.
    """

    kinds: tuple[Kind, ...]
    options: tuple[tuple[tuple[int, int], ...], ...]
    equal: tuple[bool, ...]
    caps: tuple[int, ...]
    start: int
    goal: int
    most_lost: int


def problem(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], price: Sequence[int]) -> Problem:
    """The search at these prices, one per kind. Any prices are right; good ones make it short."""
    codes = {code for card in cards for _, code in card}
    counts = {code: [kind.count(code) for kind in kinds] for code in codes}
    paid = {code: sum(map(mul, price, numbers)) for code, numbers in counts.items()}
    options: list[tuple[tuple[int, int], ...]] = []
    equal = [False, *(a == b for a, b in pairwise(cards))]
    for card, same in zip(cards, equal, strict=True):
        if same:
            options.append(options[-1])
            continue
        best = max(worth - paid[code] for worth, code in card)
        options.append(tuple(sorted((best - worth + paid[code], code) for worth, code in card)))
    goal = sum(kind.guard for kind in kinds)
    room = [0] * len(kinds)
    caps = [goal]
    for card in reversed(cards):
        most = map(max, zip(*(counts[code] for _, code in card), strict=True))
        room = [min(kind.units, now + more) for kind, now, more in zip(kinds, room, most, strict=True)]
        caps.append(goal + sum(r << kind.shift for r, kind in zip(room, kinds, strict=True)))
    start = goal + sum(kind.units << kind.shift for kind in kinds)
    dual = sum(max(worth - paid[code] for worth, code in card) for card in cards)
    dual += sum(p * kind.units for kind, p in zip(kinds, price, strict=True))
    at_most = min(dual - sum(min(card)[0] for card in cards), sum(card[-1][0] for card in options))
    return Problem(kinds, tuple(options), tuple(equal), tuple(reversed(caps)), start, goal, at_most)
