"""The cluster as it is shown to people: whatever they look at is taken node by node, so that nobody waits for them."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.node_slices import NodeSlices
from mgpu.model.pods import Node
from mgpu.model.slice_names import is_slice
from scheduler.cluster.devices import Inventories
from scheduler.cluster.gpu_pods import GpuPod


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A node at one moment.

    cards: its GPUs, cut or not. others: its devices that are neither GPUs nor slices. problem: what cannot be read of
    its slices, "" where all can.
    """

    node: Node
    cards: tuple[Card, ...]
    others: tuple[Card, ...]
    slices: NodeSlices
    problem: str
    held: tuple[Holding, ...]


class Snapshots:
    """Thread-safe, by its owner's lock, which no method holds for longer than a decision does. All that they are made
    of is its owner's, and only read.
    """

    def __init__(
        self,
        lock: threading.RLock,
        nodes: Mapping[str, Node],
        pods: Mapping[str, GpuPod],
        inventories: Inventories,
        ledger: Ledger,
        versions: Callable[[], dict[str, int]],
    ) -> None:
        self._lock, self._nodes, self._pods = lock, nodes, pods
        self._inventories, self._ledger, self._versions = inventories, ledger, versions

    def versions(self) -> dict[str, int]:
        """By node, what moves with every change of it, its cards and who holds them; some of the nodes may be gone."""
        with self._lock:
            return self._versions()

    def of(self, name: str) -> Snapshot | None:
        """None: there is no such node."""
        with self._lock:
            node = self._nodes.get(name)
            if node is None:
                return None
            slices = self._inventories.slices
            others = tuple(s.card for s in self._ledger.others(name) if not is_slice(s.card.type))
            gpus, held = self._inventories.gpus(node), self._ledger.holdings(name)
            return Snapshot(node, gpus, others, slices.of(name), slices.problem(name), held)

    def gpu_pods(self) -> tuple[GpuPod, ...]:
        """All that are known, in no order that means anything."""
        with self._lock:
            return tuple(self._pods.values())
