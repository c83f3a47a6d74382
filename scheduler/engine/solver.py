"""The exact solver: which containers go onto which cards, so that the sum of the cards' worths is highest.

`place` and the eviction search call `solve` for the best placements and `lowest` for the first of them.

Problem
    Each card has options: the configurations (numbers of each kind of container) that fit on it, each with a worth.
    Choose one option per card so that every kind gets exactly its number of cards and the sum of worths is highest.
    Among equal sums the placement with the lowest card indexes wins, container by container in the request's order.

Why it is exact
    1. Prices. Give each kind a price per card. An option's loss on a card is what it gives up there against the card's
       best option, worth minus prices paid: loss ≥ 0. Every placement pays the same prices in total, Σ price × units,
       because it places exactly the units. So total loss = constant − total worth, whatever the prices, and the
       placements with the least loss are those with the highest worth. Prices need not be right, only cheap: good ones
       (Lagrange multipliers) make nearly all options lose much, so that few of them have to be looked at.
    2. Bound. `_reach` finds the least loss of every state (units that each kind still needs) after each card, over all
       placements that lose at most `limit`. It leaves a state out only if the remaining cards cannot take what is left
       (`caps`), or if a lower bound on the rest of the way shows more loss than `limit`. Hence: if the goal is reached
       within `limit`, the least loss found is the least of all. If not, no placement loses so little, and the limit is
       raised, up to `most_lost`, which no placement exceeds; then there is none.
    3. Lower bounds. `_table` is the same recursion backwards over all states at once, without caps and with losses
       rounded down, so its values never exceed the true loss.
    4. Ties. `_edges` walks back from the goal over all options that lie on placements with the least loss. Of equal
       cards in a row it keeps only placements whose codes do not increase from card to card: exchanging what is on two
       equal cards keeps the loss, and the kept order is the one that comes first. `lowest` then fixes the cards of one
       container after the other, always the lowest that some kept placement allows.

Everything is integers, except where prices are sought and table entries rounded down. Steps are charged to a budget,
and the number of states is bounded, so that no pod costs unbounded time or memory. A search whose budget ends is
followed by a narrow one, which keeps the states of least loss only: a good placement, without proof.

What may change: the order of the two methods (dictionaries of reached states, tables of all states), their thresholds,
the way to prices. What must hold: points 1 to 4, and that `tests/scheduler/engine/test_solver.py` compares each method
with an exhaustive search.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from operator import mul

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.configurations import Kind
from scheduler.engine.effort import Budget, Exhausted

Option = tuple[int, int]
"""(worth of a configuration on a card, against leaving the card alone; its code)."""

Node = tuple[int, int]
"""(state, the least code that the card before it may have)."""

Edge = tuple[Node, Node, int]
"""(before a card, after it, code of the card's configuration)."""

_Layers = list[dict[int, int]]
"""Before each card, and after the last: the reached states with the least loss of each."""

_Floor = Callable[[int, int], int]
"""(number of a card, state before it) → a lower bound on the loss from there to the goal."""

_Floats = NDArray[np.float64]

# Steps and thresholds are measured on the corpus of bench/corpus.py; the unit is a transition between two states.
_PLAIN = 4000  # a search this short costs less than finding prices
_ROW, _CELLS = 16, 64  # the table takes _ROW per option, and one more for each _CELLS of its cells
_FLOOR = 12  # steps to look a lower bound up
_CHARGED = 1000  # transitions that are charged at once
_KEPT = 4  # steps for an edge that is kept: what bounds the steps bounds the memory too
EDGE = 4
"""Steps for an edge and one number of cards of a container."""

_FIRST = 512  # the first limit on the loss, as a part of the largest loss of an option
_BITS = 40  # losses in tables are rounded down to 2^-40 of the largest, so that they fit machine integers
_FAR = 1 << 60  # in tables: there is no way from here to the goal

_MOST_STATES = 200_000  # kept at the same time; each takes some 150 bytes
_MOST_TABLE_CELLS = 4 << 20  # of eight bytes each


@dataclass(frozen=True, slots=True)
class _Problem:
    """The problem in integers, card by card. States are packed as configurations are, with every guard bit set.

    options: (loss, code) of each card, least loss first. equal: whether a card has the same options as the one before.
    caps: the most that the cards from this one on can take, and one entry more for the end.
    most_lost: no placement loses more; negative where there is none.
    """

    kinds: tuple[Kind, ...]
    options: tuple[tuple[tuple[int, int], ...], ...]
    equal: tuple[bool, ...]
    caps: tuple[int, ...]
    start: int
    goal: int
    most_lost: int


def solve(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: Budget) -> tuple[list[list[Edge]], bool]:
    """Return the options of each card that best placements are made of, and whether it is proven that they are best.

    The options are edges between states. No edges: there is no placement (proven), or none was found. The last quarter
    of the budget is for a narrow search, which finds something good without proof.
    """
    narrow = Budget(budget.effort, budget.left // 4)
    exact = Budget(budget.effort, budget.left - narrow.left)
    try:
        p, plain = _priced(kinds, cards, exact)
    except Exhausted:
        return [], False
    if p.most_lost < 0:
        return [], True
    try:
        return _exact(p, exact, plain=plain) or [], True
    except Exhausted:
        return _narrow(p, narrow)


def _priced(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: Budget) -> tuple[_Problem, bool]:
    """Return the problem at good prices, and whether it is so small that any prices do. Raises Exhausted."""
    options = sum(map(len, cards))
    budget.take(options * (2 + len(kinds)))
    plain = prod(kind.units + 1 for kind in kinds) * options <= min(_PLAIN, budget.left)
    return _problem(kinds, cards, [0] * len(kinds) if plain else _prices(kinds, cards, budget)), plain


def _problem(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], price: Sequence[int]) -> _Problem:
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
    # The dual value at these prices bounds every placement's worth from above, so no placement loses more than from
    # there down to the least worths of all cards; and none loses more than the worst option of each card.
    dual = sum(max(worth - paid[code] for worth, code in card) for card in cards)
    dual += sum(p * kind.units for kind, p in zip(kinds, price, strict=True))
    most_lost = min(dual - sum(min(card)[0] for card in cards), sum(card[-1][0] for card in options))
    return _Problem(kinds, tuple(options), tuple(equal), tuple(reversed(caps)), start, goal, most_lost)


def _exact(p: _Problem, budget: Budget, *, plain: bool) -> list[list[Edge]] | None:
    """Return the edges of the best placements; None where there is no placement. Raises Exhausted.

    The limit on the loss grows until a placement lies within it. Dictionaries of reached states come first. Once a
    table of all states is cheaper, its lower bounds prune the rest, and its upper bound gives the limit at once.
    """
    cells = prod(kind.units + 1 for kind in p.kinds)
    everything = p.most_lost

    def steps_of_table(limit: int) -> int:
        return sum(_ROW + cells // _CELLS for options in p.options for loss, _ in options if loss <= limit)

    limit = everything if plain else min(everything, max(options[-1][0] for options in p.options) // _FIRST)
    tables = cells * (len(p.options) + 1) <= _MOST_TABLE_CELLS
    while True:
        layers = _reach(p, limit, budget, most=steps_of_table(limit) // 2 if tables and not plain else inf)
        if layers is None:
            break
        if p.goal in layers[-1]:
            return _edges(p, layers, budget)
        if limit == everything:
            return None
        limit = min(2 * limit + 1, everything)
    while True:
        budget.take(steps_of_table(limit))
        floor, bound = _table(p, limit)
        if (bound is not None and bound <= limit) or limit == everything:
            layers = _reach(p, min(bound or 0, everything), budget, floor=floor)
            return _edges(p, layers, budget) if layers and p.goal in layers[-1] else None
        limit = min(4 * limit + 1 if bound is None else bound, everything)


def _narrow(p: _Problem, budget: Budget) -> tuple[list[list[Edge]], bool]:
    """Find a good placement without proof: keep only as many states per card as the budget allows."""
    try:
        layers = _reach(p, p.most_lost, budget, width=1 + budget.left // (2 * sum(map(len, p.options))))
        steps = _edges(p, layers, budget) if layers and p.goal in layers[-1] else []
    except Exhausted:
        return [], False
    return steps if all(steps) else [], False  # the states that are kept need not have equal cards in order


def _reach(
    p: _Problem,
    limit: int,
    budget: Budget,
    *,
    most: float = inf,
    width: int | None = None,
    floor: _Floor | None = None,
) -> _Layers | None:
    """Return the states on the way to placements that lose at most `limit`; None: it takes over `most` transitions.

    width: keep only so many states per card, those with the least loss. floor: leave states out that this bound rules
    out. Raises Exhausted where the budget is used up, or the states are too many to keep.
    """
    layers: _Layers = [{p.start: 0}]
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
                # All fields at once: a field that went below 0 has borrowed its guard bit (too many containers), and so
                # has one of cap − after where more is left than the remaining cards can take.
                if after & goal != goal or (cap - (after ^ goal)) & goal != goal:
                    continue
                total, known = lost + loss, layer.get(after)
                if known is None or total < known:
                    layer[after] = total
            if took - charged > _CHARGED:
                _charge(budget, took - charged, kept + len(layer))
                charged = took
                if took > most:
                    return None
        if took > most:
            return None
        if floor is not None:
            layer = _within(limit, layer, i, floor, budget)
        if width is not None and len(layer) > width:
            layer = dict(sorted(layer.items(), key=lambda row: (row[1], row[0]))[:width])
        kept += len(layer)
        layers.append(layer)
    budget.take(took - charged)
    return layers


def _charge(budget: Budget, steps: int, states: int) -> None:
    budget.take(steps)
    if states > _MOST_STATES:
        raise Exhausted


def _within(limit: int, layer: dict[int, int], card: int, floor: _Floor, budget: Budget) -> dict[int, int]:
    """Return the states from which the goal may be reached with no more loss than `limit`."""
    budget.take(_FLOOR * len(layer))
    return {state: lost for state, lost in layer.items() if lost + floor(card, state) <= limit}


def _table(p: _Problem, limit: int) -> tuple[_Floor, int | None]:
    """Return a lower bound on the loss from every state to the goal, with options that lose at most `limit` each.

    Also an upper bound, hardly above it, on the loss of the best placement; None: these options make none.
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
    # Each of the options on the way was rounded down by less than one.
    return floor, ((best + len(p.options)) * unit >> _BITS) + 1 if best < _FAR else None


# Prices: Lagrange multipliers. Where every card chooses by itself what is worth most after paying them, the cards
# together choose almost exactly what is needed. Any prices are right (point 1 above), so floats are good enough here.

_SMOOTHING = tuple(0.1 * 0.5**i for i in range(9))  # temperatures, in parts of the largest worth
_STEPS = 6  # at most, per temperature
_REACH = 4.0  # the longest step, in temperatures
_BALANCED = 0.1  # cards that may be missing or too many before the next temperature
_SURE = 1e-6  # far above the rounding of floats
_MOST_PRICE_CELLS = 1 << 20  # cards × configurations and configurations × kinds, of eight bytes each
_ITERATION, _PER_CELL, _MULTIPLIED = 400, 0.12, 2_000  # steps: an iteration, a cell in it, multiplications in a step


def _prices(kinds: Sequence[Kind], cards: Sequence[Sequence[Option]], budget: Budget) -> list[int]:
    """Return the price of each kind, in the unit of the options' worth.

    Minimises the dual, Σ over cards of the best (worth − prices paid) + Σ price × units, by Newton's method on its
    softmax smoothing, ever less smooth. All prices are 0 where the matrices would be too large, and the best prices so
    far are taken where a third of the budget is used up.
    """
    codes = sorted({code for options in cards for _, code in options})
    if len(codes) * max(len(cards), len(kinds)) > _MOST_PRICE_CELLS:
        return [0] * len(kinds)
    column = {code: j for j, code in enumerate(codes)}
    counts = np.array([[kind.count(code) for kind in kinds] for code in codes], float)
    units = np.array([kind.units for kind in kinds], float)
    scale = max((abs(worth) for options in cards for worth, _ in options), default=0) or 1
    worths = np.full((len(cards), len(codes)), -np.inf)
    for i, options in enumerate(cards):
        for worth, code in options:
            worths[i, column[code]] = worth / scale
    found = _minimise(worths, counts, units, budget)
    return [round(price * (1 << _BITS)) * scale >> _BITS for price in found.tolist()]


def _minimise(worths: _Floats, counts: _Floats, units: _Floats, budget: Budget) -> _Floats:
    """Return the prices with the lowest dual met on the way. worths: cards × configurations; counts: × kinds.

    A dual below the worth of any placement shows that there is none, and is good enough.
    """
    now = best = np.zeros(len(units))
    lowest_dual = np.inf
    iteration = _ITERATION + int(worths.size * _PER_CELL) + len(units) ** 2 * (len(counts) + len(units)) // _MULTIPLIED
    affordable = budget.left // 3 // iteration
    least = np.where(np.isfinite(worths), worths, np.inf).min(axis=1).sum()
    for smoothing in _SMOOTHING:
        for _ in range(_STEPS):
            if not affordable:
                return best
            affordable -= 1
            budget.take(iteration)
            left = worths - counts @ now
            top = left.max(axis=1)
            dual = top.sum() + now @ units
            if dual < lowest_dual:
                lowest_dual = dual
                best = now
            if dual < least - _SURE:
                return now
            share = np.exp((left - top[:, None]) / smoothing)
            share /= share.sum(axis=1)[:, None]
            chosen = share @ counts
            missing = units - chosen.sum(axis=0)
            if np.abs(missing).max() < _BALANCED:
                break
            curvature = (counts.T * share.sum(axis=0)) @ counts - chosen.T @ chosen
            curvature[np.diag_indices(len(units))] += 1e-4  # where a kind fits nowhere, the matrix would be singular
            step = np.linalg.solve(curvature, missing) * smoothing
            longest = np.abs(step).max()
            now = now - step * min(1.0, _REACH * smoothing / longest)
    return best


def _edges(p: _Problem, layers: _Layers, budget: Budget) -> list[list[Edge]]:
    """Return per card the edges of the placements with the least loss. Raises Exhausted.

    Of equal cards the first has the most of the first kind, and so on: any other order comes later in `lowest`.
    """
    alive: set[Node] = {(p.goal, 0)}
    found: list[list[Edge]] = []
    for i in range(len(p.options) - 1, -1, -1):
        before, after, here = layers[i], layers[i + 1], list[Edge]()
        for state, least in sorted(alive):
            lost = after[state]
            looked = 1
            for loss, code in p.options[i]:
                if loss > lost:
                    break
                looked += 1
                if code >= least and before.get(state + code) == lost - loss:
                    here.append(((state + code, code if p.equal[i] else 0), (state, least), code))
            budget.take(looked)
        budget.take(_KEPT * len(here))
        found.append(here)
        alive = {edge[0] for edge in here}
    return found[::-1]


def any_path(steps: list[list[Edge]]) -> list[list[Edge]]:
    """Return one placement of those along `steps`, for callers that cannot afford to compare them.

    Every edge leads on to the goal, so no step has to be taken back.
    """
    node: Node = steps[0][0][0]
    path: list[list[Edge]] = []
    for here in steps:
        edge = min(edge for edge in here if edge[0] == node)
        path.append([edge])
        node = edge[1]
    return path


def lowest(
    kinds: Sequence[Kind], order: Sequence[int], steps: list[list[Edge]], budget: Budget
) -> list[tuple[int, ...]]:
    """Return the first of all placements along `steps`: for each container of the request the positions of its cards.

    order: the position of the card of each step. What is left for the other containers of a kind can be shared out
    among them whenever no card has more than their number, so one container after the other may take the lowest cards.
    Raises Exhausted.
    """
    chosen: list[tuple[int, ...]] = []
    bit_of = [1 << max(order) - position for position in order]
    for kind in kinds:
        already = [0] * len(steps)
        for others in range(len(kind.members) - 1, -1, -1):
            budget.take(EDGE * sum(map(len, steps)) * (1 + kind.container.cards))
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


def _lowest_for(kind: Kind, others: int, already: Sequence[int], bit_of: Sequence[int], steps: list[list[Edge]]) -> int:
    """Return the cards of one container as bits; the lowest card has the highest bit, so the largest number is first.

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
