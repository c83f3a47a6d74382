"""Parts of the agent with a fixed state."""

from dataclasses import dataclass

from mgpu.model.cards import Card
from mgpu.model.ledger import Holding


@dataclass
class FixedGpus:
    """The GPUs of a node (`deviceplugin.cards.NodeGpus`)."""

    gpus: tuple[Card, ...]


@dataclass
class FixedCards:
    """The cards of a node as `CardWatch` has them; None: not known yet."""

    cards: tuple[Card, ...] | None


class NoRemnants:
    """A node without deleted pods that still run."""

    removed = 0

    def uids(self) -> tuple[str, ...]:
        return ()

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def is_remnant(self, uid: str) -> bool:  # noqa: ARG002
        return False
