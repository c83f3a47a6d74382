"""The nodes with the partitioning label, each as a `Site` for the planner and the filter.

A site is expensive to make, so it is kept while its node does not change.
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
from scheduler.engine.evictions import freed
from scheduler.engine.partitioning.partitionable_node import Site, site_of
from scheduler.engine.partitioning.slice_scores import NamedUsage, named_resources


class PartitionableNodes:
    """Part of the ClusterCache, which holds its lock around every call. It reads from the other parts.

    Its own data is what pods reserve of the named resources, such as `nvidia.com/mig-1g.10gb`, and the sites.
    """

    def __init__(self, nodes: Nodes, ledger: Ledger, snapshots: NodeSnapshots, settings: Settings) -> None:
        self._nodes = nodes
        self._ledger = ledger
        self._snapshots = snapshots
        self._geometries = settings.dialects.slices.geometries
        self._named = NamedUsage(named_resources(settings.dialects.slices))
        self._sites: dict[str, Site] = {}

    def follow(self, pod: Pod) -> None:
        """Take in the present state of a pod, GPU pod or not."""
        self._named.follow(pod)

    def drop_pod(self, uid: str) -> None:
        """Take in that a pod is gone."""
        self._named.drop(uid)

    def drop_node(self, name: str) -> None:
        """Take in that a node is gone."""
        self._sites.pop(name, None)

    def of(self, name: str, uid: str = "") -> Site | None:
        """Return the node as it could be partitioned for the pod of this UID.

        None where the node has no label, or there is no such node.
        """
        snapshot = self._snapshots.of(name, uid)
        if snapshot.node is None or not snapshot.node.labels.get(LABEL):
            return None
        own = self._ledger.holding(uid)
        is_kept_from_pod = (snapshot.cards, snapshot.others) != (snapshot.unkept, snapshot.unkept_others)
        is_its_own = is_kept_from_pod or (own is not None and own.node == name)  # this pod's alone: not to be shared
        kept = self._sites.get(name)
        if not is_its_own and kept and (kept.version, kept.room) == (snapshot.version, snapshot.room):
            return kept
        site = self._site(name, snapshot.node, snapshot, self._nodes.slices.of(name), {uid})
        if not is_its_own:
            self._sites[name] = site
        return site

    def without(self, name: str, uid: str, gone: Collection[str]) -> Site | None:
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
        return self._site(name, snapshot.node, emptied, replace(found, made=made), {uid, *gone})

    def _site(self, name: str, node: Node, snapshot: NodeSnapshot, found: NodeSlices, without: Collection[str]) -> Site:
        return site_of(
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
    return tuple(freed(state, [{state.card.index: held.uses(state.card)} for held in gone]) for state in states)
