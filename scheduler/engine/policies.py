"""Which placement is best: card policies, one function each, in one table.

A policy looks at all cards of the node and returns what each is worth under a given use. The best placement has the
highest sum over the cards. A score that looks at the node as a whole is written as that of the node with only this
card changed: exact for pods on one card.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType

from mgpu.model.cards import CardState

CardScore = Callable[[int, int, int], int]
"""(position in the cards, core in milli, memory in bytes that the pod takes at its peak) → worth; higher is better.

An exact integer. (position, 0, 0) is the worth of a card that the pod leaves alone.
"""

Scoring = Callable[[Sequence[CardState], int], CardScore]
"""(all cards of the node, weight of core in percent) → the worth of each."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A card policy as it holds for one pod. `weight_of_core`: percent; the rest is memory's.

    steps: what the scores of all cards with one more amount cost of the engine's effort; 0: a few multiplications.
    """

    scoring: Scoring
    weight_of_core: int
    steps: int = 0

    def scores(self, cards: Sequence[CardState]) -> CardScore:
        return self.scoring(cards, self.weight_of_core)


def binpack(cards: Sequence[CardState], weight_of_core: int) -> CardScore:
    """Large free parts stay free: mgpu.md's `free`, Σ w·c² + (100 − w)·m² over all cards, unhealthy ones too.

    c and m are the free fractions of core and memory of a card afterwards. They are brought to one denominator
    instead of divided, so that equal scores are equal; the constant 100·n is left out.
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


def spread(cards: Sequence[CardState], weight_of_core: int) -> CardScore:
    """The opposite of binpack: what is free is free evenly (mgpu.md's 1 − `free`)."""
    packed = binpack(cards, weight_of_core)
    return lambda position, core, memory: -packed(position, core, memory)


def minor(cards: Sequence[CardState], weight_of_core: int) -> CardScore:  # noqa: ARG001
    """The lowest minors that fit. Where indexes are in their order, all placements are equally good and the first is
    taken, container by container.
    """
    minors = [state.card.index if state.card.minor is None else state.card.minor for state in cards]
    if minors == sorted(minors):
        return lambda position, core, memory: 0  # noqa: ARG005
    return lambda position, core, memory: -minors[position] if core or memory else 0


def bestfit(cards: Sequence[CardState], weight_of_core: int) -> CardScore:  # noqa: ARG001
    """Leave the least memory free on the cards that the pod uses, whatever their size.

    Source: docs/design/gpushare.md, "Extender".
    """
    free = [state.memory_free for state in cards]
    return lambda position, core, memory: memory - free[position] if core or memory else 0


POLICIES: Mapping[str, Scoring] = MappingProxyType(
    {
        "binpack": binpack,
        "spread": spread,
        "fragmentation": binpack,
        "fgd": binpack,
        "minor": minor,
        "bestfit": bestfit,
    }
)
"""`fragmentation` and `fgd` until they have learnt what pods come: then `looking_ahead` takes their place. The last two
are dialects' defaults and no settings.
"""


def policy_named(name: str, weight_of_core: int) -> Policy:
    """The policy of a setting. Raises KeyError for a name that is not in POLICIES; settings are checked before."""
    return Policy(POLICIES[name], weight_of_core)
