"""The exact solver. It decides which containers go onto which cards so that the total worth of the cards is highest.

`placement` and `evictions` call it.

Problem
    Each card has options: the configurations (numbers of each kind of container) that fit it, each with a worth.
    Choose one option per card so that every kind gets exactly its units, the number of cards that its containers need,
    and the total worth is highest.
    Among placements of equal worth, the one with the lowest card indexes is chosen, container by container in the order
    of the request.

Why it is exact
    1. Prices. Each kind has a price per card. The gain of an option is its worth minus the prices of its containers.
       The loss of an option is the gain of the card's best option minus its own gain, so it is at least 0. Every
       placement pays the same prices in total, Σ price × units, because it places exactly the units. So for any prices
       total loss = constant − total worth, and the placements with the least loss are those with the highest worth.
       Good prices (Lagrange multipliers) give nearly all options a large loss, so that few options have to be tried.
       With other prices the result is the same.
    2. Limit. A state is the number of units that each kind still needs. `_reach` finds the least loss of every state
       after each card, over all placements that lose at most `limit`. It leaves a state out only if the remaining cards
       cannot take what is left (`caps`), or if a lower bound on the loss of the remaining cards exceeds the limit. So
       if the goal is reached within the limit, the least loss found is the least of all. If the goal is not reached,
       every placement loses more, and the limit is raised, up to `most_lost`, which no placement exceeds. If the goal
       is not reached then either, there is no placement.
    3. Lower bounds. `_table` is the same recursion backwards over all states at once, without caps and with losses
       rounded down, so its values never exceed the true loss.
    4. Ties. `_edges` walks back from the goal over all options that lie on placements with the least loss. For
       consecutive equal cards it keeps only placements whose codes do not increase from card to card. Exchanging the
       options of two equal cards does not change the loss, and the kept order comes first in `lowest`. `lowest` then
       fixes the cards of one container after the other. It always takes the lowest cards that some kept placement
       allows.

All values are exact integers, except for floats in the search for prices, and table entries, which are rounded down.
Steps are charged to a budget, and the number of states is bounded, so no pod costs unbounded time or memory. If the
budget ends, a narrow search follows, which keeps only the states with the least loss. It may find a good placement, but
proves nothing.

You may change the order of the two methods (dictionaries of reached states, tables of all states), their thresholds,
and the way in which prices are found. Points 1 to 4 must hold.
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
"""The worth of a configuration on a card, compared with the card without the pod, and the code of the configuration."""

Node = tuple[int, int]
"""A state, and the lowest code that the card before it may have."""

Edge = tuple[Node, Node, int]
"""The node before a card, the node after it, and the code of the card's configuration."""

_Layers = list[dict[int, int]]
"""The states that are reached before each card and after the last one, each with its least loss."""

_Floor = Callable[[int, int], int]
"""Returns a lower bound on the loss from a state to the goal, given the number of a card and the state before it."""

_Floats = NDArray[np.float64]

# Steps and thresholds were measured on the corpus of bench/corpus.py. A step is one transition between two states.
_MAX_PLAIN = 4000  # a search of at most this many steps costs less than finding prices
_ROW_STEPS, _CELLS_PER_STEP = 16, 64  # the table takes _ROW_STEPS per option, and a step for each _CELLS_PER_STEP cells
_FLOOR_STEPS = 12  # steps to look up a lower bound
_CHARGE_EVERY = 1000  # the number of transitions that are charged at once
_EDGE_STEPS = 4  # steps for an edge that is kept, so that the budget also limits the memory for edges
EDGE = 4
"""The steps of `lowest` for one edge and each number of cards that a container may already have before the edge."""

_FIRST_LIMIT = 512  # the first limit on the loss is the largest loss of an option, divided by this
_BITS = 40  # losses in tables are rounded down to 2^-40 of the largest loss, so that they fit machine integers
_UNREACHABLE = 1 << 60  # the value in tables of a state from which the goal cannot be reached

_MOST_STATES = 200_000  # the most states that are kept at the same time; each takes about 150 bytes
_MOST_TABLE_CELLS = 4 << 20  # the most cells of a table; each takes eight bytes


@dataclass(frozen=True, slots=True)
class _Problem:
    """The problem in integers, card by card. States are packed like configurations, with every guard bit set.

    Attributes:
        options: For each card, the loss and the code of each option, the least loss first.
        equal: For each card, whether it has the same options as the card before it.
        caps: For each card, the most that it and the cards after it can take, packed like a state. A last entry stands
            for no card.
        start: The state before the first card.
        goal: The state in which all containers are placed.
        most_lost: The loss that no placement exceeds. If it is negative, there is no placement.
    """

    kinds: tuple[Kind, ...]
    options: tuple[tuple[tuple[int, int], ...], ...]
    equal: tuple[bool, ...]
    caps: tuple[int, ...]
    start: int
    goal: int
    most_lost: int


def solve(kinds: tuple[Kind, ...], cards: Sequence[Sequence[Option]], budget: Budget) -> tuple[list[list[Edge]], bool]:
    """Return the options of each card that the best placements use, as edges, and whether the result is proven.

    No edges mean that there is no placement if the result is proven, and otherwise that none was found. A quarter of
    the budget is for the narrow search.
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
    """Return the problem at good prices, and whether it is so small that all prices are 0.

    Raises Exhausted if the budget ends.
    """
    options = sum(map(len, cards))
    budget.take(options * (2 + len(kinds)))
    plain = prod(kind.units + 1 for kind in kinds) * options <= min(_MAX_PLAIN, budget.left)
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
    # No placement is worth more than the dual value at these prices, and none is worth less than the least worth of all
    # cards together. So no placement loses more than the difference, and none more than the worst option of each card.
    dual = sum(max(worth - paid[code] for worth, code in card) for card in cards)
    dual += sum(p * kind.units for kind, p in zip(kinds, price, strict=True))
    most_lost = min(dual - sum(min(card)[0] for card in cards), sum(card[-1][0] for card in options))
    return _Problem(kinds, tuple(options), tuple(equal), tuple(reversed(caps)), start, goal, most_lost)


def _exact(p: _Problem, budget: Budget, *, plain: bool) -> list[list[Edge]] | None:
    """Return the edges of the best placements, or None if there is no placement.

    The limit on the loss grows until a placement lies within it. Dictionaries of reached states come first. Once a
    table of all states is cheaper, its lower bounds prune the search, and its upper bound is the limit.

    Raises Exhausted if the budget ends or there are too many states to store.
    """
    cells = prod(kind.units + 1 for kind in p.kinds)
    everything = p.most_lost

    def steps_of_table(limit: int) -> int:
        return sum(
            _ROW_STEPS + cells // _CELLS_PER_STEP for options in p.options for loss, _ in options if loss <= limit
        )

    limit = everything if plain else min(everything, max(options[-1][0] for options in p.options) // _FIRST_LIMIT)
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
    """Return the edges of a good placement, or none, and False, because nothing is proven.

    Only as many states are kept per card as the budget allows.
    """
    try:
        layers = _reach(p, p.most_lost, budget, width=1 + budget.left // (2 * sum(map(len, p.options))))
        steps = _edges(p, layers, budget) if layers and p.goal in layers[-1] else []
    except Exhausted:
        return [], False
    # The kept states may have no placement with equal cards in order; then a layer has no edges.
    return steps if all(steps) else [], False


def _reach(
    p: _Problem,
    limit: int,
    budget: Budget,
    *,
    most: float = inf,
    width: int | None = None,
    floor: _Floor | None = None,
) -> _Layers | None:
    """Return the states on the way to placements that lose at most `limit`.

    Return None if that takes more than `most` transitions. Raises Exhausted if the budget ends or there are too many
    states to store.

    Args:
        most: The most transitions.
        width: The most states to keep per card, those with the least loss; None for no limit.
        floor: The lower bound by which states are left out, or None.
    """
    layers: _Layers = [{p.start: 0}]
    goal = p.goal
    transitions = charged = kept = 0
    for i, options in enumerate(p.options, 1):
        cap, layer = p.caps[i], dict[int, int]()
        for state, lost in layers[-1].items():
            affordable = limit - lost
            for loss, code in options:
                if loss > affordable:
                    break
                transitions += 1
                after = state - code
                # Both checks compare all fields at once. A field of `after` that is below 0 has borrowed its guard bit:
                # there are too many containers of its kind. A field of cap − after that is below 0 has borrowed it too:
                # more containers are left than the remaining cards can take.
                if after & goal != goal or (cap - (after ^ goal)) & goal != goal:
                    continue
                total, known = lost + loss, layer.get(after)
                if known is None or total < known:
                    layer[after] = total
            if transitions - charged > _CHARGE_EVERY:
                _charge(budget, transitions - charged, kept + len(layer))
                charged = transitions
                if transitions > most:
                    return None
        if transitions > most:
            return None
        if floor is not None:
            layer = _within(limit, layer, i, floor, budget)
        if width is not None and len(layer) > width:
            layer = dict(sorted(layer.items(), key=lambda row: (row[1], row[0]))[:width])
        kept += len(layer)
        layers.append(layer)
    budget.take(transitions - charged)
    return layers


def _charge(budget: Budget, steps: int, states: int) -> None:
    budget.take(steps)
    if states > _MOST_STATES:
        raise Exhausted


def _within(limit: int, layer: dict[int, int], card: int, floor: _Floor, budget: Budget) -> dict[int, int]:
    """Return the states from which the goal may be reached with at most `limit` loss."""
    budget.take(_FLOOR_STEPS * len(layer))
    return {state: lost for state, lost in layer.items() if lost + floor(card, state) <= limit}


def _table(p: _Problem, limit: int) -> tuple[_Floor, int | None]:
    """Return a lower bound on the loss from every state to the goal, and an upper bound on the least loss.

    Only options that lose at most `limit` each are considered. The upper bound, which is close to the least loss of a
    placement, is None if these options make no placement.
    """
    shape = tuple(kind.units + 1 for kind in p.kinds)
    unit = max(options[-1][0] for options in p.options) or 1
    after = np.full(shape, _UNREACHABLE, dtype=np.int64)
    after[(0,) * len(shape)] = 0
    rows = [after]
    for options in reversed(p.options):
        before = np.full(shape, _UNREACHABLE, dtype=np.int64)
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
    # The loss of each option on the way was rounded down by less than one.
    return floor, ((best + len(p.options)) * unit >> _BITS) + 1 if best < _UNREACHABLE else None


# Prices are Lagrange multipliers: if every card by itself chooses the option that is worth most after paying them, the
# cards together choose almost exactly what is needed. Any prices are right (point 1), so floats are good enough here.

_SMOOTHING = tuple(0.1 * 0.5**i for i in range(9))  # temperatures, in parts of the largest worth
_MAX_ITERATIONS = 6  # the most iterations per temperature
_LONGEST_MOVE = 4.0  # the largest change of a price in an iteration, in temperatures
_BALANCED = 0.1  # the next temperature follows once fewer cards than this are missing or in excess
_MARGIN = 1e-6  # far above the rounding errors of floats
_MOST_PRICE_CELLS = 1 << 20  # the most cells of the matrices cards × configurations and configurations × kinds
_ITERATION_STEPS, _STEPS_PER_CELL, _MULTIPLICATIONS_PER_STEP = 400, 0.12, 2_000


def _prices(kinds: Sequence[Kind], cards: Sequence[Sequence[Option]], budget: Budget) -> list[int]:
    """Return the price of each kind, in the unit of the options' worth.

    The prices minimize the dual approximately: the sum over the cards of their best gain (point 1) plus Σ price ×
    units. Newton's method is used on a softmax smoothing of the dual, with falling temperatures. All prices are 0 if
    the matrices would be too large. Once a third of the budget is used up, the best prices so far are returned.
    """
    codes = sorted({code for options in cards for _, code in options})
    if len(codes) * max(len(cards), len(kinds)) > _MOST_PRICE_CELLS:
        return [0] * len(kinds)
    column = {code: j for j, code in enumerate(codes)}
    counts = np.array([[kind.count(code) for kind in kinds] for code in codes], float)
    units = np.array([kind.units for kind in kinds], float)
    scale = max((abs(worth) for options in cards for worth, _ in options), default=0) or 1
    values = np.full((len(cards), len(codes)), -np.inf)
    for i, options in enumerate(cards):
        for worth, code in options:
            values[i, column[code]] = worth / scale
    found = _minimize_dual(values, counts, units, budget)
    return [round(price * (1 << _BITS)) * scale >> _BITS for price in found.tolist()]


def _minimize_dual(values: _Floats, counts: _Floats, units: _Floats, budget: Budget) -> _Floats:
    """Return the prices with the lowest dual that was found.

    A dual below the least worth that a placement can have proves that there is none, so the search for prices can end.

    Args:
        values: [cards, configurations], the worth of each option.
        counts: [configurations, kinds], the number of containers of each kind.
        units: [kinds], the number of cards that each kind needs.
    """
    prices = best = np.zeros(len(units))
    lowest_dual = np.inf
    multiplications = len(units) ** 2 * (len(counts) + len(units))
    iteration = _ITERATION_STEPS + int(values.size * _STEPS_PER_CELL) + multiplications // _MULTIPLICATIONS_PER_STEP
    affordable = budget.left // 3 // iteration
    least = np.where(np.isfinite(values), values, np.inf).min(axis=1).sum()
    for smoothing in _SMOOTHING:
        for _ in range(_MAX_ITERATIONS):
            if not affordable:
                return best
            affordable -= 1
            budget.take(iteration)
            left = values - counts @ prices
            top = left.max(axis=1)
            dual = top.sum() + prices @ units
            if dual < lowest_dual:
                lowest_dual = dual
                best = prices
            if dual < least - _MARGIN:
                return prices
            share = np.exp((left - top[:, None]) / smoothing)
            share /= share.sum(axis=1)[:, None]
            chosen = share @ counts
            missing = units - chosen.sum(axis=0)
            if np.abs(missing).max() < _BALANCED:
                break
            curvature = (counts.T * share.sum(axis=0)) @ counts - chosen.T @ chosen
            curvature[np.diag_indices(len(units))] += 1e-4  # otherwise a kind that fits nowhere makes it singular
            step = np.linalg.solve(curvature, missing) * smoothing
            longest = np.abs(step).max()
            prices = prices - step * min(1.0, _LONGEST_MOVE * smoothing / longest)
    return best


def _edges(p: _Problem, layers: _Layers, budget: Budget) -> list[list[Edge]]:
    """Return, for each card, the edges of the placements with the least loss.

    Of placements that differ only in the order of equal cards, only the one is kept that `lowest` would choose: along
    consecutive equal cards, the codes do not increase. Raises Exhausted if the budget ends.
    """
    alive: set[Node] = {(p.goal, 0)}
    found: list[list[Edge]] = []
    for i in range(len(p.options) - 1, -1, -1):
        before, after, here = layers[i], layers[i + 1], list[Edge]()
        for state, least in sorted(alive):
            lost = after[state]
            tried = 1
            for loss, code in p.options[i]:
                if loss > lost:
                    break
                tried += 1
                if code >= least and before.get(state + code) == lost - loss:
                    here.append(((state + code, code if p.equal[i] else 0), (state, least), code))
            budget.take(tried)
        budget.take(_EDGE_STEPS * len(here))
        found.append(here)
        alive = {edge[0] for edge in here}
    return found[::-1]


def any_path(steps: list[list[Edge]]) -> list[list[Edge]]:
    """Return the edges of one placement, for callers whose budget does not suffice for `lowest` with all edges.

    Every edge leads to the goal, so no choice has to be taken back.
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
    """Return the placement along these edges with the lowest cards, as the positions of each container's cards.

    One container after the other takes the lowest cards. The other containers of its kind then share what is left on
    the cards. That is impossible only if a card is left with more containers of the kind than are still to come. The
    edges of such a choice are dropped. Raises Exhausted if the budget ends.

    Args:
        order: The position of the card of each step.
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
    """Return the cards of one container as bits. The lowest card has the highest bit, so the largest number is best.

    Args:
        others: The number of containers of the kind that choose their cards later.
        already: For each card, the number of containers of the kind that have chosen it.
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
