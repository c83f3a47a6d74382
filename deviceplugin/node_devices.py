"""The devices of the node as the agent's parts read them: its GPUs, and the slices that they are partitioned into."""

from typing import Protocol

from deviceplugin.partitioning.node_partitions import NodePartitions
from mgpu.model.cards import Card


class CardReader(Protocol):
    """The part of `deviceplugin.cards.card_watch.CardWatch` that is used here."""

    @property
    def cards(self) -> tuple[Card, ...] | None: ...


class NodeDevices:
    """Joins the card watch and the partition worker, each of which owns its part. Thread-safe."""

    def __init__(self, cards: CardReader, partitions: NodePartitions) -> None:
        self._cards = cards
        self._partitions = partitions

    @property
    def are_read(self) -> bool:
        """Whether the GPUs of the node have been read."""
        return self._cards.cards is not None

    def gpus(self) -> tuple[Card, ...]:
        """Return all GPUs of the node, partitioned ones included; none if they have not been read yet."""
        return self._cards.cards or ()

    def devices(self) -> tuple[Card, ...]:
        """Return what containers can be started on: the GPUs from which no slice is made, and the slices."""
        return self._partitions.devices(self.gpus())

    def whole(self) -> tuple[Card, ...] | None:
        """Return the GPUs that are offered whole; None before the first look at the partitions."""
        return self._partitions.whole(self.gpus())
