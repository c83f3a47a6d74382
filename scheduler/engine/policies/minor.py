"""Card policy `minor`: use the cards with the lowest device minors that fit.

It is the default of Koordinator's dialect and of slices. Ratings of cards must be exact integers.
"""

from collections.abc import Sequence

from mgpu.model.cards import CardState
from scheduler.engine.card_policy import CardPolicy, CardScore


def minor(cards: Sequence[CardState], weight_of_core: int) -> CardScore:  # noqa: ARG001
    """Rate a card that the pod uses by its minor; lower is better.

    If the indexes are in the order of the minors, all cards rate equally, and `place` takes the lowest indexes.
    """
    minors = [state.card.index if state.card.minor is None else state.card.minor for state in cards]
    if minors == sorted(minors):
        return lambda position, core, memory: 0  # noqa: ARG005
    return lambda position, core, memory: -minors[position] if core or memory else 0


POLICY = CardPolicy(minor)
