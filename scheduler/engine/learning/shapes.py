"""Pods and nodes as the policies that learn see them: shapes of pods, classes of nodes, and what is free, as columns.

`scheduler/cluster/forecast.py`, `scheduler/decisions/scores.py` and the openb experiment turn Kubernetes objects into
these; the judges see nothing else. A card has one free amount in milli, that of the scarcer of core and memory.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgpu.model.cards import WHOLE_RATIO, CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import Node, Stage

CARD = 1000
"""What a card has: milli. Memory counts in the same milli, so that a card has one free amount, the scarcer one's."""


class Shape(NamedTuple):
    """A pod. cpu: milli; memory: bytes of the node; core (milli) and card_memory (bytes) on each of `cards` cards.

    models: the card models that it may run on, sorted; none: any.
    """

    cpu: int
    memory: int
    cards: int = 0
    core: int = 0
    card_memory: int = 0
    models: tuple[str, ...] = ()


class NodeClass(NamedTuple):
    """An empty node. cpu: milli; memory, card_memory: bytes, the latter of each of its `cards` equal cards."""

    cpu: int
    memory: int
    cards: int
    model: str = ""
    card_memory: int = 0


def milli_on(shape: Shape, node: NodeClass) -> int | None:
    """What `shape` takes of each card on such a node, at least 1; 0: it wants no card; None: it never fits."""
    if not shape.cards:
        return 0
    if shape.card_memory > node.card_memory:
        return None
    milli = max(shape.core, 1)
    if shape.card_memory:
        milli = max(milli, CARD * shape.card_memory // node.card_memory)  # down, as what is free is rounded down
    allowed = not shape.models or node.model in shape.models
    return milli if allowed and milli <= CARD and shape.cards <= node.cards else None


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


_GIB = 1 << 30
_NO_MODEL = ("",)


def shape_of(request: GpuRequest, needs: CpuMemory, models: Collection[str]) -> Shape:
    """models: those of the cluster's cards, to which the pod's wishes are applied.

    A pod of several containers is taken as one that wants equal cards: as many as run at the same time, each with the
    largest share that any container asks for. That is too much where containers go together on one card.
    """
    if not request.containers:
        return Shape(needs.cpu, needs.memory)
    stays = sum(c.cards for c in request.containers if c.stage is not Stage.INIT)
    cards = max([stays, *(c.cards for c in request.containers)])
    core = max(CARD if c.whole else max(c.core, _milli(c.ratio)) for c in request.containers)
    memory = max(c.memory for c in request.containers)
    return Shape(needs.cpu, needs.memory, cards, min(core, CARD), memory, _allowed(request, models))


def _milli(ratio: int | None) -> int:
    """Memory that is asked for in percent, in milli of a card; a card has as much of one as of the other."""
    return (ratio or 0) * CARD // WHOLE_RATIO


def _allowed(request: GpuRequest, models: Collection[str]) -> tuple[str, ...]:
    if not (request.constraints.models or request.constraints.excluded_models):
        return ()
    allowed = tuple(sorted(model for model in models if request.constraints.allows_model(model)))
    if len(allowed) == len(set(models)):
        return ()
    return allowed or _NO_MODEL


def class_of(node: Node, cards: Sequence[CardState]) -> NodeClass:
    """What the node is when it is empty; `cards` are not none. Of unequal cards the most frequent one, then the first.

    Its memory in whole GiB: what equal machines report differs by a few KiB.
    """
    kinds = Counter((state.card.model, state.card.memory) for state in cards)
    model, memory = max(kinds, key=lambda kind: kinds[kind])
    return NodeClass(node.room.cpu, node.room.memory // _GIB * _GIB, len(cards), model, memory)


def rows_of(node: NodeClass, room: CpuMemory, free: Sequence[Sequence[int]]) -> Rows:
    """One node several times, with `room` free and in each row another number of milli on its cards."""
    cpu, memory = (np.full(len(free), amount, np.int64) for amount in room)
    return Rows((node,), np.zeros(len(free), np.int64), cpu, memory, np.array(free, np.int64))


def free_of(cards: Sequence[CardState]) -> list[int]:
    """What each card has left, in milli of it: of core or of memory, whichever is less; nothing of unhealthy ones."""
    return [milli_left(state) for state in cards]


def milli_left(state: CardState, core: int = 0, memory: int = 0) -> int:
    """The same of one card, once so much more is taken."""
    if not state.card.healthy:
        return 0
    return max(0, min(state.core_free - core, CARD * (state.memory_free - memory) // state.card.memory))
