"""The exact search: all placements up to a growing bound on the loss, until there is one.

First with dictionaries of the states reached; where that gets long, with a table of all states.
"""

from collections.abc import Callable, Sequence
from math import inf, prod

import numpy as np

from scheduler.placement.configurations import Kind
from scheduler.placement.prices import prices
from scheduler.placement.problem import Layers, Option, Problem, problem
from scheduler.placement.ties import Edge, edges

# Measured on the corpus of bench/corpus.py, in transitions between two states in dictionaries:
_PLAIN = 4000  # a search this short costs less than finding prices
_ROW, _CELLS = 16, 64  # the table takes this long per option, and one more for so many of its cells

_FIRST = 512  # the first bound on the loss, as a part of the largest loss of an option
_BITS, _FAR = 40, 1 << 60

Floor = Callable[[int, int], int]
"""(number of a card, state before it) → a lower bound on the loss from there to the goal."""


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

    No edges: there is no placement (proven), or none was found. budget: transitions between states, roughly; the
    last quarter is for a narrow search that finds something good without proof.
    """
    cells = prod(kind.units + 1 for kind in kinds)
    plain = cells * sum(map(len, cards)) <= min(_PLAIN, budget)
    p = problem(kinds, cards, [0] * len(kinds) if plain else prices(kinds, cards))
    everything, reserve = p.most_lost, budget // 4
    if everything < 0:
        return [], True

    def tabular(limit: int) -> int:
        return sum(_ROW + cells // _CELLS for options in p.options for loss, _ in options if loss <= limit)

    limit = everything if plain else min(everything, max(options[-1][0] for options in p.options) // _FIRST)
    budget -= 0 if plain else reserve
    while True:
        most = budget if plain else min(tabular(limit) // 2, budget)
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
        if (bound is not None and bound <= limit) or limit == everything:
            layers, _ = sweep(p, min(bound or 0, everything), floor=floor)
            return edges(p, layers) if layers and p.goal in layers[-1] else [], True
        limit = min(4 * limit + 1 if bound is None else bound, everything)
    layers, _ = sweep(p, everything, width=1 + reserve // sum(map(len, cards)))
    steps = edges(p, layers) if layers and p.goal in layers[-1] else []
    return steps if all(steps) else [], False  # what is kept need not have equal cards in order
