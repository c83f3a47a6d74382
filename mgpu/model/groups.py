"""Defines the groups of pods that the constraints `spread-group` and `same-card-group` form, and a group's cards.

`mgpu.model.pod_constraints` reads the groups, the ledger finds their cards, and mainly the scheduler uses both.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    """The pods of one namespace that name the same group in a constraint.

    Attributes:
        constraint: the name of the annotation without its prefix, such as `spread-group`.
        name: the value of the annotation.
    """

    constraint: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.constraint} {self.name}"


class GroupCard(NamedTuple):
    """A card that a group holds.

    Attributes:
        card: the index of the card, or its name in the allocation record if the node does not report the card; "" if it
            is unknown which card of the node it is.
    """

    node: str
    card: str

    def __str__(self) -> str:
        return f"card {self.card} of {self.node}" if self.card else f"an unknown card of {self.node}"


def format_group_cards(cards: Iterable[GroupCard]) -> str:
    """Return a text such as `card 0 of n1 and card 3 of n2`."""
    return " and ".join(map(str, cards))
