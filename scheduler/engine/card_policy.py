"""The interface of a card policy: how it rates cards and nodes, and whether it learns.

Each module in `scheduler/engine/policies/` provides a `CardPolicy`. Mainly `placement` and `node_score` call its
functions. Ratings of cards must be exact integers. With rounding differences, equal nodes could get different
placements on different machines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgpu.model.cards import CardState
from scheduler.engine.learning.node_board import Judge
from scheduler.engine.learning.shapes import NodeClass, Shape

CardScore = Callable[[int, int, int], int]
"""Returns the worth of a card once the pod is on it; a higher worth is better.

The arguments are the position of the card among the cards of the node, and the most core (in thousandths of a card) and
memory (in bytes) that the pod needs of it at any time. Both amounts are 0 for a card that the pod does not use.
"""

Scoring = Callable[[Sequence[CardState], int], CardScore]
"""Returns the function that rates the cards of a node, given all its cards and the weight of core in percent."""

NodeScoring = Callable[[int, int], int]
"""Returns the score of a node, from 0 to `node_fit.HIGHEST`, given the used amount and the capacity.

It must use only arithmetic, so that it also works with arrays of floats.
"""

Learning = Callable[[tuple[tuple[Shape, int], ...], Mapping[NodeClass, int]], Judge]
"""Returns a judge, which rates nodes and choices of cards for future pods (`node_board.Judge`).

The arguments are the shapes of past pods, each with the number of pods, and for each class of nodes the number of
nodes.
"""


@dataclass(frozen=True, slots=True)
class CardPolicy:
    """One card policy.

    Attributes:
        scoring: Rates cards. The best placement has the highest total worth of all cards of the node. A policy for
            which the worth of a card depends on the other cards returns the worth of the node with only this card
            changed. For a pod on several cards, the total is then an approximation.
        node_scoring: The node policy of the same name; None if there is none.
        learn: Creates the judge of a learning policy; None if the policy does not learn. A learning policy uses
            `scoring` and `node_scoring` until it has learnt.
    """

    scoring: Scoring
    node_scoring: NodeScoring | None = None
    learn: Learning | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """A card policy for one pod.

    Attributes:
        scoring: Rates cards, as in `CardPolicy`.
        weight_of_core: The weight of core in percent. The rest is the weight of memory.
        steps: The effort, in steps, to rate all cards for one pair of core and memory; 0 if a rating takes only a few
            multiplications and is therefore not counted.
    """

    scoring: Scoring
    weight_of_core: int
    steps: int = 0

    def scores(self, cards: Sequence[CardState]) -> CardScore:
        """Return the function that rates these cards, which must be all cards of a node."""
        return self.scoring(cards, self.weight_of_core)
