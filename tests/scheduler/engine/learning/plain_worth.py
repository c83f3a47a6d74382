"""The worth of states as the definition reads, node by node and type by type, in whole numbers."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from scheduler.engine.learning.shapes import NEVER, Shape, milli_per_card
from tests.scheduler.engine.learning.clusters import Node


class PlainType(NamedTuple):
    """A type on nodes of one class."""

    cpu: int
    memory: int
    cards: int
    milli: int
    fit: int
    copy: int


def plain_worth(types: Sequence[PlainType], card_values: Sequence[int], node: Node) -> int:
    _, cpu, memory, free = node
    worth = sum(card_values[milli] for milli in free)
    for kind in types:
        large = [milli for milli in free if kind.milli < NEVER and milli >= kind.milli]
        by_cards = sum(milli // kind.milli for milli in large) // kind.cards if len(large) >= kind.cards else 0
        copies = min(by_cards, cpu // kind.cpu, memory // kind.memory)
        worth += kind.copy * copies + (kind.fit * sum(large) if copies else 0)
    return worth


def plain_changes(
    types: Sequence[PlainType], card_values: Sequence[int], node: Node, shape: Shape
) -> dict[tuple[int, ...], int] | None:
    """The change of the worth for each choice of cards; None where the pod does not fit."""
    kind, cpu, memory, free = node
    need = milli_per_card(shape, kind)
    fitting = [card for card, left in enumerate(free) if need is not None and left >= need]
    if need is None or cpu < shape.cpu or memory < shape.memory or len(fitting) < shape.cards:
        return None
    before = plain_worth(types, card_values, node)
    changes = {}
    for cards in _choices(free, fitting, shape.cards):
        left = tuple(milli - need * (card in cards) for card, milli in enumerate(free))
        after = plain_worth(types, card_values, (kind, cpu - shape.cpu, memory - shape.memory, left))
        changes[cards] = after - before
    return changes


def _choices(free: Sequence[int], fitting: Sequence[int], cards: int) -> Iterator[tuple[int, ...]]:
    if cards == 1:
        yield from combinations(fitting, 1)
    else:
        yield tuple(sorted(sorted(fitting, key=lambda card: (free[card], card))[:cards]))
