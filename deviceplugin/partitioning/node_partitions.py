"""Shares the observed partitions of this node's cards within the agent.

Only the partition worker publishes a new state. `deviceplugin.node_devices`, the reporter and the served resources read
it from any thread. They are created before the worker, which itself needs some of them.
"""

from collections.abc import Sequence

from mgpu.model.cards import Card
from mgpu.model.node_slices import NO_SLICES, NodeSlices, slice_devices, unpartitioned_cards


class NodePartitions:
    """The observed partitions of the node. Thread-safe: a state is immutable, and is replaced as a whole.

    Args:
        enabled: whether the dialect of slices is enabled. If not, all cards are whole.

    Attributes:
        state: the mode, the existing slices and the partitioned cards; None before the first observation.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.state: NodeSlices | None = None

    def devices(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """Return the devices on which containers can be started: GPUs that are not partitioned, and slices.

        A card that will be partitioned, but is not yet because a pod holds it, still counts as a GPU.
        """
        state = self.state or NO_SLICES
        partitioned = {*state.cards, *(s.card for s in state.existing)}
        return (*(gpu for gpu in gpus if gpu.index not in partitioned), *slice_devices(state, gpus))

    def whole(self, gpus: Sequence[Card]) -> tuple[Card, ...] | None:
        """Return the GPUs that other vocabularies may use, or None before the first observation.

        No GPU is among them that is partitioned, that the plan partitions, or that supports MIG on a MIG node.
        """
        if self._enabled and self.state is None:
            return None
        return unpartitioned_cards(self.state or NO_SLICES, gpus)

    @property
    def reports_users(self) -> bool:
        """Whether the Node's annotations may say which pods use which slices."""
        return self._enabled and (self.state is None or self.state.mode != NO_SLICES.mode)
