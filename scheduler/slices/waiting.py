"""The pods for which a filter found no free slices, until they have some."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.gpu_pods import GpuPod
from scheduler.slices.site import wanted_by
from scheduler.state import State

_KEPT_SECONDS = 400.0
"""kube-scheduler asks again about a pod after five minutes at the latest."""
_UNSEEN_SECONDS = 30.0
"""A call may come before the watch shows its pod; one that never shows is gone."""


class Promise(NamedTuple):
    """A pod is served by this plan of a node, or else looked at anew at `until`."""

    node: str
    plan: int
    until: float


@dataclass(slots=True, eq=False)
class Waiting:
    """A pod, the slices that it wants, and the nodes where it could be. missed: plans of nodes that took too long."""

    known: GpuPod
    wanted: Mapping[str, int]
    nodes: frozenset[str]
    since: float
    until: float
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

    def put(self, known: GpuPod, nodes: Sequence[str]) -> None:
        """The pod would fit on these nodes if they were cut anew. None: it needs nothing (any more)."""
        uid, now = known.pod.uid, self._clock()
        with self._lock:
            if not nodes or known.ask is None:
                self._pods.pop(uid, None)
                return
            wanted, before = wanted_by(known.ask), self._pods.get(uid)
            if before is not None and before.wanted == wanted:
                before.nodes, before.until = frozenset(nodes), now + _KEPT_SECONDS
            else:
                self._pods[uid] = Waiting(known, wanted, frozenset(nodes), now, now + _KEPT_SECONDS)

    def all(self) -> list[Waiting]:
        """Those that still wait, the oldest pod first; the others are forgotten."""
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
