"""What fragmentation is compared with: best fit as published, and the fullness of a node as the live scheduler has it.

Choosers (scheduler.fragmentation.board) over columns of nodes.
"""

from collections.abc import Callable
from typing import cast

import numpy as np

from scheduler.fragmentation.board import UNFIT
from scheduler.fragmentation.rows import Ints, Rows, able, fullest, needs
from scheduler.fragmentation.shapes import CARD, Shape
from scheduler.placement import NODE_POLICIES


class BestFit:
    """The node with the least CPU and GPU left, each as part of the largest node's; the fullest cards.

    As published with FGD: int(100 · (1 − ½ · cpu left / most cpu − ½ · gpu left / most gpu)); memory does not count.
    """

    def keys(self, rows: Rows, shape: Shape) -> Ints:
        most_cpu = max(1, *(node.cpu for node in rows.classes))
        most_gpu = CARD * max(1, *(node.cards for node in rows.classes))
        left = (rows.cpu - shape.cpu) * most_gpu + (rows.free.sum(1) - shape.cards * needs(rows, shape)) * most_cpu
        return _where_able(rows, shape, (200 * most_cpu * most_gpu - 100 * left) // (2 * most_cpu * most_gpu))

    def cards(self, rows: Rows, shape: Shape) -> tuple[int, ...]:
        return _fullest(rows.free, rows, shape)


class Fullness:
    """`binpack` and `spread`: the live scheduler's node score; the cards with the least, or the most, left."""

    def __init__(self, policy: str) -> None:
        self._score = cast(Callable[[Ints, Ints], Ints], NODE_POLICIES[policy])  # integer arithmetic, arrays' too
        self._sign = {"binpack": 1, "spread": -1}[policy]

    def keys(self, rows: Rows, shape: Shape) -> Ints:
        there = CARD * np.array([node.cards for node in rows.classes], np.int64)[rows.kind]
        used = there - rows.free.sum(1) + shape.cards * needs(rows, shape)
        return _where_able(rows, shape, self._score(np.minimum(used, there), np.maximum(there, 1)))

    def cards(self, rows: Rows, shape: Shape) -> tuple[int, ...]:
        return _fullest(self._sign * rows.free, rows, shape)


def _where_able(rows: Rows, shape: Shape, scores: Ints) -> Ints:
    keys = np.full(len(rows.kind), UNFIT, np.int64)
    at = able(rows, shape, needs(rows, shape))
    keys[at] = scores[at]
    return keys


def _fullest(left: Ints, rows: Rows, shape: Shape) -> tuple[int, ...]:
    fitting = rows.free >= needs(rows, shape)[:, None]
    return tuple(np.flatnonzero(fullest(left, fitting, shape.cards)).tolist())
