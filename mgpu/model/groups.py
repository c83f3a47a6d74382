"""Pods that belong together by name, and where they are."""

from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    """Pods of one namespace that name each other. `wish`: what they wish of it, an annotation without prefix."""

    constraint: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.constraint} {self.name}"


class Seat(NamedTuple):
    """A card that a group holds. `card`: its index or its UUID, as text; "": on that node, nobody knows where."""

    node: str
    card: str

    def __str__(self) -> str:
        return f"card {self.card} of {self.node}" if self.card else f"an unknown card of {self.node}"


def where(seats: Iterable[Seat]) -> str:
    """`card 0 of n1 and card 3 of n2`."""
    return " and ".join(map(str, seats))
