"""ClusterCache: nodes, cards, GPU pods and who holds what, as the API server says and as was decided here.

Informers feed it (`…_changed`, `…_gone`), every other part of the scheduler reads from it. All of it is a cache: the
same objects in any order give the same state. Only reservations, admissions and partition plans that are not written
yet are this process's own.

One lock guards all data, and no thread holds it across an API call. The data lives in the parts that the constructor
makes; none of them is thread-safe or handed out. What changes is published as typed events
(scheduler/cluster/events.py).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.dialects.watched_pods import bounded, fingerprint
from mgpu.kube.events import pod_reference
from mgpu.model import device_object
from mgpu.model.cards import CardState
from mgpu.model.device_checkpoints import OTHERS
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.groups import Seat
from mgpu.model.ledger import Holding
from mgpu.model.pods import Node, Pod, read_node, read_pod
from mgpu.settings import Settings
from scheduler.cluster.events import (
    CardsFreed,
    HoldingsChanged,
    MtgpuPodsAffected,
    NodeMayFit,
    ObjectWarning,
    PartitionsChanged,
    Publisher,
)
from scheduler.cluster.forecast import LEARNT, Outlook
from scheduler.cluster.gpu_pods import GpuPod, gpu_pod_of, kept, left_by, occupies, renewed
from scheduler.cluster.gpuids import Bound
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.mtgpupod_holdings import MtgpuNode, MtgpuPodHoldings, own_pod
from scheduler.cluster.mtgpupod_objects import MtgpuObjects, MtgpuPodObjects, pod_text, text_of_gone_pod
from scheduler.cluster.node_agents import Agents, brief, detailed
from scheduler.cluster.node_snapshots import NodeContents, NodeSnapshot, NodeSnapshots
from scheduler.cluster.node_usage import Usage
from scheduler.cluster.nodes import Given, Nodes
from scheduler.cluster.nominations import Nominations
from scheduler.cluster.partitionable_nodes import PartitionableNodes
from scheduler.cluster.pods import Pods
from scheduler.cluster.reservations import Reservation, Reservations
from scheduler.cluster.slice_state import Plan
from scheduler.engine import nvidia_plugin
from scheduler.engine.arrays.node_table import NodeTable
from scheduler.engine.card_constraints import same_card_group_rejection
from scheduler.engine.partitioning.partitionable_node import PartitionableNode

Raw = Mapping[str, Any]
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class MtgpuSnapshot:
    """Everything of a node that the controller of MtgpuPods decides on, at one moment.

    gpuids_elsewhere: how many GPUIDs of other nodes each namespace uses that has MtgpuPods here.
    """

    node: MtgpuNode
    objects: MtgpuObjects
    gpuids_elsewhere: Mapping[str, int]


class ClusterCache:
    """The one owner of the scheduler's data. Thread-safe."""

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, records: RecordVerifier = UNSEALED
    ) -> None:
        self.records = records
        self.outlook = Outlook(settings)  # has a lock of its own, since it works for longer than a decision may wait
        self._settings = settings
        self._lock = threading.RLock()
        self._is_closed = False
        self._events = Publisher()
        self._events.subscribe(HoldingsChanged, self._holdings_changed)
        self._nodes = Nodes(settings, self._events)
        self._slices = self._nodes.slices
        self._pods = Pods()
        self._reservations = Reservations(settings.scheduler.reservation_seconds, clock)
        self._holdings = Holdings(self._nodes, self._pods, self._reservations, self._events, clock)
        self._ledger = self._holdings.ledger
        self._nominations = Nominations(self._ledger, self._nodes, self._pods, settings)
        self._moved: set[str] = set()
        self._usage = Usage(self._move)
        self._snapshots = NodeSnapshots(self._nodes, self._pods, self._ledger, self._nominations, self._usage)
        own = settings.scheduler
        self._agents = Agents(own.namespace if own.require_ready_agents else None, self._events)
        self._partitionable = PartitionableNodes(self._nodes, self._ledger, self._snapshots, settings)
        self._mtgpu_holdings = MtgpuPodHoldings(self._nodes, self._holdings, self._snapshots, self._events)
        self._mtgpu_objects = MtgpuPodObjects()

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call the subscriber with each event of this type. Call this before the informers start.

        Events are published under the cache's lock, so the subscriber must return at once.
        """
        self._events.subscribe(kind, subscriber)

    # Fed by the informers.

    def node_changed(self, raw: Raw) -> None:
        """Take in a Node that was added or modified."""
        node = read_node(raw)
        with self._lock:
            self._affect_mtgpupods(self._mtgpu_objects.node_changed(raw))
            before = self._nodes.get(node.name)
            if before == node:
                return
            given = self._nodes.given(node.name)
            waited = self._slices.of(node.name).waiting
            self._nodes.node_changed(node)
            self._set_cards(node.name)
            self._follow_given(node.name, given)
            if waited and not self._slices.of(node.name).waiting:
                # Pods were refused by what was known while the node's agent had not caught up with its plan.
                self._events.publish(CardsFreed(node.name))
            self._follow_partitioner(node.name, before)
            if before is not None and before.labels != node.labels:
                self._events.publish(NodeMayFit(node.name))

    def node_gone(self, raw: Raw) -> None:
        """Take in that a Node was deleted."""
        name = raw["metadata"]["name"]
        with self._lock:
            self._affect_mtgpupods(self._mtgpu_objects.node_gone(raw))
            before = self._nodes.get(name)
            given = self._nodes.given(name)
            self._nodes.node_gone(name)
            self._partitionable.drop_node(name)
            self._set_cards(name)
            self._follow_given(name, given)
            self._follow_partitioner(name, before)

    def device_changed(self, raw: Raw) -> None:
        """Take in a Device that was added or modified."""
        with self._lock:
            before = self._nodes.given(raw["metadata"]["name"])
            name = self._nodes.device_changed(raw)
            if name is not None:
                self._set_cards(name)
                self._follow_given(name, before)

    def device_gone(self, raw: Raw) -> None:
        """Take in that a Device was deleted."""
        name = raw["metadata"]["name"]
        with self._lock:
            given = self._nodes.given(name)
            self._set_cards(self._nodes.device_gone(raw))
            self._follow_given(name, given)

    def configmap_changed(self, raw: Raw) -> None:
        """Take in a ConfigMap of gpushare that was added or modified."""
        with self._lock:
            self._set_cards(self._nodes.configmap_changed(raw))

    def configmap_gone(self, raw: Raw) -> None:
        """Take in that a ConfigMap was deleted."""
        with self._lock:
            self._set_cards(self._nodes.configmap_gone(raw))

    def pod_changed(self, raw: Raw) -> None:
        """Take in a Pod that was added or modified, whatever it requests."""
        meta = raw["metadata"]
        uid = meta["uid"]
        # Only the pods' informer changes a pod here, so its last state can be read without the lock. To parse a pod and
        # to verify its seal may take milliseconds, in which nobody should wait for the lock.
        before = self._pods.get(uid)
        is_same = before is not None and before.fingerprint == fingerprint(raw)
        found: GpuPod | None
        if before is not None and is_same:
            found = renewed(before, raw)
            pod = before.pod
            known: GpuPod | None = found
        else:
            pod = read_pod(bounded(raw))
            found = gpu_pod_of(pod, raw, self._settings, self.records, before.judged if before else None)
            known = None
            if found is not None:
                pod = found.pod
                known = replace(kept(found), fingerprint=fingerprint(raw))
        own, finding = (None, None) if is_same else own_pod(pod, raw, self.records)
        text = pod_text(raw, self.records)
        with self._lock:
            self._agents.pod_changed(raw)
            self._pods.note_uid(meta["namespace"], meta["name"], uid)
            if known is None:
                self._forget(uid)
                self._holdings.follow_other_pod(pod, uid)
            else:
                if found is not None and found.request is not None and before is None:
                    self.outlook.saw(known.pod, found.request)
                self._pods.put(known)
                self._settle(known)
                self._snapshots.mark(self._nominations.follow(known))
                self._warn_of_finding(known, before)
            self._count(pod)
            self._partitionable.follow(pod)
            if not is_same:
                self._mtgpu_holdings.pod_changed(pod, own, finding)
            self._affect_mtgpupods(self._mtgpu_objects.pod(text))
            self._publish_left(before, known)

    def pod_gone(self, raw: Raw) -> None:
        """Take in that a Pod was deleted."""
        meta = raw["metadata"]
        uid = meta["uid"]
        with self._lock:
            known = self._pods.get(uid)
            self._agents.pod_gone(uid)
            self._forget(uid)
            self._reservations.bury(uid)
            # Before `Holdings.gone`, which finds out whether the node has already reported the pod as a remnant.
            self._mtgpu_holdings.pod_gone(uid)
            self._holdings.gone(uid, known)
            self._usage.drop(uid)
            self._partitionable.drop_pod(uid)
            self._pods.forget_uid(meta["namespace"], meta["name"], uid)
            self._affect_mtgpupods(self._mtgpu_objects.pod(text_of_gone_pod(raw)))
            self._publish_left(known, None)

    def mtgpupod_changed(self, raw: Raw) -> None:
        """Take in an MtgpuPod that was added or modified."""
        with self._lock:
            self._mtgpu_holdings.mtgpupod_changed(raw)
            self._affect_mtgpupods(self._mtgpu_objects.mtgpupod_changed(raw))

    def mtgpupod_gone(self, raw: Raw) -> None:
        """Take in that an MtgpuPod was deleted."""
        with self._lock:
            self._mtgpu_holdings.mtgpupod_gone(raw)
            self._affect_mtgpupods(self._mtgpu_objects.mtgpupod_gone(raw))

    # Pods.

    def uid_of(self, namespace: str, name: str) -> str | None:
        """Return the UID of the pod of this name, GPU pod or not, or None where no such pod is known (yet)."""
        with self._lock:
            return self._pods.uid_of(namespace, name)

    def gpu_pod(self, uid: str) -> GpuPod | None:
        """Return the GPU pod, or None where there is none of this UID."""
        with self._lock:
            return self._pods.get(uid)

    def gpu_pods(self) -> tuple[GpuPod, ...]:
        """Return all GPU pods, in no order that means anything."""
        with self._lock:
            return self._pods.all()

    def undecided(self) -> tuple[str, ...]:
        """Return the UIDs of the pods that are bound without cards and have not started, by the names of the pods."""
        with self._lock:
            return self._holdings.undecided()

    def is_undecided(self, uid: str) -> bool:
        """Return whether the pod is bound without cards and has not started."""
        with self._lock:
            return self._holdings.is_undecided(uid)

    def remnant_problem(self, pod: Pod) -> str | None:
        """Return the reason why this pod gets no cards while deleted pods of its namespace still run, or None.

        An occupy pod does: it takes a card for MtgpuPods of other namespaces, which their controller has checked.
        Otherwise one pod of kube-system that still runs would hold up the MtgpuPods of all namespaces.
        """
        if mtgpu.occupied(pod) is not None:
            return None
        with self._lock:
            return self._holdings.remnants.problem(pod.namespace)

    # Nodes.

    def nodes(self, names: Iterable[str]) -> list[Node | None]:
        """Return the nodes of these names, None for each that is not known."""
        with self._lock:
            return list(map(self._nodes.get, names))

    def nodes_with_cards(self) -> tuple[str, ...]:
        """Return the names of the nodes that have cards, sorted."""
        with self._lock:
            return tuple(sorted(name for name, cards in self._ledger.nodes().items() if cards))

    def without_agent(self, names: Sequence[str]) -> dict[str, str]:
        """Return those of the nodes whose mgpu agent cannot start containers now, each with the reason."""
        with self._lock:
            silent = self._agents.silent
            return {name: brief(silent[name]) for name in names if name in silent} if silent else {}

    def agent_problem(self, node: str) -> str | None:
        """Return the reason why the node's mgpu agent cannot start containers now.

        None where it can, or where the node has no agent that is known.
        """
        with self._lock:
            pod = self._agents.silent.get(node)
            return None if pod is None else detailed(pod)

    def nodes_without_agent(self) -> int:
        """Return how many nodes are refused because their mgpu agent is not ready."""
        with self._lock:
            return sum(node in self._nodes for node in self._agents.silent)

    def view(self, node: str, without: str, gpuid: str = "") -> NodeSnapshot:
        """Return the node as the pod of UID `without` finds it; gpuid: for which the pod occupies a card there."""
        with self._lock:
            return self._snapshots.of(node, without, gpuid)

    def occupied(self, node: str, without: str) -> tuple[NodeSnapshot, tuple[tuple[Holding, GpuPod], ...]]:
        """Return the same with the holdings of other GPU pods on the node, each with its pod."""
        with self._lock:
            held = (h for h in self._ledger.holdings(node) if h.uid != without)
            pods = tuple((h, pod) for h in held if (pod := self._pods.get(h.uid)) is not None)
            return self._snapshots.of(node, without), pods

    def contents(self, node: str) -> NodeContents | None:
        """Return what a node contains for the page and the metrics, or None where there is no such node."""
        with self._lock:
            return self._snapshots.contents(node)

    def cards_and_holdings(self, node: str) -> tuple[tuple[CardState, ...], tuple[Holding, ...]] | None:
        """Return the GPUs of a node and all holdings on it, or None where there is no such node."""
        with self._lock:
            return (self._ledger.cards(node), self._ledger.holdings(node)) if node in self._nodes else None

    def versions(self) -> dict[str, int]:
        """Return by node a number that changes whenever its contents do; some of the nodes may be gone."""
        with self._lock:
            return self._snapshots.versions()

    def take_moved(self) -> list[tuple[str, NodeSnapshot]]:
        """Return the nodes whose cards or free room have changed since the last call.

        They are recorded only for a `nodePolicy` that learns; for others the list is empty.
        """
        with self._lock:
            moved = [(name, self._snapshots.of(name, "")) for name in self._moved]
            self._moved.clear()
            return moved

    def holdings(self, node: str | None = None) -> tuple[Holding, ...]:
        """Return the holdings on a node, or all."""
        with self._lock:
            return self._ledger.holdings(node)

    def seats(self, request: GpuRequest, without: str) -> tuple[Seat, ...]:
        """Return where the pods of the request's same-card group are, but for the pod of UID `without`."""
        with self._lock:
            return self._ledger.seats(request.constraints.same_card, without)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        """Return the nodes where a pod of one of the request's groups is, or is nominated."""
        groups = request.constraints.groups
        if not groups:
            return frozenset()
        with self._lock:
            held = (held.node for group in groups for held in self._ledger.members(group))
            return frozenset(held) | self._nominations.group_nodes(groups)

    def table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> NodeTable:
        """Return a snapshot of the nodes of these names as this pod finds them."""
        with self._lock:
            return self._snapshots.table(names, pod, request)

    def refresh(self) -> None:
        """Bring the arrays up to date: each node that has changed since the last call costs some 20 µs."""
        with self._lock:
            self._snapshots.refresh()

    def chosen_by_nvidia(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> dict[str, Rejection | None]:
        """Return those of the nodes where NVIDIA's plugin chooses the cards of this pod.

        Each with the rejection if the pod must not go there, None if it may.
        """
        found: list[tuple[Node, tuple[CardState, ...], tuple[int, ...]]] = []
        with self._lock:
            for name in names:
                node = self._nodes.get(name)
                if node is not None and nvidia_plugin.is_on_node(node):
                    ours = self._snapshots.indexes_used_by_mgpu(name, pod.uid, occupies(pod, name))
                    found.append((node, self._ledger.cards(name), ours))
        return {node.name: nvidia_plugin.refusal(request, node, cards, ours) for node, cards, ours in found}

    # Reservations.

    def reservation(self, uid: str) -> Reservation | None:
        """Return the reservation that is in force for this pod, or None."""
        with self._lock:
            return self._reservations.get(uid)

    def reserve(self, reservation: Reservation, version: int) -> bool:
        """Hold the cards for the pod, in place of what was reserved for it; return whether they are held.

        If not, the caller decides again: the node has changed since `version`, the pod's same-card group has gone to
        another card, or the pod is bound by now.
        """
        with self._lock:
            if self._is_closed or self._snapshots.version(reservation.node) != version:
                return False
            if self.binding_problem(reservation.uid, reservation.node) is not None:
                return False
            cards = self._ledger.cards(reservation.node, reservation.uid)
            if same_card_group_rejection(reservation.request, cards, self.seats(reservation.request, reservation.uid)):
                return False
            self._holdings.reserve(reservation)
            self._snapshots.mark(self._nominations.reserved(reservation.uid))
            self._usage.put(reservation.uid, reservation.node, reservation.needs)
            return True

    def binding_problem(self, uid: str, node: str) -> str | None:
        """Return the reason why this pod cannot be bound to this node regardless of free capacity, or None."""
        with self._lock:
            known = self._pods.get(uid)
            if known is None:
                return "the pod has been deleted" if self._reservations.is_gone(uid) else None
            pod = known.pod
            is_late = pod.node == node and self._holdings.is_undecided(uid)
            if is_late or not (pod.node or pod.ended):
                return None
            return f"the pod is bound to {pod.node} already" if pod.node else f"the pod has {pod.phase.lower()}"

    def renew(self, reservation: Reservation) -> bool:
        """Give the reservation its time again; return False where it is no longer in force."""
        with self._lock:
            if self._is_closed or self._reservations.get(reservation.uid) is not reservation:
                return False
            self._reservations.put(reservation)
            return True

    def keep(self, reservation: Reservation) -> None:
        """Keep the reservation, if it is in force, for its full time: its pod is bound, or may well be."""
        with self._lock:
            if not self._is_closed and self._reservations.get(reservation.uid) is reservation:
                self._reservations.keep(reservation)

    def pause(self, uid: str) -> float:
        """Return the seconds until cards may be reserved again for a pod whose bindings failed for long; 0 for now."""
        with self._lock:
            return self._reservations.pause(uid)

    def cancel(self, reservation: Reservation) -> None:
        """Release the reservation, if it is in force."""
        uid = reservation.uid
        with self._lock:
            if self._reservations.get(uid) is reservation:
                self._holdings.release(uid)
                self._snapshots.mark(self._nominations.reserved(uid))
                self._events.publish(CardsFreed(reservation.node))
                self._usage.drop(uid)
                known = self._pods.get(uid)
                if known is not None:
                    self._holdings.settle(known)
                    self._count(known.pod)

    def close(self) -> None:
        """Reserve and renew nothing more. A thread that found that this replica may decide is too late from now on."""
        with self._lock:
            self._is_closed = True

    def has_unobserved_reservations(self, seconds: float) -> bool:
        """Return whether a pod has not been observed on its node that got a reservation in the last so many seconds."""
        with self._lock:
            return self._reservations.made_within(seconds)

    def overdue(self) -> tuple[Reservation, ...]:
        """Return the reservations whose pod has not been observed on its node in time, oldest first."""
        with self._lock:
            return self._reservations.overdue()

    # Partitioned nodes and their plans.

    def partitionable_nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes with the partitioning label, sorted."""
        with self._lock:
            return self._slices.names()

    def partitionable_node(self, node: str, uid: str = "") -> PartitionableNode | None:
        """Return the node as it could be partitioned for the pod of this UID.

        None where the node has no label, or there is no such node.
        """
        with self._lock:
            return self._partitionable.of(node, uid)

    def partitionable_node_without(self, node: str, uid: str, gone: Collection[str]) -> PartitionableNode | None:
        """Return the same once the pods of the UIDs `gone` have ended and their slices are free."""
        with self._lock:
            return self._partitionable.without(node, uid, gone)

    def refresh_partitionable_nodes(self) -> None:
        """Make all sites now, node by node, rather than in the time of a call of kube-scheduler."""
        for name in self.partitionable_nodes():
            self.partitionable_node(name)

    def plan(self, plan: Plan, version: int) -> bool:
        """Let the plan stand in place of what its node says; return False where the node changed since `version`."""
        with self._lock:
            if self._snapshots.version(plan.node) != version:
                return False
            self._slices.plan(plan)
            self._set_cards(plan.node)
            return True

    def drop_plan(self, plan: Plan) -> None:
        """Drop a plan that was not written and will not be."""
        with self._lock:
            self._slices.drop(plan)
            self._set_cards(plan.node)
            self._events.publish(CardsFreed(plan.node))

    def plans(self) -> tuple[Plan, ...]:
        """Return the plans that their nodes do not show yet, by the names of the nodes."""
        with self._lock:
            return self._slices.plans()

    # MtgpuPods.

    def mtgpupods(self) -> Iterator[Raw]:
        """Return all MtgpuPods in no particular order, within the bounds of `stored_objects.of_mtgpupod`."""
        with self._lock:
            return self._mtgpu_objects.items()

    def mtgpupod_nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have MtgpuPods or occupy pods, sorted."""
        with self._lock:
            return self._mtgpu_objects.nodes()

    def mtgpu_node(self, node: str) -> MtgpuNode:
        """Return the cards of a node and what is held on them, as the controller of MtgpuPods needs them."""
        with self._lock:
            return self._mtgpu_holdings.on(node)

    def mtgpu_snapshot(self, node: str) -> MtgpuSnapshot:
        """Return all that the controller of MtgpuPods decides on. It is of one moment.

        Otherwise a Pod that the informer brings between two reads would look like one that somebody else made.
        """
        with self._lock:
            objects = self._mtgpu_objects.on(node, self._pods.uid_of)
            gpuids = self._mtgpu_holdings.gpuids_elsewhere({namespace for namespace, _ in objects.items}, node)
            return MtgpuSnapshot(self._mtgpu_holdings.on(node), objects, gpuids)

    def held_up(self, namespaces: Iterable[str], node: str) -> Mapping[str, float]:
        """Return those of the namespaces whose pods were deleted by force and still run.

        Each with the seconds after which that no longer matters. If it is over before, MtgpuPodsAffected is published
        for the node.
        """
        with self._lock:
            return self._mtgpu_holdings.held_up(namespaces, node)

    def admit(
        self,
        node: str,
        holdings: Iterable[Holding],
        version: int,
        bound: Bound | None = None,
        limited: Iterable[str] = (),
    ) -> bool:
        """Admit exactly these MtgpuPods to cards of this node (`MtgpuPodHoldings.admit`); return whether it worked."""
        with self._lock:
            return self._mtgpu_holdings.admit(node, holdings, version, bound, limited)

    def drop_admissions(self) -> None:
        """Withdraw all admissions. They were decided in an earlier term, and another leader may have decided since."""
        with self._lock:
            self._mtgpu_holdings.drop_admissions()

    # The lock is held.

    def _affect_mtgpupods(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._events.publish(MtgpuPodsAffected(node))

    def _publish_left(self, before: GpuPod | None, now: GpuPod | None) -> None:
        """Publish that the pod has left the node where it was, if it has."""
        for node in left_by(before, now):
            if node in self._nodes:
                self._events.publish(NodeMayFit(node))

    def _warn_of_finding(self, known: GpuPod, before: GpuPod | None) -> None:
        """Warn once for each finding, not with every event of its pod."""
        finding = known.finding
        pod = known.pod
        if finding is not None and not pod.ended and (before is None or before.finding != finding):
            reference = pod_reference(pod.namespace, pod.name, pod.uid)
            self._events.publish(ObjectWarning(reference, finding.reason, finding.message))

    def _count(self, pod: Pod) -> None:
        reservation = self._reservations.get(pod.uid)
        self._usage.follow(pod, reservation.node if reservation is not None else "")

    def _follow_given(self, node: str, before: Given) -> None:
        """Follow what the node says that it gave out itself, if that has changed."""
        given = self._nodes.given(node)
        changed = sorted(uid for uid in {**before, **given} if before.get(uid) != given.get(uid))
        for uid in changed:
            self._holdings.follow_given(uid, node)
        if OTHERS in changed:
            self._holdings.settle_all_on(node)  # it concerns the pods that are not listed
        if changed:
            self._events.publish(CardsFreed(node))

    def _follow_partitioner(self, name: str, before: Node | None) -> None:
        """Follow which plugin serves the node's cards, and whether mgpu partitions them."""
        was = nvidia_plugin.holding_rules(before)
        now = nvidia_plugin.holding_rules(self._nodes.get(name))
        if was != now:
            self._holdings.settle_all_on(name)
        if was[1] and not now[1]:
            self._events.publish(PartitionsChanged(name))  # so that the planner forgets the node

    def _settle(self, known: GpuPod) -> None:
        had_cards = self._holdings.has_cards(known.pod.uid)
        self._holdings.settle(known)
        if known.request is not None and not had_cards and self._holdings.has_cards(known.pod.uid):
            self.outlook.placed(known.pod, known.request)

    def _forget(self, uid: str) -> None:
        self._holdings.forget(uid)
        self.outlook.gone(uid)
        self._pods.drop(uid)
        self._snapshots.mark(self._nominations.drop(uid))

    def _set_cards(self, name: str | None) -> None:
        if name is None:
            return
        node = self._nodes.get(name)
        cards = None if node is None else self._nodes.cards(node)
        before = self._ledger.nodes().get(name, ())
        self._ledger.set_cards(name, cards)
        if device_object.gained(before, cards or ()):
            self._events.publish(CardsFreed(name))
        self.outlook.set_node(name, node, self._ledger.cards(name))
        self._touch(name)
        self._holdings.publish_undecided_on(name)

    def _holdings_changed(self, event: HoldingsChanged) -> None:
        if event.group is not None:
            # What is kept for nominated pods of a same-card group elsewhere depends on where the group is.
            self._snapshots.mark(self._nominations.group_nodes((event.group,)))
        self._touch(event.node)

    def _touch(self, node: str) -> None:
        self._snapshots.touch(node)
        self._nominations.touch(node)
        self._move(node)
        if self._slices.problem(node) or self._slices.of(node).mode:
            self._events.publish(PartitionsChanged(node))
        if self._mtgpu_objects.concerns(node):
            self._events.publish(MtgpuPodsAffected(node))

    def _move(self, node: str) -> None:
        if self._settings.node_policy in LEARNT:
            self._moved.add(node)
