"""Caches nodes, cards, GPU pods and their holdings, as the API server reports them and as this process decides them.

`scheduler.watches` connects informers to the methods `…_changed` and `…_gone` of the `ClusterCache`; `mgpu explain`
fills one from lists. This module changes the data, and `scheduler.cluster.cluster_queries` reads it for others.
Reservations, MtgpuPods, ResourceClaims and partition plans have facades of their own (`reservations`, `mtgpupods`,
`claims`, `partitions`), which share the lock and the data of the cache.

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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.dialects.watched_pods import content_of
from mgpu.kube.events import pod_reference
from mgpu.model import device_object
from mgpu.model.device_checkpoints import UNLISTED_PODS
from mgpu.model.pods import Node, read_node
from mgpu.settings import Settings
from scheduler.cluster.claim_cache import ClaimCache
from scheduler.cluster.claim_holdings import ClaimHoldings
from scheduler.cluster.claim_pods import ClaimPods
from scheduler.cluster.cluster_queries import ClusterQueries
from scheduler.cluster.events import (
    CardsFreed,
    HoldingsChanged,
    MtgpuPodsAffected,
    NodeMayFit,
    ObjectWarning,
    PartitionsChanged,
    PlanChanged,
    PodResizing,
    Publisher,
)
from scheduler.cluster.forecast import LEARNING_POLICIES, Forecast
from scheduler.cluster.gangs import Gangs
from scheduler.cluster.gpu_pods import GpuPod, node_left, with_current_labels
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.mtgpupod_cache import MtgpuPodCache
from scheduler.cluster.mtgpupod_holdings import MtgpuPodHoldings, own_pod
from scheduler.cluster.mtgpupod_objects import MtgpuPodObjects, pod_text, text_of_gone_pod
from scheduler.cluster.node_agents import NodeAgents
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.nodes import GivenShares, Nodes
from scheduler.cluster.nominations import Nominations
from scheduler.cluster.partitionable_nodes import PartitionableNodes
from scheduler.cluster.pod_reader import PodReader, ReadPod
from scheduler.cluster.pods import Pods
from scheduler.cluster.reservation_cache import ReservationCache
from scheduler.cluster.reservations import Reservations
from scheduler.cluster.resize_cache import ResizeCache
from scheduler.cluster.resize_promises import is_resizing
from scheduler.engine import nvidia_plugin

Raw = Mapping[str, Any]
E = TypeVar("E")


class ClusterCache(ClusterQueries):
    """Owns the scheduler's data about the cluster.

    All methods may be called from any thread, but `pod_changed` and `pod_gone` only from one thread at a time.

    Attributes:
        records: Verifies and seals allocation records.
        forecast: The forecast of the next pods, which has a lock of its own.
        reservations: The cards that decisions hold until the bindings of their pods are observed.
        resizes: The memory that live resizes hold until their records are observed.
        mtgpupods: The MtgpuPods, for their controller.
        claims: The ResourceClaims, for their admission and their controllers.
        partitions: The nodes that mgpu may partition, and their plans.
        gangs: The gangs, which have a lock of their own.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, records: RecordVerifier = UNSEALED
    ) -> None:
        own = settings.scheduler
        events = Publisher()
        nodes = Nodes(settings, events)
        pods = Pods()
        reservations = Reservations(own.reservation_seconds, clock)
        holdings = Holdings(nodes, pods, reservations, events, clock)
        nominations = Nominations(holdings.ledger, nodes, pods, settings)
        snapshots = NodeSnapshots(
            nodes, pods, holdings.ledger, nominations, record_changes=settings.node_policy in LEARNING_POLICIES
        )
        events.subscribe(HoldingsChanged, self._holdings_changed)
        events.subscribe(PlanChanged, lambda event: self._set_cards(event.node))
        agents = NodeAgents(own.namespace, events, rejects=own.require_ready_agents)
        super().__init__(threading.RLock(), nodes, pods, agents, reservations, holdings, nominations, snapshots)
        self.records = records
        self.forecast = Forecast(settings)
        self.gangs = Gangs()
        self._events = events
        self._reader = PodReader(settings, records)
        self._slices = nodes.slices
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
        self.resizes = ResizeCache(self._lock, self._pods, self._holdings, self._snapshots)
        self._mtgpu_holdings = MtgpuPodHoldings(self._nodes, self._holdings, self._snapshots, self._events)
        self._mtgpu_objects = MtgpuPodObjects(self._events)
        self.mtgpupods = MtgpuPodCache(self._lock, self._pods, self._mtgpu_objects, self._mtgpu_holdings)
        self._claim_pods = ClaimPods()
        claim_holdings = ClaimHoldings(self._holdings, self._reservations, self._events)
        self.claims = ClaimCache(
            self._lock,
            claim_holdings,
            self._claim_pods,
            self._reservations,
            self._snapshots,
            self.forecast,
            self.reservations,
        )
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
            self._claim_pods.pod_changed(raw, pod)
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
            self._claim_pods.pod_gone(uid)
            self.gangs.pod_gone(uid)
            self._pods.forget_uid(meta["namespace"], meta["name"], uid)
            self._mtgpu_objects.pod_changed(text_of_gone_pod(raw))
            self._publish_node_left(gpu_pod, None)

    # Called with the lock held.

    def _gpu_pod_changed(self, gpu_pod: GpuPod, before: GpuPod | None) -> None:
        pod = gpu_pod.pod
        self._pods.put(gpu_pod)
        had_cards = self._holdings.has_cards(pod.uid)
        self._holdings.settle(gpu_pod)
        if gpu_pod.request is not None and not had_cards and self._holdings.has_cards(pod.uid):
            self.forecast.pod_placed(pod, gpu_pod.request)
        self._snapshots.mark(self._nominations.pod_changed(gpu_pod))
        if is_resizing(gpu_pod):
            self._events.publish(PodResizing(pod.uid))
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
