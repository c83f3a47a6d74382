"""Pods and nodes of the model as the judges see them. The experiment reads its trace instead (playground/simulate)."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from mgpu.model.cards import WHOLE_RATIO, CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import Node, Stage
from scheduler.engine.learning.node_columns import Rows
from scheduler.engine.learning.shapes import CARD, NodeClass, Shape

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
