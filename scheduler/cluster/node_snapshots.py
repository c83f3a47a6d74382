"""Snapshots of nodes: how one pod finds a node or all nodes, and what a node contains as people are shown it.

A pod finds a node without its own holding, and with the cards taken that are kept for nominated pods of the same or a
higher priority. Decisions take a `NodeSnapshot` of one node; the filter takes a `Table` of all nodes, which is kept up
to date node by node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgpu.dialects import mtgpu
from mgpu.model.cards import Card, CardState
from mgpu.model.compute_resources import UNBOUNDED, CpuMemory
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.node_slices import NodeSlices
from mgpu.model.pods import Node, Pod
from mgpu.model.slice_names import is_slice
from scheduler.cluster.arrays import Matrix
from scheduler.cluster.gpu_pods import occupies
from scheduler.cluster.node_usage import Usage
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.nominations import LOWEST, Nominations
from scheduler.cluster.pods import Pods
from scheduler.engine import nvidia_plugin
from scheduler.engine.arrays.node_table import NodeTable
from scheduler.engine.nvidia_plugin import CardsUsedByMgpu


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node at one moment as one pod finds it: without what the pod itself holds there.

    Attributes:
        node: None where there is no such Node.
        cards: The GPUs with what is held on them.
        version: Changes with every change of the node, its cards or its holdings.
        room: The cpu and memory that other pods leave free.
        unkept: `cards` with those taken too that are kept for nominated pods (scheduler/cluster/nominations.py).
        ours: Where NVIDIA's plugin gives out cards too (scheduler/engine/nvidia_plugin.py), the indexes of the cards
            that mgpu gave out.
        others: The devices of other types than GPU.
        unkept_others: The same with what is kept for nominated pods.
    """

    node: Node | None
    cards: tuple[CardState, ...]
    version: int
    room: CpuMemory = UNBOUNDED
    unkept: tuple[CardState, ...] = ()
    ours: tuple[int, ...] = ()
    others: tuple[CardState, ...] = ()
    unkept_others: tuple[CardState, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeContents:
    """A node at one moment as the page and the metrics show it.

    Attributes:
        cards: All its GPUs, partitioned or not.
        others: Its devices that are neither GPUs nor slices.
        problem: Why its partitioning cannot be read, None where it can.
    """

    node: Node
    cards: tuple[Card, ...]
    others: tuple[Card, ...]
    slices: NodeSlices
    problem: str | None
    held: tuple[Holding, ...]


class NodeSnapshots:
    """Part of the ClusterCache, which holds its lock around every call. It reads from the other parts."""

    def __init__(self, nodes: Nodes, pods: Pods, ledger: Ledger, nominations: Nominations, usage: Usage) -> None:
        self._nodes = nodes
        self._pods = pods
        self._ledger = ledger
        self._nominations = nominations
        self._usage = usage
        self._used_by_mgpu = CardsUsedByMgpu(ledger)
        self._versions: dict[str, int] = {}
        self._last_version = 0
        self._dirty: set[str] = set()
        self._matrix = Matrix()

    def touch(self, node: str) -> None:
        """Note that the node, its cards or what is held of them has changed."""
        # One counter for all nodes: a node that is deleted and created again gets no version that it had before.
        self._last_version += 1
        self._versions[node] = self._last_version
        self._dirty.add(node)
        self._used_by_mgpu.touch(node)

    def mark(self, nodes: Iterable[str]) -> None:
        """Note that what is kept for nominated pods on these nodes has changed."""
        self._dirty.update(nodes)

    def version(self, node: str) -> int:
        """Return the version of a node's snapshots; 0 for a node that has none."""
        return self._versions.get(node, 0)

    def versions(self) -> dict[str, int]:
        """Return the versions of all nodes; some of them may be gone."""
        return dict(self._versions)

    def of(self, name: str, uid: str, gpuid: str = "") -> NodeSnapshot:
        """Return the node as the pod of this UID finds it; gpuid: for which the pod occupies a card there."""
        node = self._nodes.get(name)
        known = self._pods.get(uid)
        priority = known.pod.priority if known else 0
        cards = self._cards(name, uid, gpuid)
        others = self._ledger.others(name, uid)
        return NodeSnapshot(
            node,
            cards,
            self.version(name),
            node.room.less(self._usage.on(name, uid)) if node else UNBOUNDED,
            self._nominations.beside(name, cards, uid, priority),
            self.indexes_used_by_mgpu(name, uid, gpuid) if nvidia_plugin.is_on_node(node) else (),
            others,
            self._nominations.beside(name, others, uid, priority),
        )

    def contents(self, name: str) -> NodeContents | None:
        """Return what a node contains, or None where there is no such node."""
        node = self._nodes.get(name)
        if node is None:
            return None
        others = tuple(state.card for state in self._ledger.others(name) if not is_slice(state.card.type))
        slices = self._nodes.slices
        held = self._ledger.holdings(name)
        return NodeContents(node, self._nodes.gpus(node), others, slices.of(name), slices.problem(name), held)

    def indexes_used_by_mgpu(self, node: str, uid: str = "", gpuid: str = "") -> tuple[int, ...]:
        """Return the indexes of the cards that mgpu gave to other pods than this one."""
        return self._used_by_mgpu.on(node, uid, gpuid)

    def table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> NodeTable:
        """Return a snapshot of the nodes of these names as this pod finds them."""
        self.refresh()
        own = self._ledger.holding(pod.uid)
        occupied = mtgpu.occupied(pod)
        different = self._nominations.differing(pod.uid, pod.priority)
        if own is not None:
            different.add(own.node)
        if occupied is not None:
            different.add(occupied[0])
        instead = {name: self._unkept(name, pod.uid, pod.priority, occupies(pod, name)) for name in different}
        return self._matrix.table(names, request, instead)

    def refresh(self) -> None:
        """Bring the arrays up to date: each node that has changed since the last call costs some 20 µs."""
        for name in self._dirty:
            node = self._nodes.get(name)
            if node is not None:
                self._matrix.put(node, self._unkept(name))
            else:
                self._matrix.drop(name)
                self._versions.pop(name, None)
        self._dirty.clear()

    def _cards(self, node: str, uid: str, gpuid: str) -> tuple[CardState, ...]:
        return self._ledger.for_gpuid(node, gpuid, uid) if gpuid else self._ledger.cards(node, uid)

    def _unkept(self, node: str, uid: str = "", priority: int = LOWEST, gpuid: str = "") -> tuple[CardState, ...]:
        return self._nominations.beside(node, self._cards(node, uid, gpuid), uid, priority)
