"""The devices of the node: its GPUs, and the slices into which they are partitioned.

`NodeDevices` stores nothing: `CardWatch` owns the GPUs, and `NodePartitions` owns the slices. The other parts of the
agent read the devices through `NodeState.devices`.
"""

from deviceplugin.cards.card_watch import CardWatch
from deviceplugin.partitioning.node_partitions import NodePartitions
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding


class NodeDevices:
    """The GPUs of the card watch, combined with the partitions. Thread-safe."""

    def __init__(self, cards: CardWatch, partitions: NodePartitions) -> None:
        self._cards = cards
        self._partitions = partitions

    @property
    def are_read(self) -> bool:
        """Whether the GPUs of the node have been read."""
        return self._cards.cards is not None

    def gpus(self) -> tuple[Card, ...]:
        """Return all GPUs of the node, including partitioned ones; empty if they have not been read yet."""
        return self._cards.gpus

    def devices(self) -> tuple[Card, ...]:
        """Return the devices on which containers can start: the GPUs that are not partitioned, and the slices."""
        return self._partitions.devices(self.gpus())

    def mig_cards(self) -> tuple[Card, ...]:
        """Return the GPUs of which claims get MIG instances."""
        return self._partitions.mig_cards(self.gpus())

    def cards_in_mig_mode(self) -> frozenset[int]:
        """Return the indexes of those of `mig_cards` that are in MIG mode."""
        return self._partitions.cards_in_mig_mode()

    def foreign_instances(self) -> tuple[Holding, ...]:
        """Return the MIG instances of `mig_cards` that were not created for claims, as holdings."""
        return self._partitions.foreign_instances()

    def whole(self) -> tuple[Card, ...] | None:
        """Return the GPUs that are not reserved for slices; None if the partitions have not been read yet."""
        return self._partitions.whole(self.gpus())
