"""What the free part of a card is worth, by the shares that are asked for."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from scheduler.fragmentation.shapes import CARD

Floats = NDArray[np.float64]

GRAIN = 10
"""Milli. Shares are rounded up to it, free parts down: finer ones change nothing on the traces and take longer."""

_WHOLE = CARD // GRAIN
_ROUNDS = 400
_STRIDE = 1 / 16  # larger ones end in worse bounds after 400 rounds, smaller ones do not get there


def grains(milli: int) -> int:
    """A share in grains, at least one."""
    return max(1, -(-milli // GRAIN))


def card_values(demand: Mapping[int, float]) -> Floats:
    """[101]: what a card with so many grains free is worth; a whole one 1.

    demand: share in grains → how many are asked for. The price of a share is what it adds to the number of cards that
    all of them need: the dual of the cutting-stock problem, by multiplicative weights. In each round the card is filled
    with what is worth most, and what went into it becomes cheaper; the prices that prove the most cards win. A free
    part is worth the most that shares put into it can be: 190 milli are worth little where nobody asks for less.
    """
    if not demand:
        return np.array([0.0] * _WHOLE + [1.0])
    sizes = sorted(demand)
    wanted = np.array([demand[size] for size in sizes])
    price = np.array(sizes) / _WHOLE
    best, most = price, 0.0
    for _ in range(_ROUNDS):
        worth, filling = _filled(sizes, price.tolist())
        proven = float(wanted @ price) / worth[-1]
        if proven > most:
            most, best = proven, price / worth[-1]
        held = filling > 0
        cards = (wanted[held] / filling[held]).min()  # so many are filled like this before something is used up
        price = price * np.exp(-_STRIDE * cards * filling / wanted)
    values = np.array(_filled(sizes, best.tolist())[0])
    values[-1] = max(values[-1], 1.0)
    return values


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
