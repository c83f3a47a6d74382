"""Which nodes have the slices that a pod asks for, or could be cut so: for a filter over thousands of nodes."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from mgpu.model.gpu_requests import GpuRequest, Rejection, RejectionKind
from mgpu.settings import Settings
from scheduler.cluster.arrays import UNKNOWN
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.effort_budget import Call
from scheduler.engine.effort import Budget
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.partitioning.partitionable_node import Site, wanted_by
from scheduler.engine.partitioning.slice_choice import answer_of, refusal_of
from scheduler.engine.partitioning.slice_score import site_score

_REFUSALS_KEPT = 10_000
"""Nodes that are alike are refused alike: a refusal takes a plan."""


class Slices:
    """Thread-safe. Writes nothing and waits for nothing."""

    def __init__(self, state: ClusterCache, settings: Settings) -> None:
        self._state, self._settings = state, settings.dialects.slices
        self._lock = threading.Lock()
        self._refusals: OrderedDict[object, NodeFit] = OrderedDict()

    def answers(
        self, known: GpuPod, request: GpuRequest, names: Sequence[str], call: Call, *, scoring: bool = False
    ) -> Iterator[NodeFit]:
        """Answer for each node within the effort of `call`. scoring: with its points, where the pod fits."""
        wanted = wanted_by(request)
        for name, node in zip(names, self._state.nodes(names), strict=True):
            if node is None:
                yield NodeFit(UNKNOWN)
                continue
            unmet = request.unmet(node)
            site = None if unmet else self._state.sites.of(name, known.pod.uid)
            if site is None:
                reason = unmet or f"node {name} has no label for slices"
                yield NodeFit(Rejection(RejectionKind.NODE_LABEL, reason, hopeless=True))
            else:
                answer = answer_of(site, wanted, call.next_budget(), self._refusal)
                fits = scoring and answer.fits
                yield NodeFit(score=site_score(site, wanted, known.pod, self._settings)) if fits else answer

    def _refusal(self, site: Site, wanted: Mapping[str, int], budget: Budget) -> NodeFit:
        key = (site.cards, tuple(sorted(wanted.items())))
        with self._lock:
            answer = self._refusals.get(key)
        if answer is None:
            answer = refusal_of(site, wanted, budget)
            if not answer.proven:
                return answer
            with self._lock:
                self._refusals[key] = answer
                while len(self._refusals) > _REFUSALS_KEPT:
                    self._refusals.popitem(last=False)
        return answer
