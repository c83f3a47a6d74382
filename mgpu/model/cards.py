"""Cards as a node has them, and how full they are."""

from collections.abc import Iterable
from dataclasses import dataclass

from mgpu.model.groups import Group
from mgpu.model.slice_names import is_slice

GPU = "gpu"
"""The type of the devices that all dialects share; others are Koordinator's (rdma, fpga, any name) or slices."""

WHOLE_CORE = 1000
"""The compute of one card, in milli."""

WHOLE_RATIO = 100
"""The memory of one card, in percent."""


def noun(type: str) -> str:
    """What people call a device of this type."""
    return "card" if type == GPU else f"{type} {'slice' if is_slice(type) else 'device'}"


@dataclass(frozen=True, slots=True)
class Card:
    """One device of a node: a GPU, or of another `type`, which has milli and no memory.

    index: what mGPU and gpushare write into annotations; unique among the node's devices of its type.
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
    type: str = GPU


@dataclass(frozen=True, slots=True)
class CardState:
    """A card and what is held of it. `shares` counts containers; a card without any is idle.

    groups: those whose pods hold a share of it (`mgpu.model.pod_constraints`).
    ratio_used: percent of its memory, of those shares that are counted so.
    gpuid: the name under which MtgpuPods share it, and nobody else then (docs/design/mtgpu.md, "Meaning of a GPUID").
    Used may exceed the card (a hand-written record, a card that came back smaller): free is then 0.
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
        """For the pods that share cards without a name, as the next two."""
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
        """What is used or else not to be had by those."""
        return max(self.core_used, self.card.core) if self.gpuid else self.core_used

    @property
    def memory_taken(self) -> int:
        return max(self.memory_used, self.card.memory) if self.gpuid else self.memory_used

    @property
    def core_left(self) -> int:
        """For the MtgpuPods of its GPUID, where it has one."""
        return max(0, self.card.core - self.core_used)

    @property
    def memory_left(self) -> int:
        return max(0, self.card.memory - self.memory_used)


def of_type(states: Iterable[CardState], type: str = GPU) -> list[CardState]:
    return [state for state in states if state.card.type == type]
