"""The exact search: all placements up to a growing bound on the loss, until there is one.

First with dictionaries of the states reached; where that gets long, with a table of all states. Every step is charged
to a budget, and the states that are kept at the same time are bounded as well, so that a pod that is made to keep the
search busy costs neither unbounded time nor unbounded memory.
"""

from collections.abc import Callable, Sequence
from math import inf, prod

import numpy as np

from scheduler.engine.configurations import Kind
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.prices import prices
from scheduler.engine.problem import Layers, Option, Problem, problem
from scheduler.engine.ties import Edge, edges

# Measured on the corpus of bench/corpus.py, in transitions between two states in dictionaries:
_PLAIN = 4000  # a search this short costs less than finding prices
_ROW, _CELLS = 16, 64  # the table takes this long per option, and one more for so many of its cells

_FIRST = 512  # the first bound on the loss, as a part of the largest loss of an option
_BITS, _FAR = 40, 1 << 60

_MOST_STATES = 200_000  # kept at the same time; each takes some 150 bytes
_MOST_CELLS = 4 << 20  # of the table, of eight bytes each
_CHARGED = 1000  # transitions that are charged at once
_FLOOR = 12  # steps to look a lower bound up

Floor = Callable[[int, int], int]
"""(number of a card, state before it) → a lower bound on the loss from there to the goal."""


def sweep(
    p: Problem,
    limit: int,
    budget: Budget,
    *,
    most: float = inf,
    width: int | None = None,
    floor: Floor | None = None,
) -> Layers | None:
    """All states on the way to placements that lose at most `limit`; None: takes over `most` transitions.

    width: keep only so many states per card, those with the least loss. Raises Exhausted where the budget is used up,
    or the states are too many to keep.
    """
    layers: Layers = [{p.start: 0}]
    goal, took, charged, kept = p.goal, 0, 0, 0
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
            if took - charged > _CHARGED:
                _pay(budget, took - charged, kept + len(layer))
                charged = took
                if took > most:
                    return None
        if took > most:
            return None
        if floor is not None:
            budget.take(_FLOOR * len(layer))
            layer = {state: lost for state, lost in layer.items() if lost + floor(i, state) <= limit}
        if width is not None and len(layer) > width:
            layer = dict(sorted(layer.items(), key=lambda row: (row[1], row[0]))[:width])
        kept += len(layer)
        layers.append(layer)
    budget.take(took - charged)
    return layers


def _pay(budget: Budget, steps: int, kept: int) -> None:
    budget.take(steps)
    if kept > _MOST_STATES:
        raise Exhausted


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


def search(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: Budget) -> tuple[list[list[Edge]], bool]:
    """The options of each card that best placements are made of, as edges between states; and whether that is proven.

    No edges: there is no placement (proven), or none was found. The last quarter of the budget is for a narrow search
    that finds something good without proof.
    """
    narrow = Budget(budget.effort, budget.left // 4)
    exact = Budget(budget.effort, budget.left - narrow.left)
    try:
        p, plain = _problem(kinds, cards, exact)
    except Exhausted:
        return [], False
    if p.most_lost < 0:
        return [], True
    try:
        return _exact(p, exact, plain=plain) or [], True
    except Exhausted:
        return _narrow(p, narrow)


def _narrow(p: Problem, budget: Budget) -> tuple[list[list[Edge]], bool]:
    """Something good without proof: of each card only as many states as the budget allows, those with least loss."""
    try:
        layers = sweep(p, p.most_lost, budget, width=1 + budget.left // (2 * sum(map(len, p.options))))
        steps = edges(p, layers, budget) if layers and p.goal in layers[-1] else []
    except Exhausted:
        return [], False
    return steps if all(steps) else [], False  # what is kept need not have equal cards in order


def _problem(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: Budget) -> tuple[Problem, bool]:
    """The problem at good prices, and whether it is so small that any will do. Raises Exhausted."""
    options = sum(map(len, cards))
    budget.take(options * (2 + len(kinds)))
    plain = prod(kind.units + 1 for kind in kinds) * options <= min(_PLAIN, budget.left)
    return problem(kinds, cards, [0] * len(kinds) if plain else prices(kinds, cards, budget)), plain


def _exact(p: Problem, budget: Budget, *, plain: bool) -> list[list[Edge]] | None:
    """The edges of the best placements; None: there is no placement. Raises Exhausted."""
    cells = prod(kind.units + 1 for kind in p.kinds)
    everything = p.most_lost

    def tabular(limit: int) -> int:
        return sum(_ROW + cells // _CELLS for options in p.options for loss, _ in options if loss <= limit)

    limit = everything if plain else min(everything, max(options[-1][0] for options in p.options) // _FIRST)
    tables = cells * (len(p.options) + 1) <= _MOST_CELLS
    while True:
        layers = sweep(p, limit, budget, most=tabular(limit) // 2 if tables and not plain else inf)
        if layers is None:
            break
        if p.goal in layers[-1]:
            return edges(p, layers, budget)
        if limit == everything:
            return None
        limit = min(2 * limit + 1, everything)
    while True:
        budget.take(tabular(limit))
        floor, bound = table(p, limit)
        if (bound is not None and bound <= limit) or limit == everything:
            layers = sweep(p, min(bound or 0, everything), budget, floor=floor)
            return edges(p, layers, budget) if layers and p.goal in layers[-1] else None
        limit = min(4 * limit + 1 if bound is None else bound, everything)
