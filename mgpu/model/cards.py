"""Cards as a node has them, and how full they are."""

from dataclasses import dataclass

from mgpu.model.groups import Group

WHOLE_CORE = 1000
"""The compute of one card, in milli."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of a node.

    index: what mGPU and gpushare write into annotations; unique on the node.
    core: milli. memory: bytes. minor: the number in /dev/nvidia<minor>; not the index.
    """

    index: int
    uuid: str
    model: str
    memory: int
    core: int = WHOLE_CORE
    healthy: bool = True
    numa: int | None = None
    minor: int | None = None


@dataclass(frozen=True, slots=True)
class CardState:
    """A card and what is held of it. `shares` counts containers; a card without any is idle.

    groups: those whose pods hold a share of it (`mgpu.model.wishes`).
    Used may exceed the card (a hand-written record, a card that came back smaller): free is then 0.
    """

    card: Card
    core_used: int = 0
    memory_used: int = 0
    shares: int = 0
    groups: frozenset[Group] = frozenset()

    @property
    def core_free(self) -> int:
        return max(0, self.card.core - self.core_used)

    @property
    def memory_free(self) -> int:
        return max(0, self.card.memory - self.memory_used)

    @property
    def idle(self) -> bool:
        return self.shares == 0
