"""Computes what free parts of cards are worth to the expected pods, for the policy `fragmentation`.

`PodTypes` contains the weighted types of pods as arrays. `kind_tables` uses them and the values.

Why the values are right. Distributing cards among the expected pods is the cutting-stock problem: divide cards of 1000
milli into the requested shares with as few cards as possible. The dual solution of its linear program gives each share
a price, which is the part of a card that one more such share costs. The value of a free amount is the highest total
price of shares that fit into it together (an unbounded knapsack). So 190 milli are worthless if all pods request more.
The values are superadditive: two free parts are never worth more than one part of the same total size
(docs/design/fragmentation.md, "The algorithm", step 4).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from scheduler.engine.learning.expected_pods import ONE, WeightedType
from scheduler.engine.learning.kind_tables import MANY_PODS, Floats, Hosting, Shorts
from scheduler.engine.learning.shapes import (
    CARD,
    NEVER,
    Ints,
    NodeClass,
    Shape,
    milli_per_card,
    milli_per_card_or_never,
)

GRAIN = 10
"""The resolution of card values, in milli: the size of a grain.

A resolution of 1 takes ten times as long, and the shares of the traces are whole grains.
"""

_GRAINS = CARD // GRAIN
_MAX_ROUNDS = 1000  # the most rounds of column generation; the shares of the traces need 30 to 60
_TINY = 1e-9  # smaller differences are rounding errors


def grains(milli: int) -> int:
    """Convert a share to grains.

    The result is rounded up, unless fewer shares would then fit on a card. For example, 333 milli are 33 grains.
    """
    return max(1, min(-(-milli // GRAIN), _GRAINS // (CARD // milli)))


def card_values(demand: Mapping[int, float]) -> Floats:
    """Return the worth of a card for each number of free grains, [101]. An empty card is worth 1.

    Args:
        demand: The number of requested shares by their size in grains.
    """
    if not demand:
        return np.array([0.0] * _GRAINS + [1.0])
    sizes = sorted(demand)
    values = np.array(_best_filling(sizes, share_prices(sizes, [demand[size] for size in sizes]))[0])
    values[-1] = max(values[-1], 1.0)
    return values


def share_prices(sizes: list[int], demand: list[float]) -> list[float]:
    """Return how much one more share of each size adds to the number of cards that the demand needs.

    These are the duals of the cutting-stock problem, computed by column generation (Gilmore and Gomory 1961). A filling
    is a way to divide a card into shares. A basis, which has as many fillings as there are sizes, serves the demand.
    Each round sets the prices so that every filling of the basis costs one card. Then the knapsack finds the most
    expensive filling, which replaces the filling of the basis that is used up first. The last round is the one in which
    no filling costs more than a card. Each round also gives a lower bound on the number of cards. The prices of the
    best bound are returned. With approximate prices, the policy loses 0.05 to 0.3 points on the traces; `expected_pods`
    defines both words.
    """
    wanted, basis = np.array(demand), np.diag([float(_GRAINS // size) for size in sizes])
    best, best_bound = np.array(sizes) / _GRAINS, 0.0
    for _ in range(_MAX_ROUNDS):
        price = np.maximum(np.linalg.solve(basis.T, np.ones(len(sizes))), 0.0)
        worth, filling = _best_filling(sizes, price.tolist())
        bound = float(wanted @ price) / worth[-1]
        if bound > best_bound:
            best, best_bound = price / worth[-1], bound
        if worth[-1] <= 1 + _TINY:
            break
        cards, replaced = np.linalg.solve(basis, np.stack((wanted, filling), axis=1)).T
        lasts = np.where(replaced > _TINY, cards / np.maximum(replaced, _TINY), np.inf)
        basis[:, np.argmin(lasts)] = filling
    prices: list[float] = best.tolist()
    return prices


def _best_filling(sizes: list[int], price: list[float]) -> tuple[list[float], Floats]:
    """Return the highest total price of shares that fit into each free amount, [101], and the best filling of a card.

    The filling is the number of shares of each size.
    """
    worth, last = [0.0] * (_GRAINS + 1), [-1] * (_GRAINS + 1)
    for i, (size, value) in enumerate(zip(sizes, price, strict=True)):
        for free in range(size, _GRAINS + 1):
            with_share = worth[free - size] + value
            if with_share > worth[free]:
                worth[free], last[free] = with_share, i
    filling, free = np.zeros(len(sizes)), _GRAINS
    while last[free] >= 0:
        filling[last[free]] += 1
        free -= sizes[last[free]]
    return worth, filling


_VALUE_WEIGHT = 20
"""The weight of the values of cards relative to the weights of types.

Weights of 10 to 40 give similar results on the traces.
"""


class PodTypes:
    """The weighted types of pods as T columns. Types that differ only in the allowed card models share a column.

    They are `state_rating.Types`. `cards` is [T], the number of cards that a pod of the type requests.
    """

    def __init__(self, weighted: Sequence[WeightedType]) -> None:
        columns: dict[Shape, list[WeightedType]] = {}
        for pod_type in weighted:
            columns.setdefault(pod_type.shape._replace(models=()), []).append(pod_type)
        self._members = tuple(columns.values())
        self._sizes = [Shape(0, 0, 1, shape.core, shape.card_memory) for shape in columns]
        self.cards = np.array([shape.cards for shape in columns], np.int64)
        # At least 1, because they are divisors.
        self._cpu = np.array([max(shape.cpu, 1) for shape in columns], np.float64)
        self._memory = np.array([max(shape.memory, 1) for shape in columns], np.float64)

    def milli(self, node: NodeClass) -> tuple[int, ...]:
        return tuple(milli_per_card_or_never(size, node) for size in self._sizes)

    def weights(self, node: NodeClass) -> Floats:
        """Return the weights of the types that may run on the node. They are 0 for a column of which none may."""
        allowed = [[t for t in types if milli_per_card(t.shape, node) is not None] for types in self._members]
        fit = [round(sum(t.fit_weight for t in types) / CARD) for types in allowed]
        copy = [round(sum(t.copy_weight for t in types)) for types in allowed]
        return np.array((fit, copy), np.float64)

    def card_values(self, milli: Sequence[int]) -> Ints:
        """Return, for each number of free milli, what a card is worth, [1001], in the unit of the weights."""
        demand: dict[int, float] = {}
        for types, size in zip(self._members, milli, strict=True):
            if size < NEVER:
                shares = types[0].shape.cards * sum(pod_type.number for pod_type in types)
                demand[grains(size)] = demand.get(grains(size), 0.0) + shares
        values = np.rint(_VALUE_WEIGHT * ONE * card_values(demand)).astype(np.int64)
        return values[np.arange(CARD + 1) // GRAIN]

    def hosting(self, order: Ints) -> Hosting:
        cpu_of_types, memory_of_types = self._cpu[order], self._memory[order]

        def hosted(cpu: Ints, memory: Ints) -> Shorts:
            pods: Floats = cpu.astype(np.float64)[:, None] / cpu_of_types
            np.minimum(pods, memory.astype(np.float64)[:, None] / memory_of_types, out=pods)
            return np.minimum(pods, MANY_PODS, out=pods).astype(np.int16)

        return hosted
