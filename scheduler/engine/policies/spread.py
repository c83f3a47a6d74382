"""Card and node policy `spread`, the opposite of `binpack`: it distributes load evenly over cards and nodes.

Settings and pods select it by name. Ratings of cards must be exact integers.
"""

from collections.abc import Sequence

from mgpu.model.cards import CardState
from scheduler.engine.card_policy import CardPolicy, CardScore
from scheduler.engine.node_fit import HIGHEST
from scheduler.engine.policies.binpack import binpack


def spread(cards: Sequence[CardState], weight_of_core: int) -> CardScore:
    """Rate cards as `binpack` does, with the opposite sign."""
    packed = binpack(cards, weight_of_core)
    return lambda position, core, memory: -packed(position, core, memory)


def emptiness(used: int, capacity: int) -> int:
    """Score a node by the part of its capacity that is free."""
    return HIGHEST * (capacity - used) // capacity


POLICY = CardPolicy(spread, emptiness)
