"""The observed partitions of this node's cards, shared within the agent.

The partition worker alone publishes a new state. Allocation, the reporter and the served resources read it from any
thread, and can therefore be built before the worker, which itself needs some of them.
"""

from collections.abc import Sequence

from mgpu.model.cards import Card
from mgpu.model.node_slices import NO_SLICES, NodeSlices, devices, undivided


class NodePartitions:
    """Thread-safe: a state is immutable, and is replaced as a whole.

    Args:
        enabled: whether the dialect of slices is enabled. If not, all cards are whole.

    Attributes:
        state: the mode, the slices that exist, and which cards are not whole; None: not known yet.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.state: NodeSlices | None = None

    def devices(self, gpus: Sequence[Card]) -> tuple[Card, ...]:
        """Return what containers can be started on: of these cards those that are not cut, and the slices as devices.

        A card that is to be cut, and is not yet because a pod has it, stays that pod's.
        """
        state = self.state or NO_SLICES
        cut = {*state.cards, *(s.card for s in state.made)}
        return (*(gpu for gpu in gpus if gpu.index not in cut), *devices(state, gpus))

    def whole(self, gpus: Sequence[Card]) -> tuple[Card, ...] | None:
        """Return the cards that other vocabularies are offered: none that is cut, or is to be, or can be by MIG.

        None: not known yet.
        """
        if self._enabled and self.state is None:
            return None
        return undivided(self.state or NO_SLICES, gpus)

    @property
    def reports_users(self) -> bool:
        """Whether the Node's annotations say which pods have which slices; before the first state they still may."""
        return self._enabled and (self.state is None or self.state.mode != NO_SLICES.mode)
