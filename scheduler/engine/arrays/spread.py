"""Where a pod of a spread group cannot but take a card that another pod of the group is on."""

from collections.abc import Iterable, Sequence

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest
from scheduler.engine.arrays.fits import serving
from scheduler.engine.arrays.node_table import Mask, Rows


def tells(request: GpuRequest) -> bool:
    """Whether `crowded` can tell: of one container every card is as good as the next."""
    return len(request.containers) == 1 and request.constraints.same_card is None


def crowded(rows: Rows, cards_of: Iterable[Sequence[CardState]], request: GpuRequest) -> Mask:
    """Of these nodes, where the pod fits, those with too few cards for it that none of its spread group is on."""
    container, group = request.containers[0], request.constraints.spread
    alone = np.ones(rows.data.shape[1:], np.bool_)
    for row, cards in enumerate(cards_of):
        for column, state in enumerate(cards):
            if state.groups and group in state.groups:
                alone[row, column] = False
    return np.asarray((serving(rows, container, request) & alone).sum(axis=1) < container.cards)
