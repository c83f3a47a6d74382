"""The pods that a filter was asked about and that have no slices yet."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.gpu_pods import GpuPod
from scheduler.slices.site import wanted_by
from scheduler.state import State

_KEPT_SECONDS = 400.0
"""kube-scheduler asks again about a pod after five minutes at the latest."""
_BINDING_SECONDS = 5.0
"""How long a pod that has passed a filter may take to be bound."""
_UNSEEN_SECONDS = 30.0
"""A call may come before the watch shows its pod; one that never shows is gone."""


class Promise(NamedTuple):
    """A pod is served by this plan of a node, or else looked at anew at `until`."""

    node: str
    plan: int
    until: float


@dataclass(slots=True, eq=False)
class Waiting:
    """A pod, the slices that it wants, and the nodes where it could be. missed: plans of nodes that took too long.

    passed: there are free ones on these nodes, and its binding is expected; else they would have to be cut anew.
    """

    known: GpuPod
    wanted: Mapping[str, int]
    nodes: frozenset[str]
    since: float
    until: float
    passed: bool = False
    seen: bool = False
    promise: Promise | None = None
    missed: set[tuple[str, int | None]] = field(default_factory=set)

    @property
    def order(self) -> tuple[str, str, str]:
        pod = self.known.pod
        return pod.created, pod.key, pod.uid


class WaitingPods:
    """Thread-safe; what it hands out is the planning thread's to change."""

    def __init__(self, state: State, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.Lock()
        self._pods: dict[str, Waiting] = {}

    def put(self, known: GpuPod, recut: Sequence[str], passed: Sequence[str] = ()) -> None:
        """The pod fits on `passed`; where there are none, it would on `recut` if these nodes were cut anew."""
        uid, now, nodes = known.pod.uid, self._clock(), frozenset(passed or recut)
        with self._lock:
            if not nodes or known.ask is None:
                self._pods.pop(uid, None)
                return
            wanted, before = wanted_by(known.ask), self._pods.get(uid)
            until = now + (_BINDING_SECONDS if passed else _KEPT_SECONDS)
            if before is not None and before.wanted == wanted and before.passed == bool(passed):
                before.nodes, before.until = nodes, until
            else:
                self._pods[uid] = Waiting(known, wanted, nodes, now, until, bool(passed))

    def passed(self) -> list[Waiting]:
        """Those that are about to be bound."""
        return [waiting for waiting in self._all() if waiting.passed]

    def all(self) -> list[Waiting]:
        """Those that wait for slices, the oldest pod first."""
        return [waiting for waiting in self._all() if not waiting.passed]

    def _all(self) -> list[Waiting]:
        """The others are forgotten."""
        with self._lock:
            gone = [uid for uid, waiting in self._pods.items() if not self._waits(waiting)]
            for uid in gone:
                del self._pods[uid]
            return sorted(self._pods.values(), key=lambda waiting: waiting.order)

    def _waits(self, waiting: Waiting) -> bool:
        uid, now = waiting.known.pod.uid, self._clock()
        known = self._state.gpu_pod(uid)
        if known is None:
            return not waiting.seen and now < waiting.since + _UNSEEN_SECONDS
        waiting.seen, waiting.known = True, known
        pod = known.pod
        if now >= waiting.until or pod.ended or pod.deleting or self._state.decision(uid) is not None:
            return False
        if known.ask is None or wanted_by(known.ask) != waiting.wanted:
            return False
        return not pod.node or self._state.is_undecided(uid)
