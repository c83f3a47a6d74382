"""Card policies that learn: a node's cards as a judge of fragmentation rates them."""

from collections.abc import Sequence

from mgpu.model.cards import CardState
from mgpu.model.compute_resources import CpuMemory
from scheduler.engine.card_policy import CardScore, Scoring
from scheduler.engine.learning.board import Judge
from scheduler.engine.learning.columns import free_of, milli_left, rows_of
from scheduler.engine.learning.shapes import NodeClass


def looking_ahead(judge: Judge, node: NodeClass, room: CpuMemory, needs: CpuMemory) -> Scoring:
    """The worth of the node with only this card changed: exact for pods on one card.

    room: what the node has free of cpu and memory without the pod, which needs `needs` of it.
    """
    after = room.less(needs)

    def scoring(cards: Sequence[CardState], _weight_of_core: int) -> CardScore:
        known: dict[tuple[int, int], list[int]] = {}
        now = free_of(cards)
        # Sorted, so that equal cards are of equal worth to the last bit.
        before = rows_of(node, room, [sorted(now)])

        def score(position: int, core: int, memory: int) -> int:
            worths = known.get((core, memory))
            if worths is None:  # of all cards at once: the other ones are asked about next
                left = [milli_left(state, core, memory) for state in cards]
                ways = [sorted((*now[:i], milli, *now[i + 1 :])) for i, milli in enumerate(left)]
                worths = known[core, memory] = judge.worths(before, rows_of(node, after, ways)).tolist()
            return worths[position]

        return score

    return scoring
