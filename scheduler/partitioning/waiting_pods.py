"""Pods that wait for slices: since when, where they could be, and whose turn it is for a plan.

The filter reports the pods, on request threads; the partition controller plans for them, on its own thread. A plan
takes free slices from other pods and seconds of a node's driver, while a pod that waits holds nothing. So a namespace
may have
a node partitioned only so often: without that bound, two pods that are never bound would have it done without end. All
of it is in memory, and a new leader begins without it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.engine.partitioning.partitionable_node import requested_slices
from scheduler.engine.round_robin import by_turns

_REMEMBERED_SECONDS = 400.0
"""kube-scheduler retries a pod after five minutes at the latest."""
_BINDING_SECONDS = 5.0
"""How long the binding of a pod that has passed a filter may take."""
_UNOBSERVED_SECONDS = 30.0
"""A filter may be called before the watch delivers its pod. A pod that it does not deliver at all is gone."""
BURST, REFILL_SECONDS = 6, 20.0
"""How many plans that destroy free slices a namespace may have of a node in a row, and the time for one more."""
_MISSED_COST = 10
"""What a plan costs in addition, in such plans, if a pod that it was made for does not use its slices."""
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 300.0
"""How long a pod gets no plan after it did not use its slices; the pause doubles each time."""
_NAMESPACES_REMEMBERED = 1_000


class Promise(NamedTuple):
    """A plan of a node that has slices for a pod.

    Attributes:
        until: the pod is planned for elsewhere after this time.
        ready: the plan is in force. Until then other plans leave the slices to the pod.
    """

    node: str
    plan: int
    until: float
    ready: bool = False


@dataclass(slots=True, eq=False)
class WaitingPod:
    """A pod that wants slices.

    Attributes:
        wanted: number of slices by name.
        nodes: where the pod could be.
        filtered_at: the time of the last filter for it.
        until: the pod is forgotten after this time.
        passed: there are free slices on `nodes`, and the binding of the pod is expected. Otherwise these nodes would
            have to be partitioned again.
        observed: the watch has delivered it.
        blocked_since: since when no plan could be made for it.
        missed: plans that were not in force in time, by node and number.
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
    """Thread-safe. The pods that `update` returns belong to the controller's thread, except what `put` sets."""

    def __init__(self, cluster: ClusterCache, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._lock = threading.Lock()
        self._pods: dict[str, WaitingPod] = {}

    def __bool__(self) -> bool:
        return bool(self._pods)

    def put(self, known: GpuPod, nodes: Sequence[str], passed: Sequence[str] = ()) -> None:
        """Record the result of a filter.

        Args:
            nodes: where the pod would fit if they were partitioned again. Ignored if it fits somewhere now.
            passed: where it fits now.
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
        """Forget the pods that wait no more.

        Returns:
            The pods that wait, the oldest first. And those that had a promise and were deleted before they were bound.
        """
        with self._lock:
            left = []
            for uid in [uid for uid, waiting in self._pods.items() if not self._waits(waiting)]:
                waiting = self._pods.pop(uid)
                if waiting.promise and not self._is_decided(uid, self._cluster.gpu_pod(uid)):
                    left.append(waiting)
            return sorted(self._pods.values(), key=lambda waiting: waiting.order), left

    def forget(self, waiting: WaitingPod, filtered_at: float) -> None:
        """Forget a pod, unless there was a filter for it after this time."""
        with self._lock:
            if waiting.filtered_at <= filtered_at:
                self._pods.pop(waiting.known.pod.uid, None)

    def _is_decided(self, uid: str, known: GpuPod | None) -> bool:
        """Return whether a pod has its slices, or a reservation of them."""
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
    """The plans that a namespace may still have of a node: a token bucket.

    Attributes:
        full_at: when all of its plans are available again.
        missed: the last plan whose slices a pod of the namespace did not use.
    """

    full_at: float
    missed: int | None = None


@dataclass(slots=True)
class _Missed:
    """How often a pod did not use its slices, and until when it gets no plan."""

    times: int
    until: float


class PlanningOrder:
    """Whose turn it is for a plan, and what plans cost their namespaces. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._served: OrderedDict[str, None] = OrderedDict()  # namespaces, the last one that got a plan at the end
        self._missed: dict[str, _Missed] = {}
        self._budgets: dict[str, dict[str, _Budget]] = {}  # node → namespace

    def sort(self, pods: Iterable[WaitingPod]) -> list[WaitingPod]:
        """Return the pods in the order in which plans are made for them.

        Namespaces take turns; the one for which a plan was made longest ago begins. Within a namespace the oldest pod
        is first, and pods that did not use slices that were made for them are last.
        """
        ranks = {name: i for i, name in enumerate(self._served, 1)}
        pods = sorted(pods, key=lambda pod: (self._times_missed(pod), pod.order))
        return list(by_turns(pods, lambda pod: pod.namespace, lambda name: (ranks.get(name, 0), name)))

    def is_paused(self, pod: WaitingPod) -> bool:
        """Return whether the pod gets no plan for a while, because it did not use its slices."""
        missed = self._missed.get(pod.known.pod.uid)
        return missed is not None and self._clock() < missed.until

    def may_plan(self, pod: WaitingPod, node: str) -> bool:
        """Return whether the namespace of the pod may have a plan of this node now."""
        budget = self._budgets.get(node, {}).get(pod.namespace)
        return budget is None or budget.full_at <= self._clock() + (BURST - 1) * REFILL_SECONDS

    def planned(self, pod: WaitingPod, node: str, *, destroys: bool) -> None:
        """Charge a plan that was made for this pod.

        Args:
            destroys: whether free slices are destroyed for it; otherwise it is free of charge.
        """
        self._served[pod.namespace] = None
        self._served.move_to_end(pod.namespace)
        while len(self._served) > _NAMESPACES_REMEMBERED:
            self._served.popitem(last=False)
        if destroys:
            self._charge(pod.namespace, node, 1)

    def missed(self, pod: WaitingPod, node: str, plan: int) -> None:
        """Charge a plan whose slices the pod did not use, or that was deleted before."""
        now = self._clock()
        self._missed = {uid: row for uid, row in self._missed.items() if now < row.until + LONGEST_PAUSE}
        times = self._times_missed(pod)
        self._missed[pod.known.pod.uid] = _Missed(times + 1, now + min(FIRST_PAUSE * 2**times, LONGEST_PAUSE))
        budget = self._budgets.get(node, {}).get(pod.namespace)
        if budget is None or budget.missed != plan:  # many pods of one plan cost no more than one
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
