"""Caches nodes, cards, GPU pods and their holdings, as the API server reports them and as this process decides them.

`scheduler.runtime` creates the `ClusterCache` and connects informers to its methods `…_changed` and `…_gone`;
`mgpu explain` fills one from lists. Reservations, MtgpuPods and partition plans have facades of their own
(`reservations`, `mtgpupods`, `partitions`), which share the lock and the data of the cache.

What must hold:

- The API server is the source of the data: the same valid objects in any order give the same holdings. A restart loses
  what is not in these objects: reservations, admissions of MtgpuPods, partition plans that are not written yet, which
  pods were deleted, and what the forecast has learned.
- One lock guards all data except the forecast, and no thread holds it during an API call. The data belongs to the
  parts that the constructor creates. The private parts are not thread-safe, and no caller gets a reference to them.
- Changes are published as typed events (`scheduler.cluster.events`).
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.dialects.watched_pods import content_of
from mgpu.kube.events import pod_reference
from mgpu.model import device_object
from mgpu.model.agent_pods import AgentPod
from mgpu.model.cards import Card, CardState
from mgpu.model.device_checkpoints import UNLISTED_PODS
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding
from mgpu.model.pods import Node, Pod, read_node
from mgpu.settings import Settings
from scheduler.cluster.events import (
    CardsFreed,
    HoldingsChanged,
    MtgpuPodsAffected,
    NodeMayFit,
    ObjectWarning,
    PartitionsChanged,
    PlanChanged,
    Publisher,
)
from scheduler.cluster.forecast import LEARNING_POLICIES, Forecast
from scheduler.cluster.gangs import Gangs
from scheduler.cluster.gpu_pods import GpuPod, node_left, occupied_gpuid, with_current_labels
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.mtgpupod_cache import MtgpuPodCache
from scheduler.cluster.mtgpupod_holdings import MtgpuPodHoldings, own_pod
from scheduler.cluster.mtgpupod_objects import MtgpuPodObjects, pod_text, text_of_gone_pod
from scheduler.cluster.node_agents import NodeAgents, brief_problem, detailed_problem
from scheduler.cluster.node_snapshots import NodeContents, NodeSnapshot, NodeSnapshots
from scheduler.cluster.nodes import GivenShares, Nodes
from scheduler.cluster.nominations import Nominations
from scheduler.cluster.partitionable_nodes import PartitionableNodes
from scheduler.cluster.pod_reader import PodReader, ReadPod
from scheduler.cluster.pods import Pods
from scheduler.cluster.reservation_cache import ReservationCache
from scheduler.cluster.reservations import Reservation, Reservations
from scheduler.engine import nvidia_plugin
from scheduler.engine.arrays.node_table import NodeTable

NODES_PER_LOCK = 25
"""The most nodes that are computed again while a lock is held, which takes less than 10 ms."""

Raw = Mapping[str, Any]
E = TypeVar("E")
_PAUSE_SECONDS = 0.0005


def pause() -> None:
    """Let threads that wait for a lock have it, after it was released and before it is acquired again.

    Locks of Python are not fair: without a pause, the thread that has released one acquires it again at once.
    """
    time.sleep(_PAUSE_SECONDS)


class ClusterCache:
    """Owns the scheduler's data about the cluster.

    All methods may be called from any thread, but `pod_changed` and `pod_gone` only from one thread at a time.

    Attributes:
        records: Verifies and seals allocation records.
        forecast: The forecast of the next pods, which has a lock of its own.
        reservations: The cards that decisions hold until the bindings of their pods are observed.
        mtgpupods: The MtgpuPods, for their controller.
        partitions: The nodes that mgpu may partition, and their plans.
        gangs: The gangs, which have a lock of their own.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, records: RecordVerifier = UNSEALED
    ) -> None:
        own = settings.scheduler
        self.records = records
        self.forecast = Forecast(settings)
        self.gangs = Gangs()
        self._reader = PodReader(settings, records)
        self._lock = threading.RLock()
        self._events = Publisher()
        self._events.subscribe(HoldingsChanged, self._holdings_changed)
        self._events.subscribe(PlanChanged, lambda event: self._set_cards(event.node))
        self._nodes = Nodes(settings, self._events)
        self._slices = self._nodes.slices
        self._pods = Pods()
        self._agents = NodeAgents(own.namespace, self._events, rejects=own.require_ready_agents)
        self._reservations = Reservations(own.reservation_seconds, clock)
        self._holdings = Holdings(self._nodes, self._pods, self._reservations, self._events, clock)
        self._ledger = self._holdings.ledger
        self._nominations = Nominations(self._ledger, self._nodes, self._pods, settings)
        self._snapshots = NodeSnapshots(
            self._nodes,
            self._pods,
            self._ledger,
            self._nominations,
            record_changes=settings.node_policy in LEARNING_POLICIES,
        )
        self.reservations = ReservationCache(
            self._lock,
            self._pods,
            self.gangs,
            self._reservations,
            self._holdings,
            self._nominations,
            self._snapshots,
            self._events,
        )
        self._mtgpu_holdings = MtgpuPodHoldings(self._nodes, self._holdings, self._snapshots, self._events)
        self._mtgpu_objects = MtgpuPodObjects(self._events)
        self.mtgpupods = MtgpuPodCache(self._lock, self._pods, self._mtgpu_objects, self._mtgpu_holdings)
        self.partitions = PartitionableNodes(
            self._lock, self._nodes, self._ledger, self._snapshots, self._events, settings
        )

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call the subscriber with each event of this type. Subscribe before the informers start.

        Events are published while the cache's lock is held, so the subscriber must return at once.
        """
        self._events.subscribe(kind, subscriber)

    # Called by the informers: `…_changed` for an object that was added or modified, `…_gone` for a deleted object.

    def node_changed(self, raw: Raw) -> None:
        node = read_node(raw)
        with self._lock:
            self._mtgpu_objects.node_changed(raw)
            before = self._nodes.get(node.name)
            if before == node:
                return
            given = self._nodes.given(node.name)
            was_waiting = self._slices.of(node.name).has_pending_plan
            self._nodes.node_changed(node)
            self._set_cards(node.name)
            self._given_changed(node.name, given)
            if was_waiting and not self._slices.of(node.name).has_pending_plan:
                # Pods may have been rejected because the node's agent had not yet applied its partition plan.
                self._events.publish(CardsFreed(node.name))
            self._partitioner_changed(node.name, before)
            if before is not None and before.labels != node.labels:
                self._events.publish(NodeMayFit(node.name))

    def node_gone(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        with self._lock:
            self._mtgpu_objects.node_gone(raw)
            before = self._nodes.get(name)
            given = self._nodes.given(name)
            self._nodes.node_gone(name)
            self.partitions.node_gone(name)
            self._set_cards(name)
            self._given_changed(name, given)
            self._partitioner_changed(name, before)

    def device_changed(self, raw: Raw) -> None:
        with self._lock:
            given = self._nodes.given(raw["metadata"]["name"])
            name = self._nodes.device_changed(raw)
            if name is not None:
                self._set_cards(name)
                self._given_changed(name, given)

    def device_gone(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        with self._lock:
            given = self._nodes.given(name)
            self._set_cards(self._nodes.device_gone(raw))
            self._given_changed(name, given)

    def configmap_changed(self, raw: Raw) -> None:
        """Store which cards a ConfigMap of gpushare lists as unhealthy."""
        with self._lock:
            self._set_cards(self._nodes.configmap_changed(raw))

    def configmap_gone(self, raw: Raw) -> None:
        """Remove the list of a ConfigMap that was deleted."""
        with self._lock:
            self._set_cards(self._nodes.configmap_gone(raw))

    def pod_changed(self, raw: Raw) -> None:
        """Store a Pod that was added or modified, whatever it requests."""
        meta = raw["metadata"]
        uid = meta["uid"]
        # Only the informer of pods changes a pod here, so its last state can be read without the lock. Parsing a pod
        # and verifying its seal may take milliseconds, for which no other thread should wait.
        before = self._pods.get(uid)
        content = content_of(raw)
        is_same = before is not None and before.fingerprint == content.fingerprint
        if before is not None and is_same:
            same = with_current_labels(before, raw)
            read = ReadPod(same.pod, same, None)
        else:
            read = self._reader.read(raw, content, before.verdict if before else None)
        pod, gpu_pod, request = read.pod, read.gpu_pod, read.request
        own, finding = (None, None) if is_same else own_pod(pod, raw, self.records)
        text = pod_text(raw, self.records)
        with self._lock:
            self._agents.pod_changed(raw)
            self._pods.note_uid(meta["namespace"], meta["name"], uid)
            if gpu_pod is None:
                self._forget(uid)
                self._holdings.other_pod_changed(pod, uid)
            else:
                if request is not None and before is None:
                    self.forecast.pod_added(gpu_pod.pod, request)
                self._gpu_pod_changed(gpu_pod, before)
            self.reservations.count_usage(pod)
            self.partitions.pod_changed(pod)
            if not is_same:
                self._mtgpu_holdings.pod_changed(pod, own, finding)
            self._mtgpu_objects.pod_changed(text)
            self.gangs.pod_changed(gpu_pod.pod if gpu_pod else pod, needs_cards=gpu_pod is not None)
            self._publish_node_left(before, gpu_pod)

    def pod_gone(self, raw: Raw) -> None:
        """Remove a Pod that was deleted. It goes on holding the cards that its node still reports for it."""
        meta = raw["metadata"]
        uid = meta["uid"]
        with self._lock:
            gpu_pod = self._pods.get(uid)
            self._agents.pod_gone(uid)
            self._forget(uid)
            self._reservations.mark_deleted(uid)
            # This may add a remnant, so it must come before `Holdings.pod_gone`, which checks whether the node has
            # already reported the pod as a remnant.
            self._mtgpu_holdings.pod_gone(uid)
            self._holdings.pod_gone(uid, gpu_pod)
            self._snapshots.drop_usage(uid)
            self.partitions.pod_gone(uid)
            self.gangs.pod_gone(uid)
            self._pods.forget_uid(meta["namespace"], meta["name"], uid)
            self._mtgpu_objects.pod_changed(text_of_gone_pod(raw))
            self._publish_node_left(gpu_pod, None)

    # Pods.

    def uid_of(self, namespace: str, name: str) -> str | None:
        """Return the UID of the pod with this name, or None if no such pod is cached. The pod need not request GPUs."""
        with self._lock:
            return self._pods.uid_of(namespace, name)

    def gpu_pod(self, uid: str) -> GpuPod | None:
        """Return the GPU pod with this UID, or None if no GPU pod with this UID is cached."""
        with self._lock:
            return self._pods.get(uid)

    def gpu_pods(self) -> tuple[GpuPod, ...]:
        """Return all GPU pods in no particular order."""
        with self._lock:
            return self._pods.all()

    def reservation(self, uid: str) -> Reservation | None:
        """Return the reservation of this pod, or None if it has none."""
        with self._lock:
            return self._reservations.get(uid)

    def undecided_pods(self) -> tuple[str, ...]:
        """Return the UIDs of the pods that need a late binding decision, sorted by namespace and name of the pod."""
        with self._lock:
            return self._holdings.undecided()

    def is_undecided(self, uid: str) -> bool:
        """Return whether the pod needs a late binding decision."""
        with self._lock:
            return self._holdings.is_undecided(uid)

    def remnant_problem(self, pod: Pod) -> str | None:
        """Return the reason why this pod gets no cards because of remnants of its namespace, or None.

        The result is None for an occupy pod. It occupies its card for MtgpuPods of other namespaces, whose remnants the
        controller has checked. If the remnants of its own namespace, kube-system, mattered, one of them would hold up
        the MtgpuPods of all namespaces.
        """
        if mtgpu.occupy_target(pod) is not None:
            return None
        with self._lock:
            return self._holdings.remnants.problem(pod.namespace)

    # Nodes.

    def nodes(self, names: Iterable[str]) -> list[Node | None]:
        """Return the node for each name, or None where no node has the name."""
        with self._lock:
            return list(map(self._nodes.get, names))

    def node_count(self) -> int:
        """Return the number of nodes with cards, and of nodes that had cards."""
        with self._lock:
            return len(self._ledger.nodes())

    def nodes_with_cards(self) -> tuple[str, ...]:
        """Return the names of the nodes that have cards, sorted."""
        with self._lock:
            return tuple(sorted(name for name, cards in self._ledger.nodes().items() if cards))

    def agent_problems(self, names: Sequence[str]) -> dict[str, str]:
        """Return a brief reason for each of these nodes whose mgpu agent cannot start containers now."""
        with self._lock:
            silent = self._agents.silent
            return {name: brief_problem(silent[name]) for name in names if name in silent} if silent else {}

    def agent_problem(self, node: str) -> str | None:
        """Return the reason why the node's mgpu agent cannot start containers now.

        Returns None if it can, or if the node has no mgpu agent.
        """
        with self._lock:
            pod = self._agents.silent.get(node)
            return None if pod is None else detailed_problem(pod)

    def nodes_without_agent(self) -> int:
        """Return how many nodes are rejected because their mgpu agent is not ready."""
        with self._lock:
            return sum(node in self._nodes for node in self._agents.silent)

    def agents_not_ready(self) -> dict[str, AgentPod]:
        """Return the nodes whose mgpu agent is not ready, sorted, each with the Pod of its agent."""
        with self._lock:
            return dict(sorted(self._agents.not_ready.items()))

    def unreadable_objects(self) -> dict[str, str]:
        """Return why Devices and ConfigMaps cannot be read, by kind and name (`Device n1`)."""
        with self._lock:
            return self._nodes.problems()

    def node_snapshot(self, node: str, uid: str, gpuid: str = "") -> NodeSnapshot:
        """Return a snapshot of the node for a pod.

        Args:
            uid: The UID of the pod, whose own holding is left out; "" for a snapshot with the holdings of all pods.
            gpuid: The GPUID for which the pod occupies a card of this node; "" for any other pod.
        """
        with self._lock:
            return self._snapshots.of(node, uid, gpuid)

    def node_snapshot_with_pods(self, node: str, uid: str) -> tuple[NodeSnapshot, tuple[tuple[Holding, GpuPod], ...]]:
        """Return a snapshot of the node for a pod, and the holdings of other GPU pods there, each with its pod."""
        with self._lock:
            held = (h for h in self._ledger.holdings(node) if h.uid != uid)
            pods = tuple((h, pod) for h in held if (pod := self._pods.get(h.uid)) is not None)
            return self._snapshots.of(node, uid), pods

    def node_contents(self, node: str) -> NodeContents | None:
        """Return the contents of a node for the page and the metrics, or None if there is no such node."""
        with self._lock:
            return self._snapshots.contents(node)

    def cards_and_holdings(self, node: str) -> tuple[tuple[CardState, ...], tuple[Holding, ...]] | None:
        """Return the GPUs of a node and all holdings on it, or None if there is no such node."""
        with self._lock:
            return (self._ledger.cards(node), self._ledger.holdings(node)) if node in self._nodes else None

    def cards(self, node: str) -> tuple[Card, ...]:
        """Return the devices of a node that pods can hold; () if there is no such node."""
        with self._lock:
            return self._ledger.nodes().get(node, ())

    @property
    def version(self) -> int:
        """A number that changes whenever any node, its cards or its holdings change."""
        with self._lock:
            return self._snapshots.last_version

    def node_versions(self) -> dict[str, int]:
        """Return, for each node, a number that changes with its contents. The result may include deleted nodes."""
        with self._lock:
            return self._snapshots.versions()

    def take_changed_nodes(self, most: int) -> list[tuple[str, NodeSnapshot]]:
        """Return nodes whose cards or free resources have changed since they were last returned, each with a snapshot.

        The list is empty unless the settings choose a `nodePolicy` that learns.

        Args:
            most: The number of nodes to return if more have changed. Further calls return the others.
        """
        with self._lock:
            return self._snapshots.take_changed(most)

    def holdings(self, node: str | None = None) -> tuple[Holding, ...]:
        """Return the holdings on a node, or all holdings if `node` is None."""
        with self._lock:
            return self._ledger.holdings(node)

    def group_cards(self, request: GpuRequest, uid: str) -> tuple[GroupCard, ...]:
        """Return the cards that the request's same-card group holds, without those of the pod with this UID."""
        with self._lock:
            return self._ledger.group_cards(request.constraints.same_card, uid)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        """Return the nodes where a pod of one of the request's groups holds cards, or to which one is nominated."""
        groups = request.constraints.groups
        if not groups:
            return frozenset()
        with self._lock:
            held = (held.node for group in groups for held in self._ledger.members(group))
            return frozenset(held) | self._nominations.group_nodes(groups)

    def node_table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> NodeTable:
        """Return a snapshot of these nodes as arrays, for one pod."""
        self.refresh()
        with self._lock:
            return self._snapshots.table(names, pod, request)

    def refresh(self) -> None:
        """Update the arrays that `node_table` reads, which takes up to 100 µs for each node that has changed."""
        is_complete = False
        while not is_complete:
            with self._lock:
                is_complete = self._snapshots.refresh(NODES_PER_LOCK)
            if not is_complete:
                pause()

    def chosen_by_nvidia(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> dict[str, Rejection | None]:
        """Return those of the nodes whose whole cards NVIDIA's plugin serves, each with the rejection of the pod there.

        The value is None for a node on which the pod may be placed.
        """
        candidates: list[tuple[Node, tuple[CardState, ...], tuple[int, ...]]] = []
        with self._lock:
            for name in names:
                node = self._nodes.get(name)
                if node is not None and nvidia_plugin.is_on_node(node):
                    given = self._snapshots.indexes_used_by_mgpu(name, pod.uid, occupied_gpuid(pod, name))
                    candidates.append((node, self._ledger.cards(name), given))
        return {node.name: nvidia_plugin.rejection(request, node, cards, given) for node, cards, given in candidates}

    # Called with the lock held.

    def _gpu_pod_changed(self, gpu_pod: GpuPod, before: GpuPod | None) -> None:
        pod = gpu_pod.pod
        self._pods.put(gpu_pod)
        had_cards = self._holdings.has_cards(pod.uid)
        self._holdings.settle(gpu_pod)
        if gpu_pod.request is not None and not had_cards and self._holdings.has_cards(pod.uid):
            self.forecast.pod_placed(pod, gpu_pod.request)
        self._snapshots.mark(self._nominations.pod_changed(gpu_pod))
        finding = gpu_pod.finding
        # There is one warning for each finding, and not one for each event of its pod.
        if finding is not None and not pod.ended and (before is None or before.finding != finding):
            reference = pod_reference(pod.namespace, pod.name, pod.uid)
            self._events.publish(ObjectWarning(reference, finding.reason, finding.message))

    def _forget(self, uid: str) -> None:
        self._holdings.forget(uid)
        self.forecast.pod_gone(uid)
        self._pods.drop(uid)
        self._snapshots.mark(self._nominations.drop(uid))

    def _publish_node_left(self, before: GpuPod | None, now: GpuPod | None) -> None:
        node = node_left(before, now)
        if node is not None and node in self._nodes:
            self._events.publish(NodeMayFit(node))

    def _given_changed(self, node: str, before: GivenShares) -> None:
        """Update the holdings of the pods to which the node gives other shares than before."""
        given = self._nodes.given(node)
        changed = sorted(uid for uid in {**before, **given} if before.get(uid) != given.get(uid))
        for uid in changed:
            self._holdings.given_changed(uid, node)
        if UNLISTED_PODS in changed:
            self._holdings.settle_all_on(node)  # This entry concerns all pods that the node does not list.
        if changed:
            self._events.publish(CardsFreed(node))

    def _partitioner_changed(self, name: str, before: Node | None) -> None:
        """Update the holdings if another device plugin serves the cards, or the partitioning label has changed."""
        was = nvidia_plugin.holding_rules(before)
        now = nvidia_plugin.holding_rules(self._nodes.get(name))
        if was != now:
            self._holdings.settle_all_on(name)
        if was[1] and not now[1]:
            self._events.publish(PartitionsChanged(name))  # So the partition controller forgets the node.

    def _set_cards(self, name: str | None) -> None:
        """Derive the cards of a node again. For None, do nothing."""
        if name is None:
            return
        node = self._nodes.get(name)
        cards = None if node is None else self._nodes.cards(node)
        before = self._ledger.nodes().get(name, ())
        self._ledger.set_cards(name, cards)
        if device_object.has_gained_capacity(before, cards or ()):
            self._events.publish(CardsFreed(name))
        self.forecast.set_node(name, node, self._ledger.cards(name))
        self._touch(name)
        self._holdings.publish_undecided_on(name)

    def _holdings_changed(self, event: HoldingsChanged) -> None:
        if event.group is not None:
            # The card of a same-card group determines what its nominated pods take on other nodes.
            self._snapshots.mark(self._nominations.group_nodes((event.group,)))
        self._touch(event.node)

    def _touch(self, node: str) -> None:
        self._snapshots.touch(node)
        self._nominations.touch(node)
        if self._slices.problem(node) or self._slices.of(node).mode:
            self._events.publish(PartitionsChanged(node))
        if self._mtgpu_objects.concerns(node):
            self._events.publish(MtgpuPodsAffected(node))
