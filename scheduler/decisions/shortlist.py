"""Chooses which of the nodes on which a pod fits the filter names to kube-scheduler: those with the best scores.

`api.extender` has a `Shortlists`. kube-scheduler scores every node that the extender names, and sends the names for
`prioritize`, which costs several times as much as mgpu's own decision. Without an extender it also chooses among a
sample only: in a large cluster it stops looking once 100 nodes or a few percent fit (schedule_one.go,
numFeasibleNodesToFind). The shortlist has the best nodes for the cards instead of the first ones.

A pod with preferences of its own gets all nodes, because the node that it prefers may have a bad score.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.model.raw_objects import table_at
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.effort_budgets import CallerGone
from scheduler.decisions.filter import Filter, Filtered

_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_MAX_PODS = 64
_REMEMBERED_SECONDS = 1.0
"""How long scores are remembered. kube-scheduler calls `prioritize` within milliseconds after `filter`."""


class _Scored(NamedTuple):
    names: list[str]
    scores: list[int]
    until: float


class Shortlists:
    """Chooses nodes by their scores, and remembers the scores for the call of `prioritize` that follows. Thread-safe.

    Args:
        most: The most nodes of a shortlist; 0 for all.
    """

    def __init__(self, nodes: Filter, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._filter = nodes
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._scored: OrderedDict[str, _Scored] = OrderedDict()

    def choose(self, gpu_pod: GpuPod, raw: Mapping[str, Any], found: Filtered, gone: CallerGone) -> list[str]:
        """Return the nodes to name of those on which the pod fits. The errors are those of `Filter.scores`."""
        passed = found.passed
        if not self._most or len(passed) <= self._most or has_preferences(raw):
            return passed
        scores = self._filter.scores_of_passed(gpu_pod, found, gone)
        at = best(scores, self._most)
        names = [passed[i] for i in at]
        with self._lock:
            self._scored[gpu_pod.pod.uid] = _Scored(names, [scores[i] for i in at], self._clock() + _REMEMBERED_SECONDS)
            self._scored.move_to_end(gpu_pod.pod.uid)
            if len(self._scored) > _MAX_PODS:
                self._scored.popitem(last=False)
        return names

    def scores(self, gpu_pod: GpuPod, names: list[str], gone: CallerGone) -> list[int]:
        """Return what `Filter.scores` does, or has just returned for these nodes."""
        with self._lock:
            scored = self._scored.pop(gpu_pod.pod.uid, None)
        if scored is not None and scored.names == names and self._clock() < scored.until:
            return scored.scores
        return self._filter.scores(gpu_pod, names, gone)


def has_preferences(raw: Mapping[str, Any]) -> bool:
    """Return whether a pod prefers some nodes to others: by affinity, or by a soft topology spread constraint."""
    affinity = table_at(raw, "spec", "affinity")
    if any(table_at(affinity, kind).get(_PREFERRED) for kind in _AFFINITIES):
        return True
    constraints = table_at(raw, "spec").get("topologySpreadConstraints")
    return any(_is_soft(constraint) for constraint in constraints) if isinstance(constraints, list) else False


def _is_soft(constraint: object) -> bool:
    return isinstance(constraint, dict) and constraint.get("whenUnsatisfiable") == "ScheduleAnyway"


def best(scores: Sequence[int], count: int) -> list[int]:
    """Return the positions of the `count` highest scores, ascending. Of equal scores the first are chosen."""
    order = np.argsort(-np.array(scores, np.int64), kind="stable")
    return sorted(order[:count].tolist())
