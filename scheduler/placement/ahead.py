"""Card policies that look ahead: what a judge of fragmentation (scheduler/fragmentation/board.py) says of a node."""

from collections.abc import Sequence

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.requests import Room
from scheduler.fragmentation.board import Judge
from scheduler.fragmentation.reading import free_of, milli_left
from scheduler.fragmentation.rows import Rows
from scheduler.fragmentation.shapes import NodeClass
from scheduler.placement.policies import CardScore, Scoring


def looking_ahead(judge: Judge, node: NodeClass, room: Room, needs: Room) -> Scoring:
    """The worth of the node with only this card changed: exact for pods on one card.

    room: what the node has free of cpu and memory without the pod, which needs `needs` of it.
    """
    after = room.less(needs)

    def scoring(cards: Sequence[CardState], _weight_of_core: int) -> CardScore:
        known: dict[tuple[int, int], list[int]] = {}
        now = free_of(cards)
        before = _rows(node, room, [now])

        def score(position: int, core: int, memory: int) -> int:
            worths = known.get((core, memory))
            if worths is None:  # of all cards at once: the other ones are asked about next
                ways = [[*now[:i], milli_left(state, core, memory), *now[i + 1 :]] for i, state in enumerate(cards)]
                worths = known[core, memory] = judge.worths(before, _rows(node, after, ways)).tolist()
            return worths[position]

        return score

    return scoring


def _rows(node: NodeClass, room: Room, free: Sequence[Sequence[int]]) -> Rows:
    """In order of what is free: equal cards must be of equal worth to the last bit."""
    count = len(free)
    cpu, memory = (np.full(count, amount, np.int64) for amount in room)
    return Rows((node,), np.zeros(count, np.int64), cpu, memory, np.sort(np.array(free, np.int64), axis=1))
