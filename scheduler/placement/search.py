"""The exact search: which configuration goes on which card, so that every container gets its cards.

Card by card, in index order. A state is the number of cards that each kind still needs; states that are reached in
several ways are one. Every option of a card has a loss, what it gives up against the card's best option at the given
prices. The total loss of a placement is a constant minus its worth, so a search that has seen all placements up to
some loss, and found one, has found the best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from operator import mul

import numpy as np

from scheduler.placement.configurations import Kind
from scheduler.placement.prices import Option, prices

_PLAIN = 4000  # transitions up to which prices cost more than they save
_FIRST = 512  # the first bound on the loss, as a part of the largest loss of an option
_ROW, _CELLS = 16, 64  # the table's time per option, and its cells per time of one transition between single states
_BITS, _FAR = 40, 1 << 60

Layers = list[dict[int, int]]
"""Before each card, and after the last: the states reached and the least loss of each."""

Node = tuple[int, int]
"""(state, the least code that the card before it may have)."""

Edge = tuple[Node, Node, int]
"""(before a card, after it, code of its configuration)."""

Floor = Callable[[int, int], int]
"""(number of a card, state before it) → a lower bound on the loss from there to the goal."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What to search, card by card. States are packed like configurations, with the guard bit of every field set.

    options: (loss, code), least loss first. equal: whether a card is as good as the one before it. caps: what the
    cards from this one on can take, and one more for the end.
    """

    kinds: tuple[Kind, ...]
    options: tuple[tuple[tuple[int, int], ...], ...]
    equal: tuple[bool, ...]
    caps: tuple[int, ...]
    start: int
    goal: int


def problem(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], price: Sequence[int]) -> Problem:
    """The search at these prices, one per kind. Any prices are right; good ones make it short."""
    counts = {code: [kind.count(code) for kind in kinds] for card in cards for _, code in card}
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
    return Problem(kinds, tuple(options), tuple(equal), tuple(reversed(caps)), start, goal)


def sweep(
    p: Problem, limit: int, *, most: float = inf, width: int | None = None, floor: Floor | None = None
) -> tuple[Layers | None, int]:
    """All states on the way to placements that lose at most `limit`; None: takes over `most` transitions.

    Also how many transitions it took. width: keep only so many states per card, those with the least loss.
    """
    layers: Layers = [{p.start: 0}]
    goal, took = p.goal, 0
    for i, options in enumerate(p.options, 1):
        cap, layer = p.caps[i], dict[int, int]()
        for state, lost in layers[-1].items():
            room = limit - lost
            for loss, code in options:
                if loss > room:
                    break
                took += 1
                after = state - code
                if after & goal != goal or (cap - (after ^ goal)) & goal != goal:
                    continue
                total, known = lost + loss, layer.get(after)
                if known is None or total < known:
                    layer[after] = total
            if took > most:
                return None, took
        if floor is not None:
            layer = {state: lost for state, lost in layer.items() if lost + floor(i, state) <= limit}
        if width is not None and len(layer) > width:
            layer = dict(sorted(layer.items(), key=lambda row: (row[1], row[0]))[:width])
        layers.append(layer)
    return layers, took


def table(p: Problem, limit: int) -> tuple[Floor, int | None]:
    """A lower bound on the loss from every state to the goal, with options that lose at most `limit` each.

    Also an upper bound, hardly above it, on the loss of the best placement; None: these options make none. Losses
    are rounded down to 2^-40 of the largest, so that they fit machine integers.
    """
    shape = tuple(kind.units + 1 for kind in p.kinds)
    unit = max(options[-1][0] for options in p.options) or 1
    after = np.full(shape, _FAR, dtype=np.int64)
    after[(0,) * len(shape)] = 0
    rows = [after]
    for options in reversed(p.options):
        before = np.full(shape, _FAR, dtype=np.int64)
        for loss, code in options:
            if loss > limit:
                break
            counts = [kind.count(code) for kind in p.kinds]
            into = before[tuple(slice(n, None) for n in counts)]
            came = after[tuple(slice(0, size - n) for size, n in zip(shape, counts, strict=True))]
            np.minimum(into, came + (loss << _BITS) // unit, out=into)
        rows.append(before)
        after = before
    rows.reverse()

    def floor(card: int, state: int) -> int:
        return int(rows[card][tuple(kind.count(state) for kind in p.kinds)]) * unit >> _BITS

    best = int(after[(-1,) * len(shape)])
    return floor, ((best + len(p.options)) * unit >> _BITS) + 1 if best < _FAR else None


def search(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: int) -> tuple[list[list[Edge]], bool]:
    """The options of each card that best placements are made of, as edges between states; and whether that is proven.

    No edges: there is no placement (proven), or none was found. budget: transitions between states, roughly.
    First with dictionaries of states under a growing bound on the loss; where that gets long, with the table.
    """
    cells = prod(kind.units + 1 for kind in kinds)
    plain = cells * sum(map(len, cards)) <= min(_PLAIN, budget)
    p = problem(kinds, cards, [0] * len(kinds) if plain else prices(kinds, cards))
    largest, everything = max(options[-1][0] for options in p.options), sum(options[-1][0] for options in p.options)

    def tabular(limit: int) -> int:
        return sum(_ROW + cells // _CELLS for options in p.options for loss, _ in options if loss <= limit)

    limit = everything if plain else largest // _FIRST
    while True:
        most = budget if plain else min(tabular(limit), budget)
        layers, took = sweep(p, limit, most=most)
        budget -= took
        if layers is None:
            break
        if p.goal in layers[-1]:
            return edges(p, layers), True
        if limit == everything:
            return [], True
        limit = min(2 * limit + 1, everything)
    while (cost := tabular(limit)) <= budget:
        budget -= cost
        floor, bound = table(p, limit)
        if bound is not None and bound <= limit or limit == everything:
            layers, _ = sweep(p, min(bound or 0, everything), floor=floor)
            return edges(p, layers) if layers and p.goal in layers[-1] else [], True
        limit = min(4 * limit + 1 if bound is None else bound, everything)
    layers, _ = sweep(p, everything, width=1 + max(0, budget) // sum(map(len, cards)))
    return edges(p, layers) if layers and p.goal in layers[-1] else [], False


def edges(p: Problem, layers: Layers) -> list[list[Edge]]:
    """Per card the steps of the placements with the least loss.

    Of equal cards the first has the most of the first kind, and so on: any other order comes later (`lowest`).
    """
    alive: set[Node] = {(p.goal, 0)}
    found: list[list[Edge]] = []
    for i in range(len(p.options) - 1, -1, -1):
        before, after, here = layers[i], layers[i + 1], list[Edge]()
        for state, least in sorted(alive):
            lost = after[state]
            for loss, code in p.options[i]:
                if loss > lost:
                    break
                if code >= least and before.get(state + code) == lost - loss:
                    here.append(((state + code, code if p.equal[i] else 0), (state, least), code))
        found.append(here)
        alive = {edge[0] for edge in here}
    return found[::-1]


def lowest(kinds: Sequence[Kind], order: Sequence[int], steps: list[list[Edge]]) -> list[tuple[int, ...]]:
    """Of all placements along `steps` the first in order: per container of the ask the positions of its cards.

    order: the position of the card of each step. Container by container in the ask's order: what is left for the
    others of its kind can be shared out among them whenever no card has more than their number.
    """
    chosen: list[tuple[int, ...]] = []
    bit_of = [1 << max(order) - position for position in order]
    for kind in kinds:
        already = [0] * len(steps)
        for others in range(len(kind.members) - 1, -1, -1):
            bits = _lowest_for(kind, others, already, bit_of, steps)
            cards = [i for i, bit in enumerate(bit_of) if bits & bit]
            for i in cards:
                already[i] += 1
            steps = [
                [edge for edge in here if 0 <= kind.count(edge[2]) - already[i] <= others]
                for i, here in enumerate(steps)
            ]
            chosen.append(tuple(sorted(order[i] for i in cards)))
    return chosen


def _lowest_for(
    kind: Kind, others: int, already: Sequence[int], bit_of: Sequence[int], steps: list[list[Edge]]
) -> int:
    """The cards of one container as bits, the lowest card the highest bit: the largest number is the first in order.

    already: containers of its kind per card that come before it; `others` of them come after it.
    """
    best = {(steps[0][0][0], 0): 0}
    for i, here in enumerate(steps):
        reached: dict[tuple[Node, int], int] = {}
        for before, after, code in here:
            spare = kind.count(code) - already[i]
            for count in range(kind.container.cards + 1):
                bits = best.get((before, count))
                if bits is None:
                    continue
                if spare <= others:
                    reached[after, count] = max(bits, reached.get((after, count), 0))
                if spare:
                    reached[after, count + 1] = max(bits + bit_of[i], reached.get((after, count + 1), 0))
        best = reached
    return next(bits for (_, count), bits in best.items() if count == kind.container.cards)
