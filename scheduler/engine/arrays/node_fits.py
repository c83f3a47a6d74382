"""Decides for thousands of nodes at once whether a request fits.

`scheduler.decisions.array_filter` calls `evaluate` first. The engine then evaluates only the undecided nodes, one by
one. A verdict must agree with `scheduler.engine.placement.place` for the same node. A node without a certain verdict
must stay undecided, which only costs time.
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
    """The verdicts on n nodes. A node has at most one of the three verdicts.

    Attributes:
        fits: [n], whether the request fits.
        too_few: [n], whether a container requests more cards than the node has.
        failing_container: [n], the position of the first container for which too few cards have capacity, even without
            the pod's other containers; -1 if there is none.
    """

    fits: Mask
    too_few: Mask
    failing_container: Ints

    def select(self, places: Places) -> "NodeVerdicts":
        return NodeVerdicts(self.fits.take(places), self.too_few.take(places), self.failing_container.take(places))

    def without(self, nodes: Mask) -> "NodeVerdicts":
        """Return the verdicts with these nodes undecided."""
        return NodeVerdicts(self.fits & ~nodes, self.too_few & ~nodes, np.where(nodes, -1, self.failing_container))

    @property
    def undecided(self) -> Mask:
        return ~self.fits & ~self.too_few & (self.failing_container < 0)


def evaluate(rows: NodeArrays, request: GpuRequest) -> NodeVerdicts:
    """Evaluate the request on all rows. The request's requirements on nodes and its groups are not considered."""
    counts = rows.totals[COUNT]
    candidates = (counts > 0) & ~rows.odd & _is_supported(request)
    too_few = candidates & (counts < max(c.cards for c in request.containers))
    candidates &= ~too_few
    failing_container = np.full(len(counts), -1)
    numbers: list[Ints] = []
    known: dict[ContainerRequest, Ints] = {}
    for position, container in enumerate(request.containers):
        share = replace(container, container="", cards=1, stage=Stage.APP)
        if share not in known:
            known[share] = fitting_cards(rows, container, request).sum(axis=1)
        numbers.append(known[share])
        fails = candidates & (numbers[-1] < container.cards)
        failing_container[fails] = position
        candidates &= ~fails
    fits = candidates & (_fit_together(rows, request) | _fit_apart(numbers, request))
    return NodeVerdicts(fits, too_few, failing_container)


def _is_supported(request: GpuRequest) -> bool:
    """Return whether the arrays can evaluate the request.

    They cannot evaluate a request for several cards or containers that must be on one card, nor amounts that floats
    cannot represent exactly.
    """
    if request.constraints.same_card and (len(request.containers) > 1 or request.containers[0].cards > 1):
        return False
    return sum(c.cards * (c.core + c.memory) for c in request.containers) < EXACT


def taken_amounts(data: Ints, container: ContainerRequest) -> tuple[Ints | int, Ints | int, Ints | int]:
    """Return the core, memory and ratio that the container takes of each card, as `ContainerRequest.amount_on` does."""
    if container.whole:
        return data[CORE], data[MEMORY], WHOLE_RATIO
    if container.ratio is None:
        return container.core, container.memory, 0
    size = data[MEMORY]
    ratio_of_bytes = -(-100 * min(container.memory, EXACT) // np.maximum(size, 1))
    return container.core, container.memory or container.ratio * size // 100, container.ratio or ratio_of_bytes


def usable_cards(rows: NodeArrays) -> Mask:
    """Return which cards are healthy and not excluded for the pod, [n, cards]."""
    healthy = rows.data[HEALTH] == HEALTHY
    return np.asarray(healthy if rows.exclusion is None else healthy & (rows.exclusion == 0))


def fitting_cards(rows: NodeArrays, container: ContainerRequest, request: GpuRequest, shares: int = 1) -> Mask:
    """Return which cards have enough free for the container and for `shares` shares, [n, cards].

    With one share, these must be the cards for which `rejections.card_refusal` returns None.
    """
    core, memory, ratio = taken_amounts(rows.data, container)
    fitting = usable_cards(rows) & (rows.data[CORE_FREE] >= core) & (rows.data[MEMORY_FREE] >= memory)
    if container.ratio is not None:
        fitting &= rows.data[RATIO_FREE] >= ratio
    if container.whole:
        fitting &= (rows.data[SHARES] == 0) & (rows.data[RATIO_FREE] >= ratio)
    if request.max_shares:
        fitting &= rows.data[SHARES] + shares <= request.max_shares
    return np.asarray(fitting)


def hopeless_nodes(rows: NodeArrays, request: GpuRequest) -> Mask:
    """Return on which nodes too few cards could take one of the containers even if they were empty, [n]."""
    found = np.zeros(len(rows), np.bool_)
    usable = usable_cards(rows)
    for c in request.containers:
        core, memory, ratio = taken_amounts(rows.data, c)
        large = usable & (rows.data[CORE] >= core) & (rows.data[MEMORY] >= memory) & (ratio <= WHOLE_RATIO)
        found |= large.sum(axis=1) < c.cards
    return found


def _fit_apart(numbers: Sequence[Ints], request: GpuRequest) -> Mask:
    """Return on which nodes each container can surely have cards of its own, [n].

    The containers choose one after the other, those with the fewest fitting cards first. A container surely finds its
    cards if the number of cards that fit is at least the number that this container and all before it take.

    Args:
        numbers: For each container, [n], how many cards of the node can take it alone.
    """
    fitting, cards = np.array(numbers), np.array([c.cards for c in request.containers])
    order = np.argsort(fitting, axis=0)
    enough = np.take_along_axis(fitting, order, axis=0) >= np.cumsum(cards[order], axis=0)
    return np.asarray(enough.all(axis=0))


def _fit_together(rows: NodeArrays, request: GpuRequest) -> Mask | bool:
    """Return on which nodes all containers surely fit on the same cards, [n].

    They do if each of enough cards could take all containers at once. As many cards are needed as the container with
    the most cards requests.
    """
    if len(request.containers) == 1:
        return True
    if any(c.whole or c.ratio is not None for c in request.containers):
        return False
    most = peak((c.stage, Amount(c.core, c.memory, 1)) for c in request.containers)
    cards = max(c.cards for c in request.containers)
    fitting = fitting_cards(rows, ContainerRequest("all", cards, most.core, most.memory), request, most.shares)
    return np.asarray(fitting.sum(axis=1) >= cards)


def can_tell_spread(request: GpuRequest) -> bool:
    """Return whether `only_beside_group` supports the request: a single container without a same-card group."""
    return len(request.containers) == 1 and request.constraints.same_card is None


def only_beside_group(rows: NodeArrays, cards_of: Iterable[Sequence[CardState]], request: GpuRequest) -> Mask:
    """Return on which of these nodes the pod has to share a card with a pod of its spread group, [n].

    Args:
        cards_of: The cards of each row, which say which groups are on them.
    """
    container, group = request.containers[0], request.constraints.spread
    alone = np.ones(rows.data.shape[1:], np.bool_)
    for row, cards in enumerate(cards_of):
        for column, state in enumerate(cards):
            if state.groups and group in state.groups:
                alone[row, column] = False
    return np.asarray((fitting_cards(rows, container, request) & alone).sum(axis=1) < container.cards)
