"""What a card policy is: how it rates cards and nodes, and whether it learns.

The modules in `scheduler/engine/policies/` implement it; `place` and the scores of nodes use it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgpu.model.cards import CardState
from scheduler.engine.learning.node_board import Judge
from scheduler.engine.learning.shapes import NodeClass, Shape

CardScore = Callable[[int, int, int], int]
"""(position in the cards, core in milli, memory in bytes that the pod takes at its peak) → worth; higher is better.

The worth is an exact integer, so that equal cards tie on every machine. (position, 0, 0) is the worth of a card that
the pod leaves alone.
"""

Scoring = Callable[[Sequence[CardState], int], CardScore]
"""(all cards of the node, weight of core in percent) → the worth of each card."""

NodeScoring = Callable[[int, int], int]
"""(used, capacity) → the score of a node, 0..HIGHEST. Works on arrays of floats too: no branches, only arithmetic."""

Learning = Callable[[tuple[tuple[Shape, int], ...], Mapping[NodeClass, int]], Judge]
"""(shapes of past pods with their counts, classes of nodes with their numbers) → the judge of what comes."""


@dataclass(frozen=True, slots=True)
class CardPolicy:
    """One card policy. The best placement has the highest sum of the worths of all cards of the node.

    A worth that depends on the node as a whole is written as the worth of the node with only this card changed: exact
    for pods on one card.

    node_scoring: the node policy of the same name; None where the policy is no node policy.
    learn: for a policy that learns from the pods that came. It uses `scoring` and `node_scoring` until it has learnt.
    """

    scoring: Scoring
    node_scoring: NodeScoring | None = None
    learn: Learning | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """A card policy as it holds for one pod. `weight_of_core`: percent; the rest is the weight of memory.

    steps: the engine's effort for the worths of all cards under one more amount; 0 for a few multiplications.
    """

    scoring: Scoring
    weight_of_core: int
    steps: int = 0

    def scores(self, cards: Sequence[CardState]) -> CardScore:
        return self.scoring(cards, self.weight_of_core)
