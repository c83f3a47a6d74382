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
"""The capacity of a card in thousandths ("milli").

Memory is converted to the same unit, so that a card has a single free amount: that of the scarcer of core and memory.
"""


class Shape(NamedTuple):
    """What a pod requests.

    Attributes:
        cpu: in milli.
        memory: memory of the node, in bytes.
        cards: the number of cards.
        core: in milli of each card.
        card_memory: in bytes of each card.
        models: the card models that the pod may run on, sorted; empty if it may run on any.
    """

    cpu: int
    memory: int
    cards: int = 0
    core: int = 0
    card_memory: int = 0
    models: tuple[str, ...] = ()


class NodeClass(NamedTuple):
    """A class of equal nodes, each as it is when empty.

    Attributes:
        cpu: in milli.
        memory: memory of the node, in bytes.
        cards: the number of its cards, all of which are equal.
        model: the model of the cards.
        card_memory: memory of each card, in bytes.
    """

    cpu: int
    memory: int
    cards: int
    model: str = ""
    card_memory: int = 0


def milli_on(shape: Shape, node: NodeClass) -> int | None:
    """Return how many thousandths of each card `shape` takes on such a node; None if it never fits.

    At least 1, or 0 if it requests no card.
    """
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
"""More thousandths than any card has."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeRows:
    """What is free on B nodes, as arrays with one row per node.

    Attributes:
        classes: the classes of the nodes.
        kind: [B], the position of the node's class in `classes`.
        cpu: [B], free, in milli.
        memory: [B], free, in bytes.
        free: [B, cards], free thousandths of each card; 0 for a card that does not exist or must not be used.
    """

    classes: tuple[NodeClass, ...]
    class_index: Ints
    cpu: Ints
    memory: Ints
    free: Ints

    def select(self, at: Ints) -> "NodeRows":
        """The rows at these positions."""
        return NodeRows(self.classes, self.class_index[at], self.cpu[at], self.memory[at], self.free[at])


def milli_or_never(shape: Shape, node: NodeClass) -> int:
    milli = milli_on(shape, node)
    return NEVER if milli is None else milli


def needed_milli(rows: NodeRows, shape: Shape) -> Ints:
    """Return for every row, [B], how many thousandths of each card the pod takes; NEVER where it can never run."""
    return _needed(rows.classes, shape)[rows.class_index]


@lru_cache(maxsize=1024)
def _needed(classes: tuple[NodeClass, ...], shape: Shape) -> Ints:
    return np.array([milli_or_never(shape, node) for node in classes], np.int64)


def fitting_rows(rows: NodeRows, shape: Shape, need: Ints) -> Ints:
    """Positions of the rows that can take the pod now."""
    enough = (rows.free >= need[:, None]).sum(1) >= shape.cards
    return np.flatnonzero(enough & (need < NEVER) & (rows.cpu >= shape.cpu) & (rows.memory >= shape.memory))


def fullest_cards(free: Ints, fitting: Bools, cards: int) -> Bools:
    """Choose the `cards` fullest fitting cards of each row, of equal ones the first: [B, cards of the node]."""
    order = np.argsort(np.where(fitting, free, NEVER), axis=1, kind="stable")
    chosen = np.zeros_like(fitting)
    np.put_along_axis(chosen, order[:, :cards], values=True, axis=1)
    return chosen


def card_choices(free: Ints, need: Ints, cards: int) -> tuple[Ints, Bools]:
    """Return the ways to place a pod on rows that can take it: the row and the cards ([·, cards of the node]) of each.

    The ways are sorted by row and then by card. A pod on one card may use each card that has enough left; of cards with
    the same amount left only the first counts, since the others would score the same. A pod on several cards always
    uses the fullest ones, so it has one way per row.
    """
    fitting = free >= need[:, None]
    if cards != 1:
        return np.arange(len(free)), fullest_cards(free, fitting, cards)
    same = free[:, :, None] == free[:, None, :]
    row, card = np.nonzero(fitting & ~np.tril(same, -1).any(2))
    return row, np.arange(free.shape[1]) == card[:, None]


_GIB = 1 << 30
_NO_MODEL = ("",)


def shape_of(request: GpuRequest, needed_milli: CpuMemory, models: Collection[str]) -> Shape:
    """Return the shape of a pod with this request.

    A pod of several containers counts as if it requested equal cards: as many as its containers use at the same time,
    each with the largest share that any container requests. If containers share a card, that is more than they use.

    Args:
        models: the models of the cluster's cards, of which the pod's constraints select some.
    """
    if not request.containers:
        return Shape(needed_milli.cpu, needed_milli.memory)
    stays = sum(c.cards for c in request.containers if c.stage is not Stage.INIT)
    cards = max([stays, *(c.cards for c in request.containers)])
    core = max(CARD if c.whole else max(c.core, _milli(c.ratio)) for c in request.containers)
    memory = max(c.memory for c in request.containers)
    return Shape(needed_milli.cpu, needed_milli.memory, cards, min(core, CARD), memory, _allowed(request, models))


def _milli(ratio: int | None) -> int:
    """Convert a memory request in percent of a card to thousandths of a card."""
    return (ratio or 0) * CARD // WHOLE_RATIO


def _allowed(request: GpuRequest, models: Collection[str]) -> tuple[str, ...]:
    if not (request.constraints.models or request.constraints.excluded_models):
        return ()
    allowed = tuple(sorted(model for model in models if request.constraints.allows_model(model)))
    if len(allowed) == len(set(models)):
        return ()
    return allowed or _NO_MODEL


def class_of(node: Node, cards: Sequence[CardState]) -> NodeClass:
    """Return the class of a node with at least one card.

    If its cards differ, the most frequent kind counts, and of equally frequent kinds the first. The memory is rounded
    down to whole GiB, since equal machines report amounts that differ by a few KiB.
    """
    kinds = Counter((state.card.model, state.card.memory) for state in cards)
    model, memory = max(kinds, key=lambda class_index: kinds[class_index])
    return NodeClass(node.allocatable.cpu, node.allocatable.memory // _GIB * _GIB, len(cards), model, memory)


def node_rows(node: NodeClass, room: CpuMemory, free: Sequence[Sequence[int]]) -> NodeRows:
    """Return one node in several states: always with `room` free, and in each row with other amounts on its cards."""
    cpu, memory = (np.full(len(free), amount, np.int64) for amount in room)
    return NodeRows((node,), np.zeros(len(free), np.int64), cpu, memory, np.array(free, np.int64))


def free_milli(cards: Sequence[CardState]) -> list[int]:
    """Return how many thousandths of each card are left, of core or memory, whichever is less; 0 if unhealthy."""
    return [free_milli_of_card(state) for state in cards]


def free_milli_of_card(state: CardState, core: int = 0, memory: int = 0) -> int:
    """Return how many thousandths of one card are left (as `free_of`) after this much more core and memory is taken."""
    if not state.card.healthy:
        return 0
    return max(0, min(state.core_free - core, CARD * (state.memory_free - memory) // state.card.memory))
