"""Defines the cards and other devices of a node, and their states.

`mgpu.model.ledger` computes the states. Most of mgpu uses these frozen values.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mgpu.model.groups import Group
from mgpu.model.slice_names import is_slice

GPU = "gpu"
"""The device type of GPUs. Other types are those of slices (`mig-2g.20gb`, `gpu-4gb`) and of Koordinator's other
devices (`rdma`, `fpga` or any other name)."""

WHOLE_CORE = 1000
"""The compute of one card in milli. A milli is a thousandth of a card's compute. All amounts of core are in milli."""

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
        minor: the number in /dev/nvidia<minor>; None if it is equal to the index. The minor of a slice only determines
            the order in which the placement engine takes slices.
        type: the device type, such as `GPU`.
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

    A used amount may exceed the card's, for example because of an allocation record that a user wrote. Then the free
    amount is 0.

    Attributes:
        core_used: the used core, in milli.
        memory_used: the used memory, in bytes.
        shares: the most containers that can use the card at the same time; 0 for an idle card.
        groups: the groups of the pods that are known to hold a share of the card (`mgpu.model.groups`).
        ratio_used: the used memory, in percent. Whole cards count as 100, and other shares count only if their memory
            is requested in percent.
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
