"""Card policy `bestfit`: leave the least memory free on the cards that are used.

It is the default of the gpushare dialect. Ratings of cards must be exact integers.
"""

from collections.abc import Sequence

from mgpu.model.cards import CardState
from scheduler.engine.card_policy import CardPolicy, CardScore


def bestfit(cards: Sequence[CardState], weight_of_core: int) -> CardScore:  # noqa: ARG001
    """Rate a card that the pod uses by the memory that stays free on it, regardless of the size of the card.

    Source: docs/design/gpushare.md, "Extender".
    """
    free = [state.memory_free for state in cards]
    return lambda position, core, memory: memory - free[position] if core or memory else 0


POLICY = CardPolicy(bestfit)
