"""The interface of a card policy: how it rates cards and nodes, and whether it learns.

Each module in `scheduler/engine/policies/` provides a `CardPolicy`; `place` and the scores of nodes use them. Ratings
must be exact integers: a rounding difference would give equal nodes different placements on different machines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgpu.model.cards import CardState
from scheduler.engine.learning.node_board import Judge
from scheduler.engine.learning.shapes import NodeClass, Shape

CardScore = Callable[[int, int, int], int]
"""(position of the card, core in milli and memory in bytes that the pod takes at its peak) → worth; higher is better.

(position, 0, 0) is the worth of a card that the pod does not use.
"""

Scoring = Callable[[Sequence[CardState], int], CardScore]
"""(all cards of the node, weight of core in percent) → the worth of each card."""

NodeScoring = Callable[[int, int], int]
"""(used, capacity) → the score of a node, 0 to HIGHEST. Only arithmetic, so that it works on arrays of floats too."""

Learning = Callable[[tuple[tuple[Shape, int], ...], Mapping[NodeClass, int]], Judge]
"""(shapes of past pods with their counts, classes of nodes with their numbers) → a judge for the pods to come."""


@dataclass(frozen=True, slots=True)
class CardPolicy:
    """One card policy.

    Attributes:
        scoring: The best placement has the highest total worth of all cards of the node. If the worth of a card
            depends on the rest of the node, it is the worth of the node with only this card changed, which is exact
            for pods on one card.
        node_scoring: The node policy of the same name; None if there is none.
        learn: Creates the judge of a learning policy, which uses `scoring` and `node_scoring` until it has learnt.
    """

    scoring: Scoring
    node_scoring: NodeScoring | None = None
    learn: Learning | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """A card policy for one pod.

    Attributes:
        weight_of_core: In percent; the rest is the weight of memory.
        steps: The steps to rate all cards for one more amount; 0 for a few multiplications.
    """

    scoring: Scoring
    weight_of_core: int
    steps: int = 0

    def scores(self, cards: Sequence[CardState]) -> CardScore:
        """Return the rating of these cards, which are all cards of a node."""
        return self.scoring(cards, self.weight_of_core)
