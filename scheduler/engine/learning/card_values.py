"""What the free part of a card is worth, by the shares that are asked for."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.learning.shapes import CARD

Floats = NDArray[np.float64]

GRAIN = 10
"""Milli: finer takes ten times as long, and the traces' shares are whole grains."""

_WHOLE = CARD // GRAIN
_ROUNDS = 1000  # the traces' shares need 30 to 60
_TINY = 1e-9


def grains(milli: int) -> int:
    """A share in grains: rounded up, but so that no fewer of them fill a card (333 milli are 33 grains, not 34)."""
    return max(1, min(-(-milli // GRAIN), _WHOLE // (CARD // milli)))


def card_values(demand: Mapping[int, float]) -> Floats:
    """[101]: what a card with so many grains free is worth; a whole one 1.

    demand: share in grains → how many are asked for. A free part is worth the most that shares put into it can be at
    their `prices`: 190 milli are worth little where nobody asks for less.
    """
    if not demand:
        return np.array([0.0] * _WHOLE + [1.0])
    sizes = sorted(demand)
    values = np.array(_filled(sizes, prices(sizes, [demand[size] for size in sizes]))[0])
    values[-1] = max(values[-1], 1.0)
    return values


def prices(sizes: list[int], wanted: list[float]) -> list[float]:
    """What one share of each size adds to the number of cards that all of them need; no card's fill costs over 1.

    The duals of the cutting-stock problem, by column generation (Gilmore and Gomory 1961): some fillings, as many as
    sizes, serve the demand; at the prices at which each of them costs 1 the dearest filling takes the place of the one
    that it uses up first, until none costs more than 1. Cheap approximations lose 0.05 to 0.3 points.
    """
    demand, fillings = np.array(wanted), np.diag([float(_WHOLE // size) for size in sizes])
    best, most = np.array(sizes) / _WHOLE, 0.0
    for _ in range(_ROUNDS):
        price = np.maximum(np.linalg.solve(fillings.T, np.ones(len(sizes))), 0.0)
        worth, filling = _filled(sizes, price.tolist())
        proven = float(demand @ price) / worth[-1]
        if proven > most:
            best, most = price / worth[-1], proven
        if worth[-1] <= 1 + _TINY:
            break
        cards, instead = np.linalg.solve(fillings, np.stack((demand, filling), axis=1)).T
        last = np.where(instead > _TINY, cards / np.maximum(instead, _TINY), np.inf)
        fillings[:, np.argmin(last)] = filling
    found: list[float] = best.tolist()
    return found


def _filled(sizes: list[int], price: list[float]) -> tuple[list[float], Floats]:
    """Each free part's best worth, [101], and how many of each size the best filling of a whole card has."""
    worth, last = [0.0] * (_WHOLE + 1), [-1] * (_WHOLE + 1)
    for i, (size, value) in enumerate(zip(sizes, price, strict=True)):
        for free in range(size, _WHOLE + 1):
            with_it = worth[free - size] + value
            if with_it > worth[free]:
                worth[free], last[free] = with_it, i
    filling, free = np.zeros(len(sizes)), _WHOLE
    while last[free] >= 0:
        filling[last[free]] += 1
        free -= sizes[last[free]]
    return worth, filling
