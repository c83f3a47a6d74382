"""The partition controller: has cards partitioned for pods that wait for slices, on a thread of its own.

It is level-triggered: what is to be done follows from the present state, so a crash between any two steps costs only
time. A plan is put into `ClusterCache` when it is made, so that every decision respects it, and is written to the Node
after that. While a plan of a node is under way, the node gets no other one (docs/design/slices.md, "Barrier"), and
neither does a pod that the plan serves. `scheduler/runtime.py` creates the controller, and runs it while this replica
leads.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.events import node_reference
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.node_slices import next_plan
from mgpu.model.slice_names import MPS, Slice
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Warn
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.slice_state import Plan
from scheduler.decisions.effort_budgets import EffortBudgets, EffortExceeded
from scheduler.engine.effort import Exhausted
from scheduler.engine.partitioning.partitionable_node import (
    PartitionableNode,
    can_be_partitioned_for,
    find_served_pods,
    plan_node,
    requested_slices,
    with_claimed_slices,
)
from scheduler.engine.partitioning.slice_choice import rank_partitionable_nodes
from scheduler.partitioning.node_history import IdleCards, RefusedPlans
from scheduler.partitioning.plan_writer import PlanWriter, SharingConfigs
from scheduler.partitioning.waiting_pods import PlanningOrder, Promise, WaitingPod, WaitingPods

log = logging.getLogger(__name__)

PROMISE_SECONDS = 60.0
"""How long a pod waits for its plan before another node is planned for it."""
READY_SECONDS = 15.0
"""How long slices that a plan made are kept from other plans, for the pod that they were made for.

kube-scheduler retries a pod within ten seconds after its node has changed.
"""
MISSING_SECONDS = 10.0
"""How long slices that pods hold may be missing before a plan makes them again: the node's agent does so by itself."""
_UNOBSERVED_SECONDS = 60.0
"""How long the watch may not deliver a plan that was written before it is looked for on the Node."""
_ROUND_SECONDS = 1.0
_LOST_SECONDS = 5.0
"""Pause after a plan that did not suit its node any more, unless the node changes before."""
_SPACING_SECONDS = 0.02
_PODS_PER_PLAN = 64


class PartitionController:
    """Plans partitions for pods, and restores and removes slices.

    `request_plan`, `can_serve`, `changed`, `begin` and `wake` may be called by any thread and return at once; the other
    methods belong to the thread of `run`.

    Args:
        may_decide: raises RetryLater while this process must not write.
        clock: seconds, never set back.
        now: seconds since 1970, of which numbers of plans are made.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        writer: PlanWriter,
        settings: Settings,
        warn: Warn,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        budgets: EffortBudgets | None = None,
    ) -> None:
        self._cluster = cluster
        self._writer = writer
        self._settings = settings.dialects.slices
        self._warn = warn
        self._may_decide = may_decide
        self._clock = clock
        self._now = now
        self._budgets = budgets or EffortBudgets()
        self.configs = SharingConfigs(self._configs_changed)
        self._waiting = WaitingPods(cluster, clock)
        self._order = PlanningOrder(clock)
        self._refused = RefusedPlans(clock)
        self._idle = IdleCards(clock, self._settings.mps_idle_seconds)
        self._event = threading.Condition()
        self._due = False
        self._changed: set[str] = set()
        # By node:
        self._missing_since: dict[str, float] = {}
        self._reported: dict[str, str] = {}  # the last Event
        self._written: dict[str, tuple[int, float]] = {}  # number of the last plan, and when it was written
        self._lost: dict[str, tuple[int, float]] = {}  # version of the node, and until when it gets no plan
        self._configs_due: set[str] = set()

    # Called by other threads.

    def request_plan(self, known: GpuPod, nodes: Sequence[str], passed: Sequence[str] = ()) -> None:
        """Request slices for a pod, as a filter found out.

        Args:
            nodes: where the pod would fit if they were partitioned again.
            passed: where it fits now. Its binding is expected there, and for some seconds no plan takes away what it
                may get.
        """
        self._waiting.put(known, nodes, passed)
        if nodes and not passed:
            self.wake()

    def can_serve(self, known: GpuPod) -> bool:
        """Return whether a bound pod can get its slices by a plan for its node, and request that plan."""
        target = self._cluster.partitionable_node(known.pod.node, known.pod.uid)
        request = known.request
        wanted = requested_slices(request) if request else {}
        if target is None or request is None or not wanted or target.problem or request.unmet(target.node):
            return False
        if target.found.placed and not target.found.waiting:
            # A namespace that has used up its effort gets the benefit of the doubt; so does a search without a proof.
            with suppress(EffortExceeded, Exhausted), self._budgets.call(known.pod.namespace, request) as call:
                if not can_be_partitioned_for(target, wanted, call.next_budget()):
                    return False
        self.request_plan(known, [known.pod.node])
        return True

    def changed(self, node: str) -> None:
        """Look at a node whose slices, or their holdings, have changed."""
        with self._event:
            self._changed.add(node)
        self.wake()

    def begin(self) -> None:
        """Begin a term: plans of an earlier one that were not written are dropped."""
        for plan in self._cluster.plans():
            self._cluster.drop_plan(plan)
        for node in self._cluster.partitionable_nodes():
            self.changed(node)

    def wake(self) -> None:
        with self._event:
            self._due = True
            self._event.notify_all()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, which must be followed by `wake`."""
        while not stop.is_set():
            # Before our lock: this takes the lock of the ClusterCache, whose holder may call `changed`.
            pause = self._pause()
            with self._event:
                self._event.wait_for(lambda: self._due or stop.is_set(), pause)
                self._due = False
            try:
                self.work()
            except Exception:
                # The outermost loop of the thread: an error on one node must not keep all pods waiting.
                log.exception("partitions not planned")
            stop.wait(_SPACING_SECONDS)

    def _configs_changed(self, nodes: Collection[str]) -> None:
        for node in self._cluster.partitionable_nodes():
            if node in nodes:
                self.changed(node)

    def _pause(self) -> float | None:
        busy = self._missing_since or self._configs_due or self._idle or self._cluster.plans() or self._waiting
        return _ROUND_SECONDS if busy else None

    # One round.

    def work(self) -> None:
        """Do all that is due now."""
        try:
            self._may_decide()
            with self._event:
                changed, self._changed = self._changed, set()
            self._observe(changed)
            pods, left = self._waiting.update()
            self._follow_promises(pods, left)
            self._restore(pods)
            self._serve(pods)
            self._remove_idle(pods)
            self._write_plans()
            self._write_configs()
        except RetryLater:
            return  # the next leader begins with all nodes, and filters report all pods to it

    def _observe(self, changed: Iterable[str]) -> None:
        for name in sorted(changed):
            target = self._cluster.partitionable_node(name)
            if target is None:
                self._forget(name)
                continue
            self._refused.observe(target)
            self._idle.observe(target)
            if target.missing:
                self._missing_since.setdefault(name, self._clock())
            else:
                self._missing_since.pop(name, None)
                self._reported.pop(name, None)
            if target.found.mode == MPS and target.found.partitioning.plan is not None:
                self._configs_due.add(name)

    def _forget(self, node: str) -> None:
        """Forget a node that is gone or has lost its label: an autoscaler never uses its name again."""
        for by_node in (self._missing_since, self._reported, self._written, self._lost):
            by_node.pop(node, None)
        self._configs_due.discard(node)
        self._refused.forget(node)
        self._order.forget(node)
        self._idle.forget(node)

    # Promises: which plan serves which pod.

    def _follow_promises(self, pods: Sequence[WaitingPod], left: Iterable[WaitingPod]) -> None:
        """Find out what has become of the plans that were made for pods.

        Args:
            left: pods that were deleted before they had their slices.
        """
        for pod in left:
            if pod.promise:
                self._order.missed(pod, pod.promise.node, pod.promise.plan)
        for pod in pods:
            if pod.promise:
                target = self._cluster.partitionable_node(pod.promise.node, pod.known.pod.uid)
                pod.promise = self._followed(pod, pod.promise, target) if target else None

    def _followed(self, pod: WaitingPod, promise: Promise, target: PartitionableNode) -> Promise | None:
        """Return the promise as it stands now, or None if it is over."""
        found, now = target.found.partitioning, self._clock()
        if not promise.ready:
            if found.plan == promise.plan == found.applied:
                return promise._replace(ready=True, until=now + READY_SECONDS)
            under_way = target.found.waiting and found.plan == promise.plan
            return promise if under_way and self._in_time(pod, promise) else None
        if not target.fits(pod.wanted):
            return None  # other pods took the slices, so this one did not miss them
        if now < promise.until:
            return promise
        self._order.missed(pod, promise.node, promise.plan)
        extra = {"node": promise.node, "plan": promise.plan, "pod": pod.known.pod.uid}
        log.info("slices were made and not used", extra=extra)
        self._waiting.forget(pod, promise.until - READY_SECONDS)
        return None

    def _in_time(self, pod: WaitingPod, promise: Promise) -> bool:
        if self._clock() < promise.until:
            return True
        pod.missed.add((promise.node, promise.plan))
        text = f"plan {promise.plan} of its slices is not in force after {PROMISE_SECONDS:.0f} s"
        remedy = "mgpu's agent there may not run; pods are planned for other nodes"
        self._warn_node(promise.node, f"{text}: {remedy}", "PlanLate")
        return False

    def _promise(
        self, target: PartitionableNode, slices: Sequence[Slice], plan: int, pods: Sequence[WaitingPod]
    ) -> None:
        """Promise the slices of a plan to these pods, in their order, as far as they suffice."""
        for pod, serves in zip(pods, find_served_pods(slices, target.used, [pod.wanted for pod in pods]), strict=True):
            if serves and not pod.promise:
                pod.blocked_since = None
                pod.promise = Promise(target.node.name, plan, self._clock() + PROMISE_SECONDS)

    # Plans.

    def _restore(self, pods: Sequence[WaitingPod]) -> None:
        """Plan slices that bound pods hold and that are missing, whether other pods wait or not."""
        for name, since in sorted(self._missing_since.items()):
            target = self._cluster.partitionable_node(name)
            if target is None or not target.missing:
                del self._missing_since[name]
                continue
            if self._clock() < since + MISSING_SECONDS or not self._may_plan(target) or not target.found.placed:
                continue
            target = self._with_claims(target, pods)
            others = self._servable(self._order.sort(pods), name)[:_PODS_PER_PLAN]
            slices = plan_node(target, [{}, *(pod.wanted for pod in others)])
            if isinstance(slices, Rejection):
                self._warn_node(name, f"slices that its pods hold cannot be made again: {slices}")
            elif not target.is_partitioned_as(slices) and not self._refused.forbids(target, slices):
                self._plan(target, slices, others)

    def _serve(self, pods: Sequence[WaitingPod]) -> None:
        """Plan for the pods that find no slices."""
        waiting = [pod for pod in pods if not pod.passed]
        if not waiting:
            return
        names = sorted(frozenset().union(*(pod.nodes for pod in waiting)))
        targets = {name: target for name in names if (target := self._cluster.partitionable_node(name)) is not None}
        ordered = self._order.sort(waiting)
        self._promise_spare(ordered, {name: target for name, target in targets.items() if target.found.waiting})
        # Pods that are alike find the same; a namespace may have thousands.
        finds_slices: dict[tuple[frozenset[str], frozenset[tuple[str, int]]], bool] = {}
        left = []
        for pod in ordered:
            if pod.promise or self._order.is_paused(pod):
                continue
            key = (pod.nodes, frozenset(pod.wanted.items()))
            if key not in finds_slices:
                finds_slices[key] = any(targets[name].fits(pod.wanted) for name in pod.nodes if name in targets)
            if not finds_slices[key] and not self._is_nominated(pod):
                left.append(pod)
        while left:
            pod = left.pop(0)
            if not pod.promise:
                self._plan_for(pod, left, pods)

    def _promise_spare(self, ordered: Sequence[WaitingPod], under_way: Mapping[str, PartitionableNode]) -> None:
        """Promise what the plans under way make beyond the slices for the pods that they were made for."""
        for name, target in under_way.items():
            plan, planned = target.found.partitioning.plan, target.found.planned
            if plan is None or planned is None:
                continue
            first = [pod for pod in ordered if pod.promise and pod.promise[:2] == (name, plan)]
            others = [pod for pod in self._servable(ordered, name) if (name, plan) not in pod.missed]
            self._promise(target, planned, plan, [*first, *others])

    def _servable(self, pods: Iterable[WaitingPod], node: str) -> list[WaitingPod]:
        """Return the pods that a plan of this node may serve."""
        return [
            pod
            for pod in pods
            if node in pod.nodes
            and not (pod.promise or pod.passed or self._order.is_paused(pod))
            and self._order.may_plan(pod, node)
        ]

    def _is_nominated(self, pod: WaitingPod) -> bool:
        """Return whether slices are kept for this pod on the node where it is nominated."""
        name = pod.known.pod.nominated_node
        target = self._cluster.partitionable_node(name, pod.known.pod.uid) if name in pod.nodes else None
        return target is not None and target.fits(pod.wanted)

    def _plan_for(self, pod: WaitingPod, others: Sequence[WaitingPod], all_pods: Sequence[WaitingPod]) -> None:
        """Make a plan for this pod, on the best node that can have one. It serves as many of the others as possible."""
        known, request = pod.known.pod, pod.known.request
        names = sorted(name for name in pod.nodes if self._order.may_plan(pod, name))
        targets = (self._cluster.partitionable_node(name, known.uid) for name in names)
        able = [
            target
            for target in targets
            if target and request and not request.unmet(target.node) and self._may_plan(target)
        ]
        if request is None:
            return
        if pod.blocked_since is None:
            pod.blocked_since = self._clock()
        # After a while only promises count: other pods may pass a filter again and again and never be bound.
        waits = self._clock() < pod.blocked_since + READY_SECONDS
        claimants = all_pods if waits else [other for other in all_pods if other.promise]
        with suppress(EffortExceeded), self._budgets.call(known.namespace, request, charge_single=True) as call:
            for best in rank_partitionable_nodes(able, pod.wanted, known, self._settings, call.next_budget):
                target = self._with_claims(best, claimants)
                pods = [pod, *self._servable(others, target.node.name)][:_PODS_PER_PLAN]
                slices = plan_node(target, [waiting.wanted for waiting in pods], call.last_budget())
                if isinstance(slices, Rejection) and not slices.proven and call.next_limits() is None:
                    return
                if (
                    isinstance(slices, Rejection)
                    or target.is_partitioned_as(slices)
                    or self._refused.forbids(target, slices)
                ):
                    continue
                if self._plan(target, slices, pods):
                    self._order.planned(pod, target.node.name, destroys=not target.made <= {*slices})
                    return

    def _remove_idle(self, pods: Sequence[WaitingPod]) -> None:
        """Plan cards whole again whose slices no pod has used for long, and that are promised to none."""
        for name in self._idle.nodes():
            target = self._cluster.partitionable_node(name)
            if target is None:
                self._idle.forget(name)
                continue
            self._idle.observe(target)
            due = self._idle.due(name)
            if not due or not self._may_plan(target) or target.missing:
                continue
            # As in `_plan_for`: after a while, a pod that passes filters and is never bound keeps no slices.
            promised = [pod for pod in pods if pod.promise]
            late = self._idle.due(name, READY_SECONDS) - {s.card for s in self._with_claims(target, promised).used}
            due = late | (due - {s.card for s in self._with_claims(target, pods).used})
            slices = tuple(sorted(s for s in target.made if s.card not in due))
            if due and not self._refused.forbids(target, slices) and self._plan(target, slices, ()):
                log.info("idle slices are removed", extra={"node": name, "cards": sorted(due)})

    def _with_claims(self, target: PartitionableNode, pods: Sequence[WaitingPod]) -> PartitionableNode:
        """Return the node with the slices in use that these pods are about to be bound to, or that were promised."""
        claims = [pod.wanted for pod in pods if self._claims(pod, target.node.name)]
        return with_claimed_slices(target, claims, self._settings.geometries) if claims else target

    def _claims(self, pod: WaitingPod, node: str) -> bool:
        if pod.promise and pod.promise.ready and pod.promise.node == node:
            return True
        is_expected = pod.passed and self._clock() < pod.until and not self._order.is_paused(pod)
        return is_expected and node in pod.nodes

    def _may_plan(self, target: PartitionableNode) -> bool:
        if target.problem or target.found.waiting:
            return False
        version, until = self._lost.get(target.node.name, (-1, 0.0))
        return version != target.version or self._clock() >= until

    def _plan(self, target: PartitionableNode, slices: tuple[Slice, ...], pods: Sequence[WaitingPod]) -> bool:
        """Put a plan into the ClusterCache and promise its slices; return False if the node has changed meanwhile."""
        name, before = target.node.name, target.found.partitioning
        numbers = [number for number in (before.plan, before.applied) if number is not None]
        standing = target.found.by_others & {*slices}
        plan = Plan(name, next_plan(max(numbers, default=None), int(self._now())), slices, before.plan, standing)
        if not self._cluster.plan(plan, target.version):
            return False
        metrics.PLANS.labels("made").inc()
        listed = [f"{s.card}:{s.start} {s.name}" for s in slices]
        log.info("plan made", extra={"node": name, "plan": plan.id, "slices": listed})
        self._promise(target, slices, plan.id, pods)
        return True

    # Writes.

    def _write_plans(self) -> None:
        for plan in self._cluster.plans():
            number, at = self._written.get(plan.node, (-1, 0.0))
            if number == plan.id and self._clock() < at + _UNOBSERVED_SECONDS:
                continue
            self._may_decide()
            extra = {"node": plan.node, "plan": plan.id}
            try:
                reason = self._writer.write_plan(plan)
            except (ApiError, Unreachable, RetryLater) as error:
                log.warning("plan not written yet: %s", error, extra=extra)
                continue
            if reason is not None:
                metrics.PLANS.labels("dropped").inc()
                log.warning("plan dropped: %s", reason, extra=extra)
                self._cluster.drop_plan(plan)
                target = self._cluster.partitionable_node(plan.node)
                self._lost[plan.node] = (target.version if target else -1, self._clock() + _LOST_SECONDS)
            else:
                metrics.PLANS.labels("written").inc()
                log.info("plan written", extra=extra)
                self._written[plan.node] = (plan.id, self._clock())
                self._configs_due.add(plan.node)

    def _write_configs(self) -> None:
        """Under MPS, write what the annotation says into the ConfigMap, after the annotation."""
        unwritten = {p.node for p in self._cluster.plans() if self._written.get(p.node, (-1,))[0] != p.id}
        for name in sorted(self._configs_due - unwritten):
            target = self._cluster.partitionable_node(name)
            if target is None or target.problem or target.found.mode != MPS or target.found.partitioning.plan is None:
                self._configs_due.discard(name)
                continue
            spec = target.found.partitioning.spec
            self._may_decide()
            try:
                if not self.configs.has(name, spec):
                    self._writer.write_config(name, spec)
            except (ApiError, Unreachable, RetryLater) as error:
                log.warning("sharing configuration not written yet: %s", error, extra={"node": name})
                return
            self._configs_due.discard(name)

    def _warn_node(self, node: str, message: str, reason: str = "NoPlan") -> None:
        """Create an Event on the node, unless its last one had the same message."""
        if self._reported.get(node) != message:
            self._reported[node] = message
            self._warn(node_reference(node), reason, message)
