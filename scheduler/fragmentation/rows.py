"""Nodes as columns, and which of them can take a pod."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.fragmentation.shapes import CARD, NodeClass, Shape, milli_on

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
    return np.array([milli_or_never(shape, node) for node in rows.classes], np.int64)[rows.kind]


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
