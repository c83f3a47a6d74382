"""Where a pod of a spread group cannot but take a card that another pod of the group is on."""

from collections.abc import Iterable, Sequence

import numpy as np

from mgpu.model.asks import Ask
from mgpu.model.cards import CardState
from scheduler.vector.fits import serving
from scheduler.vector.rows import Mask, Rows


def tells(ask: Ask) -> bool:
    """Whether `crowded` can tell: of one container every card is as good as the next."""
    return len(ask.containers) == 1 and ask.wishes.same_card is None


def crowded(rows: Rows, cards_of: Iterable[Sequence[CardState]], ask: Ask) -> Mask:
    """Of these nodes, where the pod fits, those with too few cards for it that none of its spread group is on."""
    container, group = ask.containers[0], ask.wishes.spread
    alone = np.ones(rows.data.shape[1:], np.bool_)
    for row, cards in enumerate(cards_of):
        for column, state in enumerate(cards):
            if state.groups and group in state.groups:
                alone[row, column] = False
    return np.asarray((serving(rows, container, ask) & alone).sum(axis=1) < container.cards)
