"""Groups of pods by a constraint (`spread-group`, `same-card-group`), and the cards that a group holds."""

from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    """The pods of one namespace with the same name in a group constraint.

    Attributes:
        constraint: the annotation without prefix, such as `spread-group`.
    """

    constraint: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.constraint} {self.name}"


class GroupCard(NamedTuple):
    """A card that a group holds.

    Attributes:
        card: its index or UUID as text; "" for an unknown card of the node.
    """

    node: str
    card: str

    def __str__(self) -> str:
        return f"card {self.card} of {self.node}" if self.card else f"an unknown card of {self.node}"


def format_group_cards(seats: Iterable[GroupCard]) -> str:
    """Return `card 0 of n1 and card 3 of n2`."""
    return " and ".join(map(str, seats))
