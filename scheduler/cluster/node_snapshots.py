"""Makes immutable snapshots of nodes: for one pod, or for the page and the metrics.

A snapshot for a pod leaves out the pod's own holding. Its available cards count the cards of other nominated pods of
the same or a higher priority as taken. Decisions use a `NodeSnapshot` of one node. The filter mainly uses a `NodeTable`
of many nodes, for which only the changed nodes are computed again. The cluster cache uses `NodeSnapshots` with its lock
held.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mgpu.dialects import mtgpu
from mgpu.model.cards import Card, CardState
from mgpu.model.compute_resources import NO_CPU_MEMORY, UNBOUNDED, CpuMemory
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.mig_devices import MigCardState, MigDevice, foreign_holding, mig_card_states
from mgpu.model.node_slices import NodeSlices
from mgpu.model.pods import Node, Pod
from mgpu.model.slice_names import MIG_CLAIMS, is_slice
from scheduler.cluster.arrays import ClusterArrays
from scheduler.cluster.gpu_pods import occupied_gpuid
from scheduler.cluster.node_usage import NodeUsage
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.nominations import LOWEST_PRIORITY, Nominations, with_holdings
from scheduler.cluster.pods import Pods
from scheduler.engine import nvidia_plugin
from scheduler.engine.arrays.node_table import NodeTable
from scheduler.engine.nvidia_plugin import CardsUsedByMgpu


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node at one moment for one pod, without the pod's own holding.

    Attributes:
        node: The Node, or None if there is none.
        cards: The GPUs, with what pods hold of each.
        version: A number that changes whenever the node, its cards or its holdings change. It does not change with
            nominations or with `free_resources`.
        free_resources: The allocatable cpu and memory that no other pod reserves.
        available_cards: `cards`, with those of nominated pods counted as taken (scheduler/cluster/nominations.py).
        mgpu_cards: On a node where NVIDIA's plugin allocates cards too (scheduler/engine/nvidia_plugin.py), the indexes
            of the cards that mgpu gave to other pods.
        other_devices: The devices that are not GPUs.
        available_other_devices: `other_devices`, with those of nominated pods counted as taken.
        mig_cards: The cards of which claims get MIG instances, with the instances that others hold.
    """

    node: Node | None
    cards: tuple[CardState, ...]
    version: int
    free_resources: CpuMemory = UNBOUNDED
    available_cards: tuple[CardState, ...] = ()
    mgpu_cards: tuple[int, ...] = ()
    other_devices: tuple[CardState, ...] = ()
    available_other_devices: tuple[CardState, ...] = ()
    mig_cards: tuple[MigCardState, ...] = ()

    def without_nominated_cards(self) -> "NodeSnapshot":
        """Return the snapshot with the cards of nominated pods counted as taken in `cards`, too."""
        return replace(self, cards=self.available_cards, other_devices=self.available_other_devices)

    def beside(self, name: str, holdings: Sequence[Holding]) -> "NodeSnapshot":
        """Return the snapshot as if those of these holdings that are on the node existed, too.

        Args:
            name: The name of the node.
        """
        here = [holding for holding in holdings if holding.node == name]
        if not here:
            return self
        return replace(
            self,
            cards=with_holdings(self.cards, here),
            available_cards=with_holdings(self.available_cards, here),
            other_devices=with_holdings(self.other_devices, here),
            available_other_devices=with_holdings(self.available_other_devices, here),
        )


@dataclass(frozen=True, slots=True)
class NodeContents:
    """A node at one moment for the page and the metrics.

    Attributes:
        cards: All GPUs of the node, partitioned or not.
        other_devices: The devices of the node that are neither GPUs nor slices.
        slices: The partitioning of the node.
        problem: The reason why the annotations about the partitioning cannot be read, or None.
        held: All holdings on the node.
    """

    node: Node
    cards: tuple[Card, ...]
    other_devices: tuple[Card, ...]
    slices: NodeSlices
    problem: str | None
    held: tuple[Holding, ...]


def mig_cards_of(
    slices: NodeSlices, gpus: Sequence[Card], holdings: Sequence[Holding], uid: str
) -> tuple[MigCardState, ...]:
    """Return `NodeSnapshot.mig_cards` of a node with these slices, without the holding of this UID."""
    if slices.mode != MIG_CLAIMS:
        return ()
    held = [holding for holding in holdings if holding.uid != uid]
    held.append(foreign_holding(MigDevice(s.card, s.instance) for s in slices.existing))
    return mig_card_states(gpus, held, slices.cards if slices.has_positions else None)


class NodeSnapshots:
    """Part of the ClusterCache, which holds its lock around every call.

    Args:
        record_changes: Whether to record the nodes that `take_changed` returns.

    Attributes:
        last_version: The highest version of any node.
    """

    def __init__(
        self, nodes: Nodes, pods: Pods, ledger: Ledger, nominations: Nominations, *, record_changes: bool
    ) -> None:
        self._nodes = nodes
        self._pods = pods
        self._ledger = ledger
        self._nominations = nominations
        self._record_changes = record_changes
        self._usage = NodeUsage()
        self._used_by_mgpu = CardsUsedByMgpu(ledger)
        self._versions: dict[str, int] = {}
        self.last_version = 0
        self._outdated: set[str] = set()  # Nodes whose arrays must be computed again.
        self._changed: set[str] = set()
        self._arrays = ClusterArrays()

    def touch(self, node: str) -> None:
        """Record that the node, its cards or its holdings have changed."""
        # All nodes share a counter, so that a node that is deleted and created again never gets a former version.
        self.last_version += 1
        self._versions[node] = self.last_version
        self._outdated.add(node)
        self._used_by_mgpu.touch(node)
        self._record_change(node)

    def mark(self, nodes: Iterable[str]) -> None:
        """Record that the available cards of these nodes may have changed because of nominated pods."""
        self._outdated.update(nodes)

    def set_usage(self, uid: str, node: str, needs: CpuMemory) -> None:
        """Replace the cpu and memory that a pod reserves, and the node on which the pod reserves them ("" for none)."""
        for name in self._usage.put(uid, node, needs):
            self._record_change(name)

    def drop_usage(self, uid: str) -> None:
        self.set_usage(uid, "", NO_CPU_MEMORY)

    def take_changed(self, most: int) -> list[tuple[str, NodeSnapshot]]:
        names = [self._changed.pop() for _ in range(min(most, len(self._changed)))]
        return [(name, self.of(name, "")) for name in names]

    def version(self, node: str) -> int:
        """Return the version of a node's snapshots; 0 for an unknown node."""
        return self._versions.get(node, 0)

    def versions(self) -> dict[str, int]:
        """Return the versions of all nodes, and possibly of deleted ones."""
        return dict(self._versions)

    def of(self, name: str, uid: str, gpuid: str = "") -> NodeSnapshot:
        """Return what `ClusterCache.node_snapshot` describes."""
        node = self._nodes.get(name)
        gpu_pod = self._pods.get(uid)
        priority = gpu_pod.pod.priority if gpu_pod else 0
        cards = self._cards(name, uid, gpuid)
        others = self._ledger.others(name, uid)
        return NodeSnapshot(
            node,
            cards,
            self.version(name),
            node.allocatable.minus(self._usage.on(name, uid)) if node else UNBOUNDED,
            self._nominations.available(name, cards, uid, priority),
            self.indexes_used_by_mgpu(name, uid, gpuid) if nvidia_plugin.is_on_node(node) else (),
            others,
            self._nominations.available(name, others, uid, priority),
            self._mig_cards(node, uid),
        )

    def contents(self, name: str) -> NodeContents | None:
        node = self._nodes.get(name)
        if node is None:
            return None
        others = tuple(state.card for state in self._ledger.others(name) if not is_slice(state.card.type))
        slices = self._nodes.slices
        held = self._ledger.holdings(name)
        return NodeContents(node, self._nodes.gpus(node), others, slices.of(name), slices.problem(name), held)

    def indexes_used_by_mgpu(self, node: str, uid: str = "", gpuid: str = "") -> tuple[int, ...]:
        """Return the indexes of the cards that mgpu gave to pods other than the one with this UID."""
        return self._used_by_mgpu.on(node, uid, gpuid)

    def table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> NodeTable:
        self.refresh()
        own = self._ledger.holding(pod.uid)
        occupied = mtgpu.occupy_target(pod)
        different = self._nominations.differing(pod.uid, pod.priority)
        if own is not None:
            different.add(own.node)
        if occupied is not None:
            different.add(occupied[0])
        instead = {name: self._available(name, pod.uid, pod.priority, occupied_gpuid(pod, name)) for name in different}
        return self._arrays.table(names, request, instead)

    def refresh(self, most: int = sys.maxsize) -> bool:
        """Compute the arrays of outdated nodes again, at most of `most`. Return whether no other node is outdated."""
        for _ in range(min(most, len(self._outdated))):
            name = self._outdated.pop()
            node = self._nodes.get(name)
            if node is not None:
                self._arrays.put(node, self._available(name))
            else:
                self._arrays.drop(name)
                self._versions.pop(name, None)
        return not self._outdated

    def _mig_cards(self, node: Node | None, uid: str) -> tuple[MigCardState, ...]:
        if node is None or (slices := self._nodes.slices.of(node.name)).mode != MIG_CLAIMS:
            return ()
        return mig_cards_of(slices, self._nodes.gpus(node), self._ledger.holdings(node.name), uid)

    def _record_change(self, node: str) -> None:
        if self._record_changes:
            self._changed.add(node)

    def _cards(self, node: str, uid: str, gpuid: str) -> tuple[CardState, ...]:
        return self._ledger.states_for_gpuid(node, gpuid, uid) if gpuid else self._ledger.cards(node, uid)

    def _available(
        self, node: str, uid: str = "", priority: int = LOWEST_PRIORITY, gpuid: str = ""
    ) -> tuple[CardState, ...]:
        return self._nominations.available(node, self._cards(node, uid, gpuid), uid, priority)
