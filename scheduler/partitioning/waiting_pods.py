"""Stores the pods that wait for slices, and decides the order in which plans are made for them.

A plan may destroy free slices that other pods could use, and keeps the driver of a node busy for seconds, whereas a
waiting pod holds nothing. So a namespace has a budget of plans for each node. Without it, two pods that are never bound
could cause a node to be partitioned back and forth forever. All state is in memory, and a new leader begins without it.
The partition controller uses this module.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mgpu.model.gangs import Gang
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.engine.partitioning.partitionable_node import requested_slices
from scheduler.engine.round_robin import by_turns

_REMEMBERED_SECONDS = 400.0
"""The time for which a pod that was filtered counts as waiting. kube-scheduler retries a pod within five minutes."""
_BINDING_SECONDS = 5.0
"""The time for which the binding of a pod is expected after a node has passed its filter."""
_UNOBSERVED_SECONDS = 30.0
"""The time that the watch may take to deliver a reported pod. After that the pod counts as deleted."""
BURST = 6
"""The number of plans in a row that a namespace may cause on one node if the plans destroy free slices."""
REFILL_SECONDS = 20.0
"""The time after which a namespace may cause one more such plan."""
_MISSED_COST = 10
"""The number of plans that are charged in addition if a pod does not use the slices that were made for it."""
FIRST_PAUSE = 60.0
"""The time for which a pod gets no plan after it did not use its slices. It doubles each time, up to LONGEST_PAUSE."""
LONGEST_PAUSE = 300.0
_NAMESPACES_REMEMBERED = 1_000
"""The most namespaces whose place in the order of turns is remembered."""


class Promise(NamedTuple):
    """Slices of a plan for one waiting pod.

    Attributes:
        node: The name of the node.
        plan: The number of the plan.
        until: The time by which the plan must come into force; if `ready`, the time until which other plans spare the
            slices.
        ready: Whether the plan is in force, so that the slices exist.
    """

    node: str
    plan: int
    until: float
    ready: bool = False


@dataclass(slots=True, eq=False)
class WaitingPod:
    """A pod that requests slices and does not have them yet.

    Attributes:
        known: The pod in its latest version, which either was reported or came from the watch.
        wanted: The number of requested slices by name.
        nodes: The names of the nodes on which the pod fits, either now (`passed`) or after a new partitioning.
        since: The time of the first report of the pod.
        filtered_at: The time of the last report.
        until: The time after which the pod is forgotten, unless it has a promise.
        passed: Whether the pod fits on `nodes` now, so that its binding is expected.
        observed: Whether the watch has delivered the pod.
        promise: The promise of the pod, or None.
        blocked_since: The time since which attempts to make a plan for the pod have failed; None if there was no
            attempt since the last promise.
        missed: The node and the number of each plan that promised slices to the pod and was not in force in time.
    """

    known: GpuPod
    wanted: Mapping[str, int]
    nodes: frozenset[str]
    since: float
    filtered_at: float
    until: float
    passed: bool = False
    observed: bool = False
    promise: Promise | None = None
    blocked_since: float | None = None
    missed: set[tuple[str, int | None]] = field(default_factory=set)

    @property
    def order(self) -> tuple[str, str, str]:
        pod = self.known.pod
        return pod.created, pod.key, pod.uid

    @property
    def namespace(self) -> str:
        return self.known.pod.namespace


class WaitingPods:
    """The pods that wait for slices. Thread-safe.

    The objects that `update` returns are shared. `put` changes their `nodes`, `passed`, `filtered_at` and `until` on
    the threads of its callers. The other attributes belong to the thread of the partition controller. The lock guards
    the collection.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, cluster: ClusterCache, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._lock = threading.Lock()
        self._pods: dict[str, WaitingPod] = {}

    def __bool__(self) -> bool:
        return bool(self._pods)

    def put(self, known: GpuPod, nodes: Sequence[str], passed: Sequence[str] = ()) -> None:
        """Record the result of a filter. A pod that fits on no node is removed, unless it has a promise.

        Args:
            nodes: The names of the nodes on which the pod would fit after a new partitioning. They are ignored if
                `passed` is not empty.
            passed: The names of the nodes on which it fits now.
        """
        uid, now = known.pod.uid, self._clock()
        possible = frozenset(passed or nodes)
        with self._lock:
            waiting = self._pods.get(uid)
            if known.request is None or (not possible and (waiting is None or waiting.promise is None)):
                self._pods.pop(uid, None)
                return
            wanted = requested_slices(known.request)
            if waiting is None or waiting.wanted != wanted:
                waiting = self._pods[uid] = WaitingPod(known, wanted, possible, now, now, now)
            waiting.nodes = possible
            waiting.passed = bool(passed)
            waiting.filtered_at = now
            waiting.until = now + (_BINDING_SECONDS if passed else _REMEMBERED_SECONDS)

    def update(self) -> tuple[list[WaitingPod], list[WaitingPod]]:
        """Remove the pods that no longer wait.

        Returns:
            The pods that wait, oldest first, and the removed pods that had a promise but got no slices.
        """
        with self._lock:
            deleted = []
            for uid in [uid for uid, waiting in self._pods.items() if not self._waits(waiting)]:
                waiting = self._pods.pop(uid)
                if waiting.promise and not self._is_decided(uid, self._cluster.gpu_pod(uid)):
                    deleted.append(waiting)
            return sorted(self._pods.values(), key=lambda waiting: waiting.order), deleted

    def gangs(self, pods: Iterable[WaitingPod]) -> dict[WaitingPod, frozenset[WaitingPod]]:
        """Return the waiting members of each gang, by member. Pods without a gang are left out."""
        members: dict[Gang, list[WaitingPod]] = {}
        for waiting in pods:
            gang = self._cluster.gangs.of(waiting.known.pod)
            if gang is not None:
                members.setdefault(gang, []).append(waiting)
        return {waiting: found for found in map(frozenset, members.values()) for waiting in found}

    def forget(self, waiting: WaitingPod, filtered_at: float) -> None:
        """Remove a pod, unless it was reported after this time."""
        with self._lock:
            if waiting.filtered_at <= filtered_at:
                self._pods.pop(waiting.known.pod.uid, None)

    def _is_decided(self, uid: str, known: GpuPod | None) -> bool:
        """Return whether a pod has its slices or a reservation for them."""
        bound = known is not None and known.pod.node and not self._cluster.is_undecided(uid)
        return bool(bound) or self._cluster.reservation(uid) is not None

    def _waits(self, waiting: WaitingPod) -> bool:
        uid, now = waiting.known.pod.uid, self._clock()
        known = self._cluster.gpu_pod(uid)
        if known is None:
            return not waiting.observed and now < waiting.since + _UNOBSERVED_SECONDS
        waiting.observed = True
        waiting.known = known
        if known.pod.ended or known.pod.deleting or self._is_decided(uid, known):
            return False
        if known.request is None or requested_slices(known.request) != waiting.wanted:
            return False
        return waiting.promise is not None or now < waiting.until


@dataclass(slots=True)
class _Budget:
    """The plans that a namespace may still cause on a node, as a token bucket.

    Attributes:
        full_at: The time at which the bucket is full again.
        missed: The number of the last plan whose slices a pod of the namespace did not use.
    """

    full_at: float
    missed: int | None = None


@dataclass(slots=True)
class _Missed:
    """The number of times that a pod did not use its slices, and the end of its pause."""

    times: int
    until: float


class PlanningOrder:
    """Decides the order of waiting pods, and manages the budgets of their namespaces. Not thread-safe.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._served: OrderedDict[str, None] = OrderedDict()  # The namespaces in the order of their last plans.
        self._missed: dict[str, _Missed] = {}
        self._budgets: dict[str, dict[str, _Budget]] = {}  # By node and namespace.

    def sort(self, pods: Iterable[WaitingPod]) -> list[WaitingPod]:
        """Return the pods in the order in which plans are made for them.

        Namespaces take turns. Those without a plan so far come first, then the one whose last plan is the oldest.
        Within a namespace, the pods that least often left their slices unused come first, and among them the oldest.
        """
        ranks = {name: i for i, name in enumerate(self._served, 1)}
        pods = sorted(pods, key=lambda pod: (self._times_missed(pod), pod.order))
        return list(by_turns(pods, lambda pod: pod.namespace, lambda name: (ranks.get(name, 0), name)))

    def is_paused(self, pod: WaitingPod) -> bool:
        """Return whether the pod gets no plan for now because it did not use its slices."""
        missed = self._missed.get(pod.known.pod.uid)
        return missed is not None and self._clock() < missed.until

    def may_plan(self, pod: WaitingPod, node: str) -> bool:
        """Return whether the namespace of the pod has budget for a plan of this node."""
        budget = self._budgets.get(node, {}).get(pod.namespace)
        return budget is None or budget.full_at <= self._clock() + (BURST - 1) * REFILL_SECONDS

    def planned(self, pod: WaitingPod, node: str, *, destroys: bool) -> None:
        """Record that a plan was made for this pod. Charge it to the namespace if it destroys free slices."""
        self._served[pod.namespace] = None
        self._served.move_to_end(pod.namespace)
        while len(self._served) > _NAMESPACES_REMEMBERED:
            self._served.popitem(last=False)
        if destroys:
            self._charge(pod.namespace, node, 1)

    def missed(self, pod: WaitingPod, node: str, plan: int) -> None:
        """Charge an unused plan to the namespace of the pod, and pause the pod."""
        now = self._clock()
        self._missed = {uid: row for uid, row in self._missed.items() if now < row.until + LONGEST_PAUSE}
        times = self._times_missed(pod)
        self._missed[pod.known.pod.uid] = _Missed(times + 1, now + min(FIRST_PAUSE * 2**times, LONGEST_PAUSE))
        budget = self._budgets.get(node, {}).get(pod.namespace)
        if budget is None or budget.missed != plan:  # Each plan is charged once, even if many pods did not use it.
            self._charge(pod.namespace, node, _MISSED_COST).missed = plan

    def forget(self, node: str) -> None:
        self._budgets.pop(node, None)

    def _times_missed(self, pod: WaitingPod) -> int:
        missed = self._missed.get(pod.known.pod.uid)
        return missed.times if missed else 0

    def _charge(self, namespace: str, node: str, plans: int) -> _Budget:
        now = self._clock()
        budgets = {name: budget for name, budget in self._budgets.get(node, {}).items() if now < budget.full_at}
        budget = budgets.setdefault(namespace, _Budget(now))
        budget.full_at = min(budget.full_at + plans * REFILL_SECONDS, now + 2 * BURST * REFILL_SECONDS)
        self._budgets[node] = budgets
        return budget
