"""Card and node policy `binpack`: use cards and nodes that are in use already, so that large free parts stay free.

Settings and pods select it by name. The policy `spread` reverses the ratings of cards, and the policies `fragmentation`
and `fgd` use them until they have learnt. So a change here changes four policies.
"""

from collections.abc import Sequence
from math import lcm

from mgpu.model.cards import CardState
from scheduler.engine.card_policy import CardPolicy, CardScore
from scheduler.engine.node_fit import HIGHEST


def binpack(cards: Sequence[CardState], weight_of_core: int) -> CardScore:
    """Rate each card, including unhealthy ones, by w·c² + (100 − w)·m².

    w is the weight of core in percent. c and m are the fractions of core and memory that are free on a card once the
    pod is there. Because of the squares, few large free parts are better than many small ones. To compare exactly, the
    fractions are multiplied by a common denominator. Source: docs/design/mgpu.md, "Allocate".
    """
    all_core, all_memory = lcm(*[s.card.core for s in cards]), lcm(*[s.card.memory for s in cards])
    of_core, of_memory = weight_of_core * all_memory**2, (100 - weight_of_core) * all_core**2
    rows = [
        (
            s.core_free,
            s.memory_free,
            of_core * (all_core // s.card.core) ** 2,
            of_memory * (all_memory // s.card.memory) ** 2,
        )
        for s in cards
    ]

    def score(position: int, core: int, memory: int) -> int:
        core_free, memory_free, core_factor, memory_factor = rows[position]
        core_free -= core
        memory_free -= memory
        return core_factor * core_free * core_free + memory_factor * memory_free * memory_free

    return score


def fullness(used: int, capacity: int) -> int:
    """Score a node, 0 to 10, by the part of its capacity that is in use."""
    return HIGHEST * used // capacity


POLICY = CardPolicy(binpack, fullness)
