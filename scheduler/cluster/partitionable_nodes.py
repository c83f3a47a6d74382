"""The nodes with the partitioning label, each as a `PartitionableNode` for the planner and the filter.

Such a value is expensive to compute, so it is cached until its node changes.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from mgpu.model.cards import CardState
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.node_slices import LABEL, NodeSlices
from mgpu.model.pods import Node, Pod
from mgpu.settings import Settings
from scheduler.cluster.node_snapshots import NodeSnapshot, NodeSnapshots
from scheduler.cluster.nodes import Nodes
from scheduler.engine.evictions import without_usage
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, make_partitionable_node
from scheduler.engine.partitioning.slice_scores import NamedResourceUsage, named_resources


class PartitionableNodes:
    """Part of the ClusterCache, which holds its lock around every call. It reads from the other parts.

    Its own data is what pods reserve of the named resources, such as `nvidia.com/mig-1g.10gb`, and the sites.
    """

    def __init__(self, nodes: Nodes, ledger: Ledger, snapshots: NodeSnapshots, settings: Settings) -> None:
        self._nodes = nodes
        self._ledger = ledger
        self._snapshots = snapshots
        self._geometries = settings.dialects.slices.geometries
        self._named = NamedResourceUsage(named_resources(settings.dialects.slices))
        self._partitionable_nodes: dict[str, PartitionableNode] = {}

    def follow(self, pod: Pod) -> None:
        """Take in the present state of a pod, GPU pod or not."""
        self._named.follow(pod)

    def drop_pod(self, uid: str) -> None:
        """Take in that a pod is gone."""
        self._named.drop(uid)

    def drop_node(self, name: str) -> None:
        """Take in that a node is gone."""
        self._partitionable_nodes.pop(name, None)

    def of(self, name: str, uid: str = "") -> PartitionableNode | None:
        """Return the node as it could be partitioned for the pod of this UID.

        None where the node has no label, or there is no such node.
        """
        snapshot = self._snapshots.of(name, uid)
        if snapshot.node is None or not snapshot.node.labels.get(LABEL):
            return None
        own = self._ledger.holding(uid)
        is_kept_from_pod = (snapshot.cards, snapshot.others) != (snapshot.unkept, snapshot.unkept_others)
        is_its_own = is_kept_from_pod or (own is not None and own.node == name)  # this pod's alone: not to be shared
        kept = self._partitionable_nodes.get(name)
        if not is_its_own and kept and (kept.version, kept.room) == (snapshot.version, snapshot.room):
            return kept
        target = self._make(name, snapshot.node, snapshot, self._nodes.slices.of(name), {uid})
        if not is_its_own:
            self._partitionable_nodes[name] = target
        return target

    def without(self, name: str, uid: str, gone: Collection[str]) -> PartitionableNode | None:
        """Return the same once the pods of the UIDs `gone` have ended and their slices are free."""
        snapshot = self._snapshots.of(name, uid)
        found = self._nodes.slices.of(name)
        if snapshot.node is None or not snapshot.node.labels.get(LABEL):
            return None
        leaving = [held for held in self._ledger.holdings(name) if held.uid in gone]
        emptied = replace(
            snapshot,
            unkept=_freed(snapshot.unkept, leaving),
            unkept_others=_freed(snapshot.unkept_others, leaving),
        )
        made = tuple(replace(s, pod="") if s.pod in gone else s for s in found.made)
        return self._make(name, snapshot.node, emptied, replace(found, made=made), {uid, *gone})

    def _make(
        self, name: str, node: Node, snapshot: NodeSnapshot, found: NodeSlices, without: Collection[str]
    ) -> PartitionableNode:
        return make_partitionable_node(
            node,
            found,
            self._nodes.gpus(node),
            (*snapshot.unkept, *snapshot.unkept_others),
            [held for held in self._ledger.holdings(name) if held.uid not in without],
            self._geometries,
            room=snapshot.room,
            named=self._named.on(name),
            version=snapshot.version,
            problem=self._nodes.slices.problem(name),
        )


def _freed(states: Sequence[CardState], gone: Sequence[Holding]) -> tuple[CardState, ...]:
    return tuple(without_usage(state, [{state.card.index: held.uses(state.card)} for held in gone]) for state in states)
