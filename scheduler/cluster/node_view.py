"""How a decision sees a node."""

from dataclasses import dataclass

from mgpu.model.cards import CardState
from mgpu.model.compute_resources import UNBOUNDED, CpuMemory
from mgpu.model.pods import Node


@dataclass(frozen=True, slots=True)
class View:
    """A node at one moment, without what one pod holds on it. `version` moves with every change of node and cards.

    room: what is free of its cpu and memory, beside all other pods.
    unkept: its cards without what is kept for pods nominated there (scheduler/cluster/nominations.py).
    others, unkept_others: the same of its devices of other types.
    ours: where NVIDIA's plugin gives out cards too (scheduler/engine/nvidia_plugin.py), the indexes of those that mgpu
    gave out.
    """

    node: Node | None
    cards: tuple[CardState, ...]
    version: int
    room: CpuMemory = UNBOUNDED
    unkept: tuple[CardState, ...] = ()
    ours: tuple[int, ...] = ()
    others: tuple[CardState, ...] = ()
    unkept_others: tuple[CardState, ...] = ()
