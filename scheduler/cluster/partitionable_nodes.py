"""The nodes that mgpu may partition, and the partition plans that are decided but not written yet.

`ClusterCache.partitions` is the only instance. A `PartitionableNode` is expensive to compute, so each is cached until
its node or the node's free cpu and memory change. Besides these results, the module stores the usage of named
resources; all other data belongs to other parts of the cluster cache. Every call acquires the lock of the cluster
cache. The filter, `decisions.preemption` and the modules of `scheduler.partitioning` call this module.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

from mgpu.model.cards import CardState
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Pod
from mgpu.settings import Settings
from scheduler.cluster.events import CardsFreed, PlanChanged, Publisher
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.slice_state import PartitionPlan
from scheduler.engine.evictions import without_usage
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, make_partitionable_node
from scheduler.engine.partitioning.slice_scores import NamedResourceUsage, named_resources


class PartitionableNodes:
    """The nodes with the partitioning label. Thread-safe."""

    def __init__(
        self,
        lock: threading.RLock,
        nodes: Nodes,
        ledger: Ledger,
        snapshots: NodeSnapshots,
        events: Publisher,
        settings: Settings,
    ) -> None:
        self._lock = lock
        self._nodes = nodes
        self._ledger = ledger
        self._snapshots = snapshots
        self._events = events
        self._geometries = settings.dialects.slices.geometries
        self._named = NamedResourceUsage(named_resources(settings.dialects.slices))
        self._cached: dict[str, PartitionableNode] = {}

    def pod_changed(self, pod: Pod) -> None:
        """Count the named resources, such as `nvidia.com/mig-1g.10gb`, of a pod that was added or modified."""
        with self._lock:
            self._named.follow(pod)

    def pod_gone(self, uid: str) -> None:
        with self._lock:
            self._named.drop(uid)

    def node_gone(self, name: str) -> None:
        with self._lock:
            self._cached.pop(name, None)

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes with the partitioning label, sorted."""
        with self._lock:
            return self._nodes.slices.names()

    def get(
        self, name: str, uid: str = "", *, without: Collection[str] = (), beside: Sequence[Holding] = ()
    ) -> PartitionableNode | None:
        """Return how the node could be partitioned for a pod, or None if it lacks the partitioning label.

        The result is also None if there is no node of this name.

        Args:
            uid: The UID of the pod; "" for no particular pod.
            without: The UIDs of pods that are to be evicted. Their slices count as free.
            beside: What other pods hold tentatively, on any node. It counts as held.
        """
        with self._lock:
            snapshot = self._snapshots.of(name, uid).beside(name, beside)
            tentative = [held for held in beside if held.node == name]
            node = snapshot.node
            if node is None or not node.labels.get(LABEL):
                return None
            devices = (*snapshot.available_cards, *snapshot.available_other_devices)
            own = self._ledger.holding(uid)
            # A result that holds only for this pod must not be cached.
            is_for_all = (
                not without
                and not tentative
                and devices == (*snapshot.cards, *snapshot.other_devices)
                and (own is None or own.node != name)
            )
            cached = self._cached.get(name)
            if (
                is_for_all
                and cached
                and (cached.version, cached.free_resources) == (snapshot.version, snapshot.free_resources)
            ):
                return cached
            slices = self._nodes.slices.of(name)
            holdings = self._ledger.holdings(name)
            if without:
                devices = _without_holdings(devices, [held for held in holdings if held.uid in without])
                existing = tuple(replace(s, pod="") if s.pod in without else s for s in slices.existing)
                slices = replace(slices, existing=existing)
            made = make_partitionable_node(
                node,
                slices,
                self._nodes.gpus(node),
                devices,
                [held for held in (*holdings, *tentative) if held.uid != uid and held.uid not in without],
                self._geometries,
                room=snapshot.free_resources,
                named=self._named.on(name),
                version=snapshot.version,
                problem=self._nodes.slices.problem(name),
            )
            if is_for_all:
                self._cached[name] = made
            return made

    def refresh(self) -> None:
        """Compute all outdated results now, so that no call of kube-scheduler has to wait for them."""
        for name in self.nodes():
            self.get(name)

    def add_plan(self, plan: PartitionPlan, version: int) -> bool:
        """Apply the plan in place of its node's annotations. Return False if the node has changed since `version`."""
        with self._lock:
            if self._snapshots.version(plan.node) != version:
                return False
            self._nodes.slices.add_plan(plan)
            self._events.publish(PlanChanged(plan.node))
            return True

    def drop_plan(self, plan: PartitionPlan) -> None:
        """Drop a plan that was not written and will not be written."""
        with self._lock:
            self._nodes.slices.drop_plan(plan)
            self._events.publish(PlanChanged(plan.node))
            self._events.publish(CardsFreed(plan.node))

    def plans(self) -> tuple[PartitionPlan, ...]:
        """Return the plans that are not observed on their nodes yet, sorted by node."""
        with self._lock:
            return self._nodes.slices.plans()


def _without_holdings(states: Sequence[CardState], gone: Sequence[Holding]) -> tuple[CardState, ...]:
    return tuple(without_usage(state, [{state.card.index: held.uses(state.card)} for held in gone]) for state in states)
