"""On which nodes a pod fits and on which it does not, for thousands of nodes at once; exactly what the engine says.

Where the arrays cannot tell, they say so, and the engine evaluates the node by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mgpu.model.cards import WHOLE_RATIO, CardState
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, peak
from mgpu.model.pods import Stage
from scheduler.engine.arrays.node_table import (
    CORE,
    CORE_FREE,
    COUNT,
    EXACT,
    HEALTH,
    HEALTHY,
    MEMORY,
    MEMORY_FREE,
    RATIO_FREE,
    SHARES,
    Ints,
    Mask,
    NodeArrays,
    Places,
)


class NodeVerdicts(NamedTuple):
    """What the arrays say of n nodes; at most one of the answers holds for a node. Where none does, they cannot tell.

    too_few: it has fewer cards than a container asks for. alone: the number of the first container that cannot be
    placed even alone; -1: there is none.
    """

    fits: Mask
    too_few: Mask
    alone: Ints

    def at(self, places: Places) -> "NodeVerdicts":
        return NodeVerdicts(self.fits.take(places), self.too_few.take(places), self.alone.take(places))

    def without(self, nodes: Mask) -> "NodeVerdicts":
        return NodeVerdicts(self.fits & ~nodes, self.too_few & ~nodes, np.where(nodes, -1, self.alone))

    @property
    def open(self) -> Mask:
        return ~self.fits & ~self.too_few & (self.alone < 0)


def evaluate(rows: NodeArrays, request: GpuRequest) -> NodeVerdicts:
    """Evaluate the request on all rows, regardless of its requirements on nodes and of its groups."""
    counts = rows.totals[COUNT]
    left = (counts > 0) & ~rows.odd & _tells(request)
    too_few = left & (counts < max(c.cards for c in request.containers))
    left &= ~too_few
    alone = np.full(len(counts), -1)
    able: list[Ints] = []
    known: dict[ContainerRequest, Ints] = {}
    for number, container in enumerate(request.containers):
        alike = replace(container, container="", cards=1, stage=Stage.APP)
        if alike not in known:
            known[alike] = serving(rows, container, request).sum(axis=1)
        able.append(known[alike])
        cannot = left & (able[-1] < container.cards)
        alone[cannot] = number
        left &= ~cannot
    return NodeVerdicts(left & (_fit_together(rows, request) | _fit_apart(able, request)), too_few, alone)


def _tells(request: GpuRequest) -> bool:
    """Whether the arrays can hold this ask. All containers of a same-card group's pod must be on one card."""
    if request.constraints.same_card and (len(request.containers) > 1 or request.containers[0].cards > 1):
        return False
    return sum(c.cards * (c.core + c.memory) for c in request.containers) < EXACT


def taken(data: Ints, container: ContainerRequest) -> tuple[Ints | int, Ints | int, Ints | int]:
    """What the container takes of each card: core, memory and ratio (`ContainerRequest.amount_on`). data: fields × …"""
    if container.whole:
        return data[CORE], data[MEMORY], WHOLE_RATIO
    if container.ratio is None:
        return container.core, container.memory, 0
    size = data[MEMORY]
    ratio_of_bytes = -(-100 * min(container.memory, EXACT) // np.maximum(size, 1))
    return container.core, container.memory or container.ratio * size // 100, container.ratio or ratio_of_bytes


def eligible(rows: NodeArrays) -> Mask:
    """n × cards: healthy, and not ruled out by the pod's wishes."""
    healthy = rows.data[HEALTH] == HEALTHY
    return np.asarray(healthy if rows.exclusion is None else healthy & (rows.exclusion == 0))


def serving(rows: NodeArrays, container: ContainerRequest, request: GpuRequest, shares: int = 1) -> Mask:
    """n × cards: those that have room for the container and `shares` shares; where `refusals.refusal` has no reason."""
    core, memory, ratio = taken(rows.data, container)
    able = eligible(rows) & (rows.data[CORE_FREE] >= core) & (rows.data[MEMORY_FREE] >= memory)
    if container.ratio is not None:
        able &= rows.data[RATIO_FREE] >= ratio
    if container.whole:
        able &= (rows.data[SHARES] == 0) & (rows.data[RATIO_FREE] >= ratio)
    if request.max_shares:
        able &= rows.data[SHARES] + shares <= request.max_shares
    return np.asarray(able)


def hopeless(rows: NodeArrays, request: GpuRequest) -> Mask:
    """n: even with nothing on its cards there are too few that can take one of the containers."""
    found = np.zeros(len(rows), np.bool_)
    able = eligible(rows)
    for c in request.containers:
        core, memory, ratio = taken(rows.data, c)
        large = able & (rows.data[CORE] >= core) & (rows.data[MEMORY] >= memory) & (ratio <= WHOLE_RATIO)
        found |= large.sum(axis=1) < c.cards
    return found


def _fit_apart(able: Sequence[Ints], request: GpuRequest) -> Mask:
    """Where each container can have cards of its own for sure: chosen one after the other, those first that have the
    fewest cards to choose from, none finds too many taken. able: by container how many cards can take it alone.
    """
    choice, cards = np.array(able), np.array([c.cards for c in request.containers])
    order = np.argsort(choice, axis=0)
    enough = np.take_along_axis(choice, order, axis=0) >= np.cumsum(cards[order], axis=0)
    return np.asarray(enough.all(axis=0))


def _fit_together(rows: NodeArrays, request: GpuRequest) -> Mask | bool:
    """Where all containers fit for sure, since each does alone: as many cards as the one that asks for the most have
    room for all of them at once.
    """
    if len(request.containers) == 1:
        return True
    if any(c.whole or c.ratio is not None for c in request.containers):
        return False
    most = peak((c.stage, Amount(c.core, c.memory, 1)) for c in request.containers)
    cards = max(c.cards for c in request.containers)
    able = serving(rows, ContainerRequest("all", cards, most.core, most.memory), request, most.shares)
    return np.asarray(able.sum(axis=1) >= cards)


def can_tell_spread(request: GpuRequest) -> bool:
    """Return whether `only_beside_group` can tell: for a single container all cards that fit are equally good."""
    return len(request.containers) == 1 and request.constraints.same_card is None


def only_beside_group(rows: NodeArrays, cards_of: Iterable[Sequence[CardState]], request: GpuRequest) -> Mask:
    """Return which of these nodes, where the pod fits, have too few cards for it without pods of its spread group."""
    container, group = request.containers[0], request.constraints.spread
    alone = np.ones(rows.data.shape[1:], np.bool_)
    for row, cards in enumerate(cards_of):
        for column, state in enumerate(cards):
            if state.groups and group in state.groups:
                alone[row, column] = False
    return np.asarray((serving(rows, container, request) & alone).sum(axis=1) < container.cards)
