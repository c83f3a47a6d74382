"""The exact search: which configuration goes on which card, so that every container gets its cards.

Card by card, in index order. A state is the number of cards that each kind still needs; states that are reached in
several ways are one. Every option of a card has a loss, what it gives up against the card's best option at the given
prices, so the total loss of a placement is a constant minus its worth, and a search that has seen all placements up
to some loss and found one has found the best.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.placement.configurations import Kind
from scheduler.placement.prices import Option, prices

_PLAIN = 4000  # transitions up to which prices cost more than they save
_WIDTH = 400  # states per card up to which dictionaries beat the table of all states
_CELLS = 40  # cells of that table that take as long as one state in a dictionary
_FAR = 1 << 60
_BITS = 40

Layers = list[dict[int, int]]
"""Per card, and one more after the last: the states reached before it, each with its least loss."""

Edge = tuple[int, int, int]
"""(state before a card, state after it, code of the configuration)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`options`: per card (loss, code), least loss first. caps: per card, and one more: what the cards from there on
    can still take. Packed like configurations, each field with its guard bit set."""

    kinds: tuple[Kind, ...]
    options: tuple[tuple[tuple[int, int], ...], ...]
    caps: tuple[int, ...]
    start: int
    goal: int

    @property
    def total_loss(self) -> int:
        """No placement loses more."""
        return sum(options[-1][0] for options in self.options)


def problem(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], price: Sequence[int]) -> Problem:
    options = []
    for card in cards:
        net = [
            (worth - sum(p * kind.count(code) for kind, p in zip(kinds, price, strict=True)), code)
            for worth, code in card
        ]
        best = max(net)[0]
        options.append(tuple(sorted((best - worth, code) for worth, code in net)))
    goal = sum(kind.guard for kind in kinds)
    room = [0] * len(kinds)
    caps = [goal]
    for card in reversed(cards):
        for k, kind in enumerate(kinds):
            room[k] = min(kind.units, room[k] + max(kind.count(code) for _, code in card))
        caps.append(goal + sum(r << kind.shift for r, kind in zip(room, kinds, strict=True)))
    start = goal + sum(kind.units << kind.shift for kind in kinds)
    return Problem(kinds, tuple(options), tuple(reversed(caps)), start, goal)
