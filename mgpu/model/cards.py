"""Defines the cards and other devices of a node, and their states.

A `Card` comes mainly from a Device (`device_object`), from the slices of a node (`node_slices`) or from NVML (the
agent). The ledger creates the `CardState`s that the placement engine, the metrics and the command line read. Both
classes are immutable.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mgpu.model.groups import Group
from mgpu.model.slice_names import is_slice

GPU = "gpu"
"""The type of GPUs. Other types are the kinds of slices, and Koordinator's other devices (rdma, fpga or any other
name)."""

WHOLE_CORE = 1000
"""The compute of one card, in milli, the unit of all amounts of core: thousandths of the compute of one card."""

WHOLE_RATIO = 100
"""The memory of one card, in percent."""


def noun(type: str) -> str:
    """Return the word for a device of this type in messages."""
    return "card" if type == GPU else f"{type} {'slice' if is_slice(type) else 'device'}"


@dataclass(frozen=True, slots=True)
class Card:
    """One device of a node: a GPU, a slice, or a device of another type, which has no memory.

    Attributes:
        index: the number of the device in annotations of mGPU and gpushare. It is unique among the node's devices of
            the same type.
        memory: the memory in bytes.
        core: the compute in milli.
        numa: the NUMA node; None if it is unknown.
        minor: the number in /dev/nvidia<minor>; None if it is equal to the index.
        type: `GPU`, or another type of devices.
    """

    index: int
    uuid: str
    model: str
    memory: int
    core: int = WHOLE_CORE
    healthy: bool = True
    numa: int | None = None
    minor: int | None = None
    type: str = GPU


@dataclass(frozen=True, slots=True)
class CardState:
    """A card and how much of it is used.

    The used amounts may exceed the card, for example because of a hand-written record. Nothing is free then.

    Attributes:
        core_used: the used core, in milli.
        memory_used: the used memory, in bytes.
        shares: the number of containers on the card; 0 for an idle card.
        groups: the groups whose pods hold a share of the card (`mgpu.model.pod_constraints`).
        ratio_used: the memory in percent that is used by the shares whose memory is requested in percent.
        gpuid: the GPUID whose MtgpuPods share the card, to the exclusion of other pods (docs/design/mtgpu.md, "Meaning
            of a GPUID"); "" if no MtgpuPods use the card.
    """

    card: Card
    core_used: int = 0
    memory_used: int = 0
    shares: int = 0
    groups: frozenset[Group] = frozenset()
    ratio_used: int = 0
    gpuid: str = ""

    @property
    def core_free(self) -> int:
        """The free core for pods other than MtgpuPods, in milli."""
        return 0 if self.gpuid else self.core_left

    @property
    def memory_free(self) -> int:
        return 0 if self.gpuid else self.memory_left

    @property
    def ratio_free(self) -> int:
        return 0 if self.gpuid else max(0, WHOLE_RATIO - self.ratio_used)

    @property
    def idle(self) -> bool:
        return self.shares == 0

    @property
    def core_taken(self) -> int:
        """The core that is not free for pods other than MtgpuPods, in milli."""
        return max(self.core_used, self.card.core) if self.gpuid else self.core_used

    @property
    def memory_taken(self) -> int:
        return max(self.memory_used, self.card.memory) if self.gpuid else self.memory_used

    @property
    def core_left(self) -> int:
        """The unused core, in milli. On a card with a GPUID, only MtgpuPods of this GPUID can get it."""
        return max(0, self.card.core - self.core_used)

    @property
    def memory_left(self) -> int:
        return max(0, self.card.memory - self.memory_used)


def states_of_type(states: Iterable[CardState], type: str = GPU) -> list[CardState]:
    return [state for state in states if state.card.type == type]
