"""Adds up what containers use of the cards that they see by ResourceClaims. The functions are pure.

A container may see a card by several claims, or by a claim and by a share of its own. Nothing tells for which of them
its processes use the card, so the use of these claims is not known.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from deviceplugin.usage.container_use import ContainerUse, Sum
from mgpu.model.cards import Card


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """What all containers together use of one card by one claim.

    Attributes:
        memory: The memory in bytes; None if that is not known.
        sm: The use of the SMs since the last reading, from 0 to 1; None if that is not known.
    """

    namespace: str
    claim: str
    card: Card
    memory: int | None = None
    sm: float | None = None


def claim_uses(containers: Iterable[ContainerUse]) -> tuple[ClaimUse, ...]:
    """Return the use of each claim and card that one of these containers sees, by namespace, claim and index."""
    sums: dict[tuple[str, str, Card], Sum] = {}
    for row in containers:
        is_clear = len(row.claims) == 1 and not row.has_own_share
        for claim in row.claims:
            total = sums.setdefault((row.namespace, claim, row.card), Sum())
            total.add(row.memory if is_clear else None, row.sm if is_clear else None)
    found = [ClaimUse(*key, total.memory, total.sm) for key, total in sums.items()]
    return tuple(sorted(found, key=attrgetter("namespace", "claim", "card.index")))
