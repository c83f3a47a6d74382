"""The pods that a filter was asked about and that have no slices yet."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.engine.partitioning.partitionable_node import wanted_by

_KEPT_SECONDS = 400.0
"""kube-scheduler asks again about a pod after five minutes at the latest."""
_BINDING_SECONDS = 5.0
"""How long a pod that has passed a filter may take to be bound."""
_UNSEEN_SECONDS = 30.0
"""A call may come before the watch shows its pod; one that never shows is gone."""


class Promise(NamedTuple):
    """A pod is served by this plan of a node. until: after that it is served otherwise.

    ready: the plan is in force, and the slices are kept for the pod from other plans until it comes for them.
    """

    node: str
    plan: int
    until: float
    ready: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """A pod, the slices that it wants, and the nodes where it could be. asked: when a filter was last asked about it.

    passed: there are free ones on these nodes, and its binding is expected; else they would have to be cut anew.
    missed: plans of nodes that took too long. blocked: since when no plan could be made for it.
    """

    known: GpuPod
    wanted: Mapping[str, int]
    nodes: frozenset[str]
    since: float
    asked: float
    until: float
    passed: bool = False
    seen: bool = False
    promise: Promise | None = None
    blocked: float | None = None
    missed: set[tuple[str, int | None]] = field(default_factory=set)

    @property
    def order(self) -> tuple[str, str, str]:
        pod = self.known.pod
        return pod.created, pod.key, pod.uid


class WaitingPods:
    """Thread-safe; what it hands out is the planning thread's to change, but for what `put` sets."""

    def __init__(self, state: ClusterCache, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.Lock()
        self._pods: dict[str, Waiting] = {}
        self._left: list[Waiting] = []

    def put(self, known: GpuPod, recut: Sequence[str], passed: Sequence[str] = ()) -> None:
        """The pod fits on `passed`; where there are none, it would on `recut` if these nodes were cut anew."""
        uid, now, nodes = known.pod.uid, self._clock(), frozenset(passed or recut)
        with self._lock:
            before = self._pods.get(uid)
            if known.request is None or (not nodes and (before is None or before.promise is None)):
                self._pods.pop(uid, None)
                return
            wanted = wanted_by(known.request)
            if before is None or before.wanted != wanted:
                before = self._pods[uid] = Waiting(known, wanted, nodes, now, now, now)
            before.nodes, before.passed, before.asked = nodes, bool(passed), now
            before.until = now + (_BINDING_SECONDS if passed else _KEPT_SECONDS)

    def __bool__(self) -> bool:
        return bool(self._pods)

    def look(self) -> tuple[list[Waiting], list[Waiting]]:
        """Return the pods that there are, the oldest first, and those for which a plan was made and that went before
        they were bound. The latter are returned once.
        """
        with self._lock:
            left = []
            for uid in [uid for uid, waiting in self._pods.items() if not self._waits(waiting)]:
                waiting = self._pods.pop(uid)
                if waiting.promise and not self._has_come(uid, self._state.gpu_pod(uid)):
                    left.append(waiting)
            return sorted(self._pods.values(), key=lambda waiting: waiting.order), left

    def drop(self, waiting: Waiting, asked: float) -> None:
        """Forget a pod, unless a filter was asked about it after `asked`."""
        with self._lock:
            if waiting.asked <= asked:
                self._pods.pop(waiting.known.pod.uid, None)

    def _has_come(self, uid: str, known: GpuPod | None) -> bool:
        """Whether a pod has its slices, or a decision gives them to it."""
        bound = known is not None and known.pod.node and not self._state.is_undecided(uid)
        return bool(bound) or self._state.reservation(uid) is not None

    def _waits(self, waiting: Waiting) -> bool:
        uid, now = waiting.known.pod.uid, self._clock()
        known = self._state.gpu_pod(uid)
        if known is None:
            return not waiting.seen and now < waiting.since + _UNSEEN_SECONDS
        waiting.seen, waiting.known = True, known
        pod = known.pod
        if pod.ended or pod.deleting or self._has_come(uid, known):
            return False
        if known.request is None or wanted_by(known.request) != waiting.wanted:
            return False
        return waiting.promise is not None or now < waiting.until
