"""Cards and other devices of a node, and how much of each is used.

A `Card` comes from a Device object (`device_object`) or from the slices of a node (`node_slices`); the ledger makes the
`CardState` that the placement engine works on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mgpu.model.groups import Group
from mgpu.model.slice_names import is_slice

GPU = "gpu"
"""The type of GPUs. Other types are slices, and Koordinator's devices (rdma, fpga, any name)."""

WHOLE_CORE = 1000
"""The compute of one card, in milli."""

WHOLE_RATIO = 100
"""The memory of one card, in percent."""


def noun(type: str) -> str:
    """Return what messages call a device of this type."""
    return "card" if type == GPU else f"{type} {'slice' if is_slice(type) else 'device'}"


@dataclass(frozen=True, slots=True)
class Card:
    """One device of a node: a GPU, a slice, or a device of another type, which has no memory.

    Attributes:
        index: the number in annotations of mGPU and gpushare; unique among the node's devices of its type.
        memory: bytes.
        core: milli.
        minor: the number in /dev/nvidia<minor>, which may differ from the index; None: the same.
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
    """A card and what is held of it.

    What is used may exceed the card, for example by a hand-written record; then nothing is free.

    Attributes:
        core_used: milli.
        memory_used: bytes.
        shares: the number of containers on it; 0 for an idle card.
        groups: those whose pods hold a share of it (`mgpu.model.pod_constraints`).
        ratio_used: percent of its memory, by shares that are counted in percent.
        gpuid: the GPUID under which MtgpuPods alone share it (docs/design/mtgpu.md, "Meaning of a GPUID"); "" for none.
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
        """What is free for pods other than MtgpuPods, in milli."""
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
        """What is used, or kept from pods other than MtgpuPods, in milli."""
        return max(self.core_used, self.card.core) if self.gpuid else self.core_used

    @property
    def memory_taken(self) -> int:
        return max(self.memory_used, self.card.memory) if self.gpuid else self.memory_used

    @property
    def core_left(self) -> int:
        """What is free for the MtgpuPods of its GPUID, or for all pods where it has none, in milli."""
        return max(0, self.card.core - self.core_used)

    @property
    def memory_left(self) -> int:
        return max(0, self.card.memory - self.memory_used)


def states_of_type(states: Iterable[CardState], type: str = GPU) -> list[CardState]:
    return [state for state in states if state.card.type == type]
