"""What pods and empty nodes look like to the judges of fragmentation, and what of a card a pod needs on a node."""

from typing import NamedTuple

CARD = 1000
"""What a card has: milli. Memory counts in the same milli, so that a card has one free amount, the scarcer one's."""


class Shape(NamedTuple):
    """A pod. cpu: milli; memory: bytes of the node; core (milli) and card_memory (bytes) on each of `cards` cards.

    models: the card models that it may run on, sorted; none: any.
    """

    cpu: int
    memory: int
    cards: int = 0
    core: int = 0
    card_memory: int = 0
    models: tuple[str, ...] = ()


class NodeClass(NamedTuple):
    """An empty node. cpu: milli; memory, card_memory: bytes, the latter of each of its `cards` equal cards."""

    cpu: int
    memory: int
    cards: int
    model: str = ""
    card_memory: int = 0


def milli_on(shape: Shape, node: NodeClass) -> int | None:
    """What `shape` takes of each card on such a node, at least 1; 0: it wants no card; None: it never fits."""
    if not shape.cards:
        return 0
    if shape.card_memory > node.card_memory:
        return None
    milli = max(shape.core, 1)
    if shape.card_memory:
        milli = max(milli, CARD * shape.card_memory // node.card_memory)  # down, as what is free is rounded down
    allowed = not shape.models or node.model in shape.models
    return milli if allowed and milli <= CARD and shape.cards <= node.cards else None
