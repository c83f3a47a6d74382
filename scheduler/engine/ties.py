"""Of all best placements the first in order: lowest card indexes, in the ask's order of containers."""

from collections.abc import Sequence

from scheduler.engine.configurations import Kind
from scheduler.engine.effort import Budget
from scheduler.engine.problem import Layers, Problem

Node = tuple[int, int]
"""(state, the least code that the card before it may have)."""

Edge = tuple[Node, Node, int]
"""(before a card, after it, code of its configuration)."""


_KEPT = 4  # steps for an edge that is kept: what bounds the steps bounds the memory too

EDGE = 4
"""Steps for an edge and one number of cards of a container."""


def edges(p: Problem, layers: Layers, budget: Budget) -> list[list[Edge]]:
    """Per card the steps of the placements with the least loss. Raises Exhausted.

    Of equal cards the first has the most of the first kind, and so on: any other order comes later (`lowest`).
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
    """One placement of those along `steps`, as the only one: where telling them apart takes too long.

    Every edge leads on to the goal, so that no step is taken back.
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
    """Of all placements along `steps` the first in order: per container of the ask the positions of its cards.

    order: the position of the card of each step. Container by container in the ask's order: what is left for the
    others of its kind can be shared out among them whenever no card has more than their number. Raises Exhausted.
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
