"""Makes and ends promises. A promise says which plan has slices for a waiting pod.

A plan is made for one pod, and often creates slices for other pods too. Each of these pods gets a promise, so that no
second plan is made for it while the first one is carried out. When the slices exist, other plans spare them for a short
time. A promise is not a reservation: any pod may take a free slice, and the ledger does not contain promises. The
partition controller uses `Promises` on its thread.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from mgpu.model.slice_names import Slice
from scheduler.cluster.cache import ClusterCache
from scheduler.engine.partitioning.geometry import Geometries
from scheduler.engine.partitioning.partitionable_node import (
    PartitionableNode,
    find_served_pods,
    with_claimed_slices,
)
from scheduler.partitioning.waiting_pods import PlanningOrder, Promise, WaitingPod, WaitingPods

log = logging.getLogger(__name__)

PROMISE_SECONDS = 60.0
"""The time for which a pod waits until its plan is in force. After it, another node may get a plan for the pod."""
READY_SECONDS = 15.0
"""The time for which other plans spare new slices that their pod has not used yet.

kube-scheduler retries a pod within ten seconds after its node has changed.
"""


class Promises:
    """Makes, updates and ends the promises of waiting pods. Not thread-safe.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, cluster: ClusterCache, waiting: WaitingPods, order: PlanningOrder, clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._waiting = waiting
        self._order = order
        self._clock = clock

    def make(self, target: PartitionableNode, slices: Iterable[Slice], plan: int, pods: Sequence[WaitingPod]) -> None:
        """Promise the free slices of a plan to these pods. Pods that come first in `pods` are served first.

        A pod that has a promise already keeps it, and the slices that it needs are not promised to pods after it.
        """
        for pod, is_served in zip(
            pods, find_served_pods(slices, target.used, [pod.wanted for pod in pods]), strict=True
        ):
            if is_served and not pod.promise:
                pod.blocked_since = None
                pod.promise = Promise(target.node.name, plan, self._clock() + PROMISE_SECONDS)

    def make_from_spare(self, pods: Sequence[WaitingPod], under_way: Mapping[str, PartitionableNode]) -> None:
        """Promise those slices of the plans under way that are not promised to a pod yet.

        Args:
            pods: The waiting pods, in the order in which plans are made for them.
            under_way: By name, the nodes whose last plan is not in force yet.
        """
        for name, target in under_way.items():
            plan = target.observed.partitioning.plan
            planned = target.observed.planned
            if plan is None or planned is None:
                continue
            first = [pod for pod in pods if pod.promise and pod.promise[:2] == (name, plan)]
            others = [pod for pod in self.servable(pods, name) if (name, plan) not in pod.missed]
            self.make(target, planned, plan, [*first, *others])

    def servable(self, pods: Iterable[WaitingPod], node: str) -> list[WaitingPod]:
        """Return the pods for which a plan of this node may create slices."""
        return [
            pod
            for pod in pods
            if node in pod.nodes
            and not (pod.promise or pod.passed or self._order.is_paused(pod))
            and self._order.may_plan(pod, node)
        ]

    def follow(self, pods: Sequence[WaitingPod], deleted: Iterable[WaitingPod]) -> list[Promise]:
        """Update the promises to the state of their nodes, and end those that no longer hold.

        A promise ends if its plan is not in force in time or is no longer the plan of the node, if other pods took its
        slices, or if its pod did not use them in time.

        Args:
            pods: The waiting pods.
            deleted: The pods that no longer wait and got no slices, mostly because they were deleted.

        Returns:
            The promises whose plan was not in force in time.
        """
        for pod in deleted:
            if pod.promise:
                self._order.missed(pod, pod.promise.node, pod.promise.plan)
        late = []
        for pod in pods:
            promise = pod.promise
            if promise is None:
                continue
            target = self._cluster.partitions.get(promise.node, pod.known.pod.uid)
            pod.promise = self._next(pod, promise, target) if target else None
            if pod.promise and not pod.promise.ready and self._clock() >= pod.promise.until:
                pod.missed.add((promise.node, promise.plan))
                pod.promise = None
                late.append(promise)
        return late

    def with_claims(
        self, target: PartitionableNode, pods: Iterable[WaitingPod], geometries: Geometries
    ) -> PartitionableNode:
        """Return the node as if these pods already used the slices that they are about to get there."""
        claims = [pod.wanted for pod in pods if self._claims(pod, target.node.name)]
        return with_claimed_slices(target, claims, geometries) if claims else target

    def _claims(self, pod: WaitingPod, node: str) -> bool:
        if pod.promise and pod.promise.ready and pod.promise.node == node:
            return True
        is_binding_expected = pod.passed and self._clock() < pod.until and not self._order.is_paused(pod)
        return is_binding_expected and node in pod.nodes

    def _next(self, pod: WaitingPod, promise: Promise, target: PartitionableNode) -> Promise | None:
        """Return the updated promise, or None if it has ended."""
        partitioning = target.observed.partitioning
        now = self._clock()
        if not promise.ready:
            if partitioning.plan == promise.plan == partitioning.applied:
                return promise._replace(ready=True, until=now + READY_SECONDS)
            is_under_way = target.observed.has_pending_plan and partitioning.plan == promise.plan
            return promise if is_under_way else None
        if not target.fits(pod.wanted):
            return None  # Other pods took the slices, so the namespace of this pod is not charged.
        if now < promise.until:
            return promise
        self._order.missed(pod, promise.node, promise.plan)
        extra = {"node": promise.node, "plan": promise.plan, "pod": pod.known.pod.uid}
        log.info("pod did not use the slices that were promised to it", extra=extra)
        self._waiting.forget(pod, promise.until - READY_SECONDS)
        return None
