"""The exact search: which configuration goes on which card, so that every container gets its cards.

Card by card, in index order. A state is the number of cards that each kind still needs; states that are reached in
several ways are one. Every option of a card has a loss, what it gives up against the card's best option at the given
prices. The total loss of a placement is a constant minus its worth, so a search that has seen all placements up to
some loss, and found one, has found the best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from scheduler.placement.configurations import Kind
from scheduler.placement.prices import Option, prices

_PLAIN = 4000  # transitions up to which prices cost more than they save
_FIRST = 512  # the first bound on the loss, as a part of the largest loss of an option
_CELL, _ROW = 1 / 64, 16  # time per cell and per row of the table of all states, in transitions between single states
_BITS, _FAR = 40, 1 << 60

Layers = list[dict[int, int]]
"""Before each card, and after the last: the states reached and the least loss of each."""

Edge = tuple[int, int, int]
"""(state before a card, state after it, code of the configuration)."""

Floor = Callable[[int, int], int]
"""(number of a card, state before it) → a lower bound on the loss from there to the goal."""


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


def sweep(
    p: Problem, limit: int, *, most: float, width: int | None = None, floor: Floor | None = None
) -> tuple[Layers, float] | None:
    """All states on the way to placements that lose at most `limit`, and the transitions that it took.

    None: over `most` transitions. width: keep only so many states per card, those with the least loss.
    """
    layers: Layers = [{p.start: 0}]
    goal, spent = p.goal, 0
    for i, options in enumerate(p.options, 1):
        cap, layer = p.caps[i], dict[int, int]()
        for state, lost in layers[-1].items():
            room = limit - lost
            for loss, code in options:
                if loss > room:
                    break
                spent += 1
                after = state - code
                if after & goal != goal or (cap - (after ^ goal)) & goal != goal:
                    continue
                total, known = lost + loss, layer.get(after)
                if known is None or total < known:
                    layer[after] = total
            if spent > most:
                return None
        if floor is not None:
            layer = {state: lost for state, lost in layer.items() if lost + floor(i, state) <= limit}
        if width is not None and len(layer) > width:
            layer = dict(sorted(layer.items(), key=lambda row: (row[1], row[0]))[:width])
        layers.append(layer)
    return layers, spent


def table(p: Problem, limit: int) -> tuple[Floor, int]:
    """A lower bound on the loss from every state to the goal, by options that lose at most `limit`.

    Losses are rounded down to 2^-40 of the largest, so that they fit machine integers. Also returns a bound that the
    best placement does not exceed, or one beyond `limit` where there is none so good.
    """
    shape = tuple(kind.units + 1 for kind in p.kinds)
    unit = max(options[-1][0] for options in p.options) or 1
    rows = [np.full(shape, _FAR, dtype=np.int64)]
    rows[0][(0,) * len(shape)] = 0
    for options in reversed(p.options):
        after, before = rows[-1], np.full(shape, _FAR, dtype=np.int64)
        for loss, code in options:
            if loss > limit:
                break
            counts = [kind.count(code) for kind in p.kinds]
            into = before[tuple(slice(n, None) for n in counts)]
            came = after[tuple(slice(0, size - n) for size, n in zip(shape, counts, strict=True))]
            np.minimum(into, came + (loss << _BITS) // unit, out=into)
        rows.append(before)
    rows.reverse()

    def floor(card: int, state: int) -> int:
        return int(rows[card][tuple(kind.count(state) for kind in p.kinds)]) * unit >> _BITS

    best = int(rows[0][tuple(size - 1 for size in shape)])
    return floor, ((best + len(p.options)) * unit >> _BITS) + 1


def search(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: int) -> tuple[list[list[Edge]], bool]:
    """The options of each card that best placements are made of, as edges between states; and whether that is proven.

    No edges: there is no placement (proven), or none was found. budget: states to look at, roughly.
    """
    cells = prod(kind.units + 1 for kind in kinds)
    plain = cells * sum(map(len, cards)) <= min(_PLAIN, budget)
    p = problem(kinds, cards, [0] * len(kinds) if plain else prices(kinds, cards))
    everything = p.total_loss
    if (p.caps[0] - (p.start ^ p.goal)) & p.goal != p.goal:
        return [], True
    limit = everything if plain else max(options[-1][0] for options in p.options) // _FIRST
    spent = 0.0
    while True:
        limit = min(limit, everything)
        tabular = sum(_ROW + cells * _CELL for options in p.options for loss, _ in options if loss <= limit)
        result = sweep(p, limit, most=min(tabular, budget - spent))
        if result is None:
            if spent + tabular > budget:
                break
            spent += tabular
            floor, bound = table(p, limit)
            result = sweep(p, min(bound, limit), most=float("inf"), floor=floor)
            assert result
        layers, took = result
        spent += took
        if p.goal in layers[-1]:
            return edges(p, layers), True
        if limit == everything:
            return [], True
        limit *= 2
    result = sweep(p, everything, most=float("inf"), width=1 + budget // sum(map(len, cards)))
    return (edges(p, result[0]), False) if result and p.goal in result[0][-1] else ([], False)


def edges(p: Problem, layers: Layers) -> list[list[Edge]]:
    """Per card the steps of all placements with the least loss."""
    alive, found = {p.goal}, []
    for options, before, after in zip(p.options[::-1], layers[-2::-1], layers[:0:-1], strict=True):
        here = [
            (state + code, state, code)
            for state in sorted(alive)
            for loss, code in options
            if before.get(state + code) == after[state] - loss
        ]
        found.append(here)
        alive = {edge[0] for edge in here}
    return found[::-1]


def lowest(kinds: Sequence[Kind], steps: list[list[Edge]]) -> list[tuple[int, ...]]:
    """Of all placements along `steps` the first in order: per container of the ask the numbers of its cards.

    Container by container in the ask's order. What is left for the others of its kind can be shared out among them
    whenever no card has more than their number.
    """
    chosen: dict[int, tuple[int, ...]] = {}
    rank_of = {member: (kind, rank) for kind in kinds for rank, member in enumerate(kind.members)}
    taken = {kind: [0] * len(steps) for kind in kinds}
    for member, (kind, rank) in sorted(rank_of.items()):
        others, already = len(kind.members) - rank - 1, taken[kind]
        cards = _lowest_for(kind, others, already, steps)
        for i in cards:
            already[i] += 1
        steps = [
            [edge for edge in here if 0 <= kind.count(edge[2]) - already[i] <= others] for i, here in enumerate(steps)
        ]
        chosen[member] = cards
    return [chosen[member] for member in sorted(chosen)]


def _lowest_for(kind: Kind, others: int, already: Sequence[int], steps: list[list[Edge]]) -> tuple[int, ...]:
    """The cards of one container; `already`: containers of its kind per card before it, `others` come after it."""
    best = {(steps[0][0][0], 0): ()}
    for i, here in enumerate(steps):
        reached: dict[tuple[int, int], tuple[int, ...]] = {}
        for before, after, code in here:
            spare = kind.count(code) - already[i]
            for count in range(kind.container.cards + 1):
                cards = best.get((before, count))
                for more in ((), (i,)) if cards is not None else ():
                    if 0 <= spare - len(more) <= others:
                        key = (after, count + len(more))
                        reached[key] = min(reached.get(key, cards + more), cards + more)
        best = reached
    return next(cards for (_, count), cards in best.items() if count == kind.container.cards)
