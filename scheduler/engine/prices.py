"""Prices: what one card for a container of each kind is worth at the optimum (Lagrange multipliers).

Let each card choose its containers by itself, paying the price of each. At the right prices the cards together
choose almost what is needed, and a configuration that loses much against its card's choice is in no best placement:
that is what makes the exact search short. Any prices keep it exact, so floats are good enough here.
"""

from collections.abc import Sequence

import numpy as np

from scheduler.engine.configurations import Kind
from scheduler.engine.effort import Budget
from scheduler.engine.problem import Option

_SMOOTHING = tuple(0.1 * 0.5**i for i in range(9))  # temperatures, in parts of the largest worth
_STEPS = 6  # at most, per temperature
_REACH = 4.0  # the longest step, in temperatures
_BALANCED = 0.1  # cards that may be missing or too many before the next temperature
_SURE = 1e-6  # far above the rounding of floats
_BITS = 40
_MOST_CELLS = 1 << 20  # cards × configurations and configurations × kinds, of eight bytes each and a few at a time

# Measured, in steps: one iteration, a cell of cards × configurations in it, and so many multiplications.
_ITERATION, _PER_CELL, _MULTIPLIED = 400, 0.12, 2_000


def prices(kinds: Sequence[Kind], cards: Sequence[Sequence[Option]], budget: Budget) -> list[int]:
    """The price of each kind, in the unit of the options' worth.

    Minimises the dual, Σ over cards of the best (worth − prices paid) + Σ price × units, by Newton's method on its
    softmax smoothing, ever less smooth. All prices are 0 where the matrices would be too large, and the best prices so
    far are taken where a third of the budget is used up: the search is right with any.
    """
    codes = sorted({code for options in cards for _, code in options})
    if len(codes) * max(len(cards), len(kinds)) > _MOST_CELLS:
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


def _minimise(
    worths: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    counts: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    units: np.ndarray[tuple[int], np.dtype[np.float64]],
    budget: Budget,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The prices with the lowest dual met on the way. worths: cards × configurations; counts: × kinds.

    A dual below the worth of any placement shows that there is none, and is good enough.
    """
    now = best = np.zeros(len(units))
    lowest = np.inf
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
            if dual < lowest:
                lowest, best = dual, now
            if dual < least - _SURE:
                return now
            share = np.exp((left - top[:, None]) / smoothing)
            share /= share.sum(axis=1)[:, None]
            chosen = share @ counts
            missing = units - chosen.sum(axis=0)
            if np.abs(missing).max() < _BALANCED:
                break
            curvature = (counts.T * share.sum(axis=0)) @ counts - chosen.T @ chosen
            curvature[np.diag_indices(len(units))] += 1e-4
            step = np.linalg.solve(curvature, missing) * smoothing
            longest = np.abs(step).max()
            now = now - step * min(1.0, _REACH * smoothing / longest)
    return best
