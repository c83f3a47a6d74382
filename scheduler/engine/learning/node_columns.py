"""Nodes as columns, and which of them can take a pod."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, milli_on

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = CARD + 1
"""Milli that no card has."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """B nodes. kind: [B] position in `classes`; cpu (milli), memory (bytes): [B] free; free: [B, cards] milli.

    A card that is not there, or must not be used, has nothing free.
    """

    classes: tuple[NodeClass, ...]
    kind: Ints
    cpu: Ints
    memory: Ints
    free: Ints

    def some(self, at: Ints) -> "Rows":
        """The rows at these positions."""
        return Rows(self.classes, self.kind[at], self.cpu[at], self.memory[at], self.free[at])


def milli_or_never(shape: Shape, node: NodeClass) -> int:
    milli = milli_on(shape, node)
    return NEVER if milli is None else milli


def needs(rows: Rows, shape: Shape) -> Ints:
    """[B]: milli of each card that the pod takes there, NEVER where it can never run."""
    return _needed(rows.classes, shape)[rows.kind]


@lru_cache(maxsize=1024)
def _needed(classes: tuple[NodeClass, ...], shape: Shape) -> Ints:
    return np.array([milli_or_never(shape, node) for node in classes], np.int64)


def able(rows: Rows, shape: Shape, need: Ints) -> Ints:
    """Positions of the rows that can take the pod now."""
    enough = (rows.free >= need[:, None]).sum(1) >= shape.cards
    return np.flatnonzero(enough & (need < NEVER) & (rows.cpu >= shape.cpu) & (rows.memory >= shape.memory))


def fullest(free: Ints, fitting: Bools, cards: int) -> Bools:
    """[B, cards of the node]: the `cards` fitting ones with the least free, at equality the first."""
    order = np.argsort(np.where(fitting, free, NEVER), axis=1, kind="stable")
    chosen = np.zeros_like(fitting)
    np.put_along_axis(chosen, order[:, :cards], values=True, axis=1)
    return chosen


def ways(free: Ints, need: Ints, cards: int) -> tuple[Ints, Bools]:
    """Ways to take a pod on some of a node's cards, [B, cards of the node], that can take it: (row, cards) of each.

    By row, then in the order of the first card. A pod on one card may take any with enough; of cards with the same
    amount free only the first is a way, since the others would score the same. More cards are the fullest ones.
    """
    fitting = free >= need[:, None]
    if cards != 1:
        return np.arange(len(free)), fullest(free, fitting, cards)
    same = free[:, :, None] == free[:, None, :]
    row, card = np.nonzero(fitting & ~np.tril(same, -1).any(2))
    return row, np.arange(free.shape[1]) == card[:, None]
