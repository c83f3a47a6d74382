"""The partition controller: partitions cards for pods that wait for slices, on a thread of its own.

The thread makes plans while this replica leads. The extender and the late binding decisions report the pods that wait.
The controller is level-triggered: each round derives what to do from the ClusterCache and the waiting pods, so a crash
between any two steps costs only time. A new plan is first added to the ClusterCache, so that every decision respects
it, and is then written to the Node. While a plan is being carried out, its node gets no second plan
(docs/design/slices.md, "Barrier"). A pod for which the plan has slices gets no second plan for a minute.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from mgpu.kube.events import node_reference
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.node_slices import next_plan
from mgpu.model.slice_names import Slice
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Warn
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.slice_state import PartitionPlan
from scheduler.decisions.effort_budgets import EffortBudgets, EffortExceeded
from scheduler.engine.effort import Exhausted
from scheduler.engine.partitioning.partitionable_node import (
    PartitionableNode,
    can_be_partitioned_for,
    plan_node,
    requested_slices,
)
from scheduler.engine.partitioning.slice_choice import plan_node_for_gang, rank_partitionable_nodes
from scheduler.partitioning.node_history import IdleCards, RefusedPlans
from scheduler.partitioning.plan_writer import PlanPublisher, PlanWriter, SharingConfigs
from scheduler.partitioning.promises import PROMISE_SECONDS, READY_SECONDS, Promises
from scheduler.partitioning.waiting_pods import PlanningOrder, WaitingPod, WaitingPods

log = logging.getLogger(__name__)

MISSING_SECONDS = 10.0
"""How long slices in use may be missing before the controller plans them again.

Meanwhile the agent of the node tries to restore them.
"""
_ROUND_SECONDS = 1.0
"""The time between rounds while work can become due without an event."""
_SPACING_SECONDS = 0.02
"""The minimum time between rounds, so that events in quick succession share a round."""
_PODS_PER_PLAN = 64
"""The most waiting pods for which one plan may create slices. The search takes longer the more pods there are."""


class PartitionController:
    """Makes plans for waiting pods, plans missing slices again, and removes idle slices.

    Any thread may call `request_plan`, `can_serve`, `changed`, `begin` and `wake`, which do not wait for the API
    server. All other methods belong to the thread of `run`. The lock of `_event` guards `_due` and `_changed`.

    Args:
        warn: Creates an Event of type Warning.
        may_decide: A function that raises RetryLater while this process must not write.
        clock: A monotonic clock, in seconds.
        now: A clock that returns the seconds since 1970, from which the numbers of plans are derived.
        budgets: Limits the effort of the searches. With None, the controller has allowances of its own.

    Attributes:
        configs: The ConfigMap of sharing configurations, which `scheduler.watches` keeps up to date.
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
        self._settings = settings.dialects.slices
        self._warn = warn
        self._may_decide = may_decide
        self._clock = clock
        self._now = now
        self._budgets = budgets or EffortBudgets()
        self.configs = SharingConfigs(self._configs_changed)
        self._publisher = PlanPublisher(cluster, writer, self.configs, may_decide, clock)
        self._waiting = WaitingPods(cluster, clock)
        self._order = PlanningOrder(clock)
        self._promises = Promises(cluster, self._waiting, self._order, clock)
        self._refused = RefusedPlans(clock)
        self._idle = IdleCards(clock, self._settings.mps_idle_seconds)
        self._event = threading.Condition()
        self._due = False
        self._changed: set[str] = set()
        self._missing_since: dict[str, float] = {}  # By node, the time since which slices have been missing.
        self._reported: dict[str, str] = {}  # By node, the message of its last Event.

    # Called by other threads.

    def request_plan(self, known: GpuPod, nodes: Sequence[str], passed: Sequence[str] = ()) -> None:
        """Record the result of a filter for a pod that requests slices.

        Args:
            nodes: The names of the nodes on which the pod would fit if they were partitioned again.
            passed: The names of the nodes on which it fits now. Its binding is expected on one of them, so for some
                seconds no plan removes the slices that it may get.
        """
        self._waiting.put(known, nodes, passed)
        if nodes and not passed:
            self.wake()

    def can_serve(self, known: GpuPod) -> bool:
        """Return False if no plan of its node can create the slices of a bound pod. Otherwise request such a plan.

        The answer is also True while it is not known yet whether a plan can create them.
        """
        target = self._cluster.partitions.get(known.pod.node, known.pod.uid)
        request = known.request
        wanted = requested_slices(request) if request else {}
        if target is None or request is None or not wanted or target.problem or request.unmet_requirement(target.node):
            return False
        if target.observed.has_positions and not target.observed.has_pending_plan:
            # If the search ends without a result, the answer is True, and the attempt to make a plan decides.
            with suppress(EffortExceeded, Exhausted), self._budgets.call(known.pod.namespace, request) as call:
                if not can_be_partitioned_for(target, wanted, call.next_budget()):
                    return False
        self.request_plan(known, [known.pod.node])
        return True

    def changed(self, node: str) -> None:
        """Observe a node in the next round, because its slices or their holders have changed."""
        with self._event:
            self._changed.add(node)
        self.wake()

    def begin(self) -> None:
        """Begin a term as leader: observe all nodes, and drop earlier plans that have not been observed on their Nodes.

        If such a plan has been written all the same, the watch will deliver it.
        """
        for plan in self._cluster.partitions.plans():
            self._cluster.partitions.drop_plan(plan)
        for node in self._cluster.partitions.nodes():
            self.changed(node)

    def wake(self) -> None:
        with self._event:
            self._due = True
            self._event.notify_all()

    def run(self, stop: threading.Event) -> None:
        """Run rounds until `stop` is set. Call `wake` after setting it."""
        while not stop.is_set():
            # `_pause` takes the lock of the ClusterCache. It is called without the lock of `_event`, because a thread
            # that has the lock of the ClusterCache may call `changed`.
            pause = self._pause()
            with self._event:
                self._event.wait_for(lambda: self._due or stop.is_set(), pause)
                self._due = False
            try:
                self.work()
            except Exception:
                # Nothing outside of this loop handles errors. An error with one node must not keep all pods waiting.
                log.exception("planning of partitions failed")
            stop.wait(_SPACING_SECONDS)

    def _configs_changed(self, nodes: Collection[str]) -> None:
        for node in self._cluster.partitions.nodes():
            if node in nodes:
                self.changed(node)

    def _pause(self) -> float | None:
        is_busy = self._missing_since or self._publisher.is_busy() or self._idle or self._waiting
        return _ROUND_SECONDS if is_busy else None

    # One round.

    def work(self) -> None:
        """Run one round: make the plans that are due, and write what is not written yet."""
        try:
            self._may_decide()
            with self._event:
                changed, self._changed = self._changed, set()
            self._observe(changed)
            pods, deleted = self._waiting.update()
            for promise in self._promises.follow(pods, deleted):
                text = f"partition plan {promise.plan} is not in force after {PROMISE_SECONDS:.0f} s"
                remedy = "check that mgpu's agent runs on the node; the waiting pods get plans on other nodes"
                self._warn_node(promise.node, f"{text}: {remedy}", "PlanLate")
            self._restore(pods)
            self._serve(pods)
            self._remove_idle(pods)
            self._publisher.publish()
        except RetryLater:
            return  # The next leader observes all nodes, and its filters report all waiting pods.

    def _observe(self, changed: Iterable[str]) -> None:
        for name in sorted(changed):
            target = self._cluster.partitions.get(name)
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
            self._publisher.observe(target)

    def _forget(self, node: str) -> None:
        """Forget a node that is gone or has lost its label.

        Otherwise the memory would grow, because autoscalers give every new node a new name.
        """
        self._missing_since.pop(node, None)
        self._reported.pop(node, None)
        self._publisher.forget(node)
        self._refused.forget(node)
        self._order.forget(node)
        self._idle.forget(node)

    # Plans.

    def _restore(self, pods: Sequence[WaitingPod]) -> None:
        """Make plans that create missing slices of bound pods again, even if no pod waits."""
        for name, since in sorted(self._missing_since.items()):
            target = self._cluster.partitions.get(name)
            if target is None or not target.missing:
                del self._missing_since[name]
                continue
            if (
                self._clock() < since + MISSING_SECONDS
                or not self._may_plan(target)
                or not target.observed.has_positions
            ):
                continue
            target = self._with_claims(target, pods)
            others = self._promises.servable(self._order.sort(pods), name)[:_PODS_PER_PLAN]
            slices = plan_node(target, [{}, *(pod.wanted for pod in others)])
            if isinstance(slices, Rejection):
                self._warn_node(name, f"slices that the node's pods hold cannot be created again: {slices}")
            elif not target.is_partitioned_as(slices) and not self._refused.forbids(target, slices):
                self._plan(target, slices, others)

    def _serve(self, pods: Sequence[WaitingPod]) -> None:
        waiting = [pod for pod in pods if not pod.passed]
        if not waiting:
            return
        names = sorted(frozenset().union(*(pod.nodes for pod in waiting)))
        targets = {name: target for name in names if (target := self._cluster.partitions.get(name)) is not None}
        ordered = self._order.sort(waiting)
        self._promises.make_from_spare(
            ordered, {name: target for name, target in targets.items() if target.observed.has_pending_plan}
        )
        gangs = self._waiting.gangs(pods)
        # Thousands of pods may have the same request and the same nodes, so each such pair is checked once.
        finds_slices: dict[tuple[frozenset[str], frozenset[tuple[str, int]], frozenset[WaitingPod]], bool] = {}
        blocked = []
        for pod in ordered:
            if pod.promise or self._order.is_paused(pod):
                continue
            gang = gangs.get(pod, frozenset())
            key = (pod.nodes, frozenset(pod.wanted.items()), gang)
            if key not in finds_slices:
                # The slices that other members of its gang are about to get are no slices for this pod.
                found = (self._with_claims(targets[name], gang) for name in pod.nodes if name in targets)
                finds_slices[key] = any(target.fits(pod.wanted) for target in found)
            if not finds_slices[key] and not self._is_nominated(pod):
                blocked.append(pod)
        while blocked:
            pod = blocked.pop(0)
            if not pod.promise:
                self._plan_for(pod, blocked, pods, gangs.get(pod, frozenset()))

    def _is_nominated(self, pod: WaitingPod) -> bool:
        name = pod.known.pod.nominated_node
        target = self._cluster.partitions.get(name, pod.known.pod.uid) if name in pod.nodes else None
        return target is not None and target.fits(pod.wanted)

    def _plan_for(
        self,
        pod: WaitingPod,
        others: Sequence[WaitingPod],
        all_pods: Sequence[WaitingPod],
        gang: Collection[WaitingPod],
    ) -> None:
        """Make a plan for this pod on the best node that may get one. Other pods get slices in the plan if possible.

        Args:
            gang: All waiting members of the pod's gang.
        """
        known, request = pod.known.pod, pod.known.request
        if request is None:
            return
        names = sorted(name for name in pod.nodes if self._order.may_plan(pod, name))
        targets = (self._cluster.partitions.get(name, known.uid) for name in names)
        able = [
            target
            for target in targets
            if target and not request.unmet_requirement(target.node) and self._may_plan(target)
        ]
        if pod.blocked_since is None:
            pod.blocked_since = self._clock()
        # Pods that pass filters without being bound would keep their slices from this pod forever. So after
        # READY_SECONDS only slices with a promise are spared.
        waits = self._clock() < pod.blocked_since + READY_SECONDS
        claimants = all_pods if waits else [other for other in all_pods if other.promise or other in gang]
        with suppress(EffortExceeded), self._budgets.call(known.namespace, request, charge_single=True) as call:
            for best in rank_partitionable_nodes(able, pod.wanted, known, self._settings, call.next_budget):
                target = self._with_claims(best, claimants)
                servable = self._promises.servable(others, target.node.name)
                pods = [pod, *sorted(servable, key=lambda other: other not in gang)][:_PODS_PER_PLAN]
                members = sum(waiting in gang for waiting in pods)
                slices = plan_node_for_gang(target, [w.wanted for w in pods], members, call.last_budget)
                if isinstance(slices, Rejection) and not slices.proven and call.next_limits() is None:
                    return
                if (
                    isinstance(slices, Rejection)
                    or target.is_partitioned_as(slices)
                    or self._refused.forbids(target, slices)
                ):
                    continue
                if self._plan(target, slices, pods):
                    self._order.planned(pod, target.node.name, destroys=not target.existing <= {*slices})
                    return

    def _remove_idle(self, pods: Sequence[WaitingPod]) -> None:
        """Make plans that remove slices of cards that have been idle too long, unless pods are about to get them."""
        for name in self._idle.nodes():
            target = self._cluster.partitions.get(name)
            if target is None:
                self._idle.forget(name)
                continue
            self._idle.observe(target)
            due = self._idle.due(name)
            if not due or not self._may_plan(target) or target.missing:
                continue
            # As in `_plan_for`, after READY_SECONDS only slices with a promise are spared.
            promised = [pod for pod in pods if pod.promise]
            late = self._idle.due(name, READY_SECONDS) - {s.card for s in self._with_claims(target, promised).used}
            due = late | (due - {s.card for s in self._with_claims(target, pods).used})
            slices = tuple(sorted(s for s in target.existing if s.card not in due))
            if due and not self._refused.forbids(target, slices) and self._plan(target, slices, ()):
                log.info("removing idle slices", extra={"node": name, "cards": sorted(due)})

    def _with_claims(self, target: PartitionableNode, pods: Iterable[WaitingPod]) -> PartitionableNode:
        return self._promises.with_claims(target, pods, self._settings.geometries)

    def _may_plan(self, target: PartitionableNode) -> bool:
        return not (target.problem or target.observed.has_pending_plan or self._publisher.is_paused(target))

    def _plan(self, target: PartitionableNode, slices: tuple[Slice, ...], pods: Sequence[WaitingPod]) -> bool:
        """Add a plan to the ClusterCache and promise its slices. Return False if the node has changed meanwhile."""
        name = target.node.name
        before = target.observed.partitioning
        numbers = [number for number in (before.plan, before.applied) if number is not None]
        preexisting = target.observed.foreign_slices & {*slices}
        plan_id = next_plan(max(numbers, default=None), int(self._now()))
        plan = PartitionPlan(name, plan_id, slices, before.plan, preexisting)
        if not self._cluster.partitions.add_plan(plan, target.version):
            return False
        metrics.PLANS.labels("made").inc()
        listed = [f"{s.card}:{s.start} {s.name}" for s in slices]
        log.info("plan made", extra={"node": name, "plan": plan.id, "slices": listed})
        self._promises.make(target, slices, plan.id, pods)
        return True

    def _warn_node(self, node: str, message: str, reason: str = "NoPlan") -> None:
        """Create an Event about the node, unless the last Event had the same message."""
        if self._reported.get(node) != message:
            self._reported[node] = message
            self._warn(node_reference(node), reason, message)
