"""Defines what the learning policies know: the shape of a pod, the class of a node, and what is free on a node.

The dimensions of arrays are given in brackets; B is the number of rows, which are nodes or states of a node. A card has
a single free amount in thousandths ("milli"): the smaller one of its free core and its free memory. Amounts are
integers. Both the free memory of a card and the memory that a pod takes are rounded down to milli, so a pod that fits
by these numbers may need up to one milli more memory than is free. Mainly the learning policies,
`scheduler.cluster.forecast`, `decisions.scores` and `node_assessment` use these definitions.
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
"""The capacity of a card, in milli."""


class Shape(NamedTuple):
    """What a pod requests.

    Attributes:
        cpu: The CPU that the pod requests, in thousandths of a core.
        memory: The memory that the pod requests, in bytes.
        cards: The number of cards.
        core: The core that the pod requests of each card, in milli.
        card_memory: The memory that the pod requests of each card, in bytes.
        models: The card models on which the pod may run, sorted; empty if it may run on any.
    """

    cpu: int
    memory: int
    cards: int = 0
    core: int = 0
    card_memory: int = 0
    models: tuple[str, ...] = ()


class NodeClass(NamedTuple):
    """The properties that equal nodes share. They do not depend on what is in use.

    Attributes:
        cpu: CPU of the node, in thousandths of a core.
        memory: Memory of the node, in bytes.
        cards: The number of its cards, which count as equal (`class_of`).
        model: The model of the cards.
        card_memory: Memory of each card, in bytes.
    """

    cpu: int
    memory: int
    cards: int
    model: str = ""
    card_memory: int = 0


def milli_per_card(shape: Shape, node: NodeClass) -> int | None:
    """Return how many milli of each of its cards the pod takes on such a node.

    Returns 0 if the pod requests no cards, and None if the cards of an empty node do not suffice or have a model that
    the pod excludes. The CPU and memory of the node do not matter.
    """
    if not shape.cards:
        return 0
    if shape.card_memory > node.card_memory:
        return None
    milli = max(shape.core, 1)
    if shape.card_memory:
        # Rounded down like the free amount (`free_milli_of_card`). Otherwise equal shares could not fill a card.
        milli = max(milli, CARD * shape.card_memory // node.card_memory)
    allowed = not shape.models or node.model in shape.models
    return milli if allowed and milli <= CARD and shape.cards <= node.cards else None


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = CARD + 1
"""More milli than any card has. It stands for what a pod takes of a card on which it can never run."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeRows:
    """What is free on B nodes, or on a node in B states.

    Attributes:
        classes: The classes of the nodes.
        class_index: [B], the position of the node's class in `classes`.
        cpu: [B], free CPU, in thousandths of a core.
        memory: [B], free memory, in bytes.
        free: [B, cards], the free milli of each card; 0 for a card that does not exist or must not be used.
    """

    classes: tuple[NodeClass, ...]
    class_index: Ints
    cpu: Ints
    memory: Ints
    free: Ints

    def select(self, at: Ints) -> "NodeRows":
        return NodeRows(self.classes, self.class_index[at], self.cpu[at], self.memory[at], self.free[at])


def milli_per_card_or_never(shape: Shape, node: NodeClass) -> int:
    """Return `milli_per_card`, or NEVER in place of None, for arrays of integers."""
    milli = milli_per_card(shape, node)
    return NEVER if milli is None else milli


def needed_milli(rows: NodeRows, shape: Shape) -> Ints:
    """Return how many milli of each card the pod takes in each row, [B]; NEVER where the cards can never suffice."""
    return _needed(rows.classes, shape)[rows.class_index]


@lru_cache(maxsize=1024)
def _needed(classes: tuple[NodeClass, ...], shape: Shape) -> Ints:
    return np.array([milli_per_card_or_never(shape, node) for node in classes], np.int64)


def fitting_rows(rows: NodeRows, shape: Shape, need: Ints) -> Ints:
    """Return the positions of the rows on which the pod fits now.

    Args:
        need: The result of `needed_milli`.
    """
    enough = (rows.free >= need[:, None]).sum(1) >= shape.cards
    return np.flatnonzero(enough & (need < NEVER) & (rows.cpu >= shape.cpu) & (rows.memory >= shape.memory))


def fullest_cards(free: Ints, fitting: Bools, cards: int) -> Bools:
    """Return which cards are the `cards` fullest fitting cards of each row, [B, cards of the node].

    Among equally full cards the first ones are chosen.
    """
    order = np.argsort(np.where(fitting, free, NEVER), axis=1, kind="stable")
    chosen = np.zeros_like(fitting)
    np.put_along_axis(chosen, order[:, :cards], values=True, axis=1)
    return chosen


def card_choices(free: Ints, need: Ints, cards: int) -> tuple[Ints, Bools]:
    """Return the possible choices of cards for a pod on rows on which it fits.

    Choices are sorted by row and then by card. A pod that requests one card can choose each card of which enough is
    free. Among cards with the same free amount only the first one is a choice, because the others would score the same.
    A pod that requests several cards, or none, has one choice in each row: the fullest cards.

    Args:
        free: [B, cards of the node], the free milli of the cards.
        need: [B], the milli of each card that the pod takes.
        cards: The number of cards that the pod requests.

    Returns:
        The row of each choice, and its cards as a mask, [choices, cards of the node].
    """
    fitting = free >= need[:, None]
    if cards != 1:
        return np.arange(len(free)), fullest_cards(free, fitting, cards)
    same = free[:, :, None] == free[:, None, :]
    row, card = np.nonzero(fitting & ~np.tril(same, -1).any(2))
    return row, np.arange(free.shape[1]) == card[:, None]


_GIB = 1 << 30


def shape_of(request: GpuRequest, node_resources: CpuMemory, models: Collection[str]) -> Shape:
    """Return the shape of a pod with this request.

    A pod of several containers counts as if it requested equal cards: as many as its containers use at the same time,
    and of each card the largest share that any container requests. If containers share a card, the shape is larger than
    what they use.

    Args:
        node_resources: The CPU and memory that the pod requests.
        models: The models of all cards of the cluster.
    """
    cpu, node_memory = node_resources
    if not request.containers:
        return Shape(cpu, node_memory)
    running = sum(c.cards for c in request.containers if c.stage is not Stage.INIT)
    cards = max([running, *(c.cards for c in request.containers)])
    core = max(CARD if c.whole else max(c.core, (c.ratio or 0) * CARD // WHOLE_RATIO) for c in request.containers)
    memory = max(c.memory for c in request.containers)
    return Shape(cpu, node_memory, cards, min(core, CARD), memory, _allowed_models(request, models))


def _allowed_models(request: GpuRequest, models: Collection[str]) -> tuple[str, ...]:
    """Return the models on which the pod may run; () means all models. If it may run on none, return ("",)."""
    if not (request.constraints.models or request.constraints.excluded_models):
        return ()
    allowed = tuple(sorted(model for model in models if request.constraints.allows_model(model)))
    if len(allowed) == len(set(models)):
        return ()
    return allowed or ("",)


def class_of(node: Node, cards: Sequence[CardState]) -> NodeClass:
    """Return the class of a node with at least one card.

    If its cards differ, all cards count as having the most frequent model and size (the first of equally frequent
    ones). The memory of the node is rounded down to whole GiB, because equal machines report amounts that differ by a
    few KiB.
    """
    kinds = Counter((state.card.model, state.card.memory) for state in cards)
    model, memory = max(kinds, key=lambda kind: kinds[kind])
    return NodeClass(node.allocatable.cpu, node.allocatable.memory // _GIB * _GIB, len(cards), model, memory)


def node_rows(node: NodeClass, free_resources: CpuMemory, free: Sequence[Sequence[int]]) -> NodeRows:
    """Return a row for each of these states of a node. They differ only in the free milli of the cards."""
    cpu, memory = (np.full(len(free), amount, np.int64) for amount in free_resources)
    return NodeRows((node,), np.zeros(len(free), np.int64), cpu, memory, np.array(free, np.int64))


def free_milli(cards: Sequence[CardState]) -> list[int]:
    """Return the free milli of each card; 0 for an unhealthy card."""
    return [free_milli_of_card(state) for state in cards]


def free_milli_of_card(state: CardState, core: int = 0, memory: int = 0) -> int:
    """Return the free milli of a card once a pod takes this much core and memory of it; 0 for an unhealthy card."""
    if not state.card.healthy:
        return 0
    return max(0, min(state.core_free - core, CARD * (state.memory_free - memory) // state.card.memory))
