"""Shares the observed partitions of this node's cards within the agent.

Only the partition worker publishes a new state, and any thread may read it. `NodeDevices`, `UnrecordedPods` and
`PartitionService` read it. This class is separate from the worker because `NodeState` creates it and most of its
readers before the worker exists.
"""

from collections.abc import Sequence

from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from mgpu.model.mig import layout_of
from mgpu.model.mig_devices import MigDevice, foreign_holding
from mgpu.model.node_slices import NO_SLICES, NodeSlices, slice_devices, unpartitioned_cards
from mgpu.model.slice_names import MIG_CLAIMS


class NodePartitions:
    """The observed partitions of the node. Thread-safe: a state is immutable, and is replaced as a whole.

    Args:
        enabled: Whether the dialect of slices is enabled. If it is not, all cards are whole.

    Attributes:
        state: The mode, the counts of the plan, the existing slices and the cards that can be partitioned; None before
            the worker has read the Node.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.state: NodeSlices | None = None

    def devices(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """Return the devices that containers can get: GPUs that are not partitioned, and slices.

        A card that the plan partitions counts as a GPU until it is partitioned, for example while a pod holds it.
        """
        state = self.state or NO_SLICES
        partitioned = {*state.cards, *(s.card for s in state.existing)}
        return (*(gpu for gpu in gpus if gpu.index not in partitioned), *slice_devices(state, gpus))

    def whole(self, gpus: Sequence[Card]) -> tuple[Card, ...] | None:
        """Return the GPUs that other vocabularies may use, or None before the worker has read the Node.

        GPUs that are partitioned or that the plan partitions are left out. On a node with a label for
        MIG, all GPUs that support MIG are left out.
        """
        if self._enabled and self.state is None:
            return None
        return unpartitioned_cards(self.state or NO_SLICES, gpus)

    def mig_cards(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """Return the GPUs of which claims get MIG instances."""
        if self.state is None or self.state.mode != MIG_CLAIMS:
            return ()
        return tuple(gpu for gpu in gpus if layout_of(gpu.model, gpu.memory))

    def cards_in_mig_mode(self) -> frozenset[int]:
        """Return the indexes of those of `mig_cards` that are in MIG mode."""
        return self.state.cards if self.state is not None and self.state.mode == MIG_CLAIMS else frozenset()

    def foreign_instances(self) -> tuple[Holding, ...]:
        """Return the MIG instances of `mig_cards` that were not created for claims, as holdings."""
        if self.state is None or self.state.mode != MIG_CLAIMS or not self.state.existing:
            return ()
        return (foreign_holding(MigDevice(s.card, s.instance) for s in self.state.existing),)

    @property
    def reports_users(self) -> bool:
        """Whether the Node's annotations may say which pods use which slices."""
        return self._enabled and (self.state is None or self.state.mode != NO_SLICES.mode)
