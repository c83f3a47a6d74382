"""Evaluates nodes for requests for slices: which have the slices free, and which can be partitioned for the request.

`decisions.filter` calls it instead of evaluating arrays. A search finds out whether a node can be partitioned for a
pod, and nodes with equal cards share the result.
"""

from collections.abc import Iterator, Mapping, Sequence

from mgpu.model.gpu_requests import GpuRequest, Rejection, RejectionKind
from mgpu.model.ledger import Holding
from mgpu.settings import Settings
from scheduler.cluster.arrays import UNKNOWN
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.effort_budgets import Call
from scheduler.engine.effort import Budget
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, requested_slices
from scheduler.engine.partitioning.slice_choice import assess_slices, rejection_of_slices
from scheduler.engine.partitioning.slice_scores import score_for_slices

_MAX_REJECTIONS = 10_000
"""The maximum number of cached answers; at this number, all are dropped. Only proven answers are cached."""


class SliceFilter:
    """Evaluates nodes for requests for slices. Thread-safe."""

    def __init__(self, state: ClusterCache, settings: Settings) -> None:
        self._cache = state
        self._settings = settings.dialects.slices
        self._rejections: dict[object, NodeFit] = {}

    def answers(
        self,
        gpu_pod: GpuPod,
        request: GpuRequest,
        names: Sequence[str],
        call: Call,
        beside: Sequence[Holding] = (),
        *,
        scoring: bool = False,
    ) -> Iterator[NodeFit]:
        """Yield the answer for each node, within the budget of `call`.

        Args:
            beside: What other pods hold tentatively. It counts as held.
            scoring: Whether to score the nodes on which the pod fits.
        """
        slices = requested_slices(request)
        for name, node in zip(names, self._cache.nodes(names), strict=True):
            if node is None:
                yield NodeFit(UNKNOWN)
                continue
            unmet = request.unmet_requirement(node)
            target = None if unmet else self._cache.partitions.get(name, gpu_pod.pod.uid, beside=beside)
            if target is None:
                reason = unmet or f"node {name} has no label for slices"
                yield NodeFit(Rejection(RejectionKind.NODE_LABEL, reason, hopeless=True))
            else:
                answer = assess_slices(target, slices, call.next_budget(), self._rejection)
                fits = scoring and answer.fits
                yield NodeFit(score=score_for_slices(target, slices, gpu_pod.pod, self._settings)) if fits else answer

    def _rejection(self, target: PartitionableNode, slices: Mapping[str, int], budget: Budget) -> NodeFit:
        """Return the answer for a node that does not have the slices free now.

        The answer says whether the node's cards can be partitioned so that it has them.
        """
        key = (target.cards, tuple(sorted(slices.items())))
        answer = self._rejections.get(key)
        if answer is None:
            answer = rejection_of_slices(target, slices, budget)
            if answer.proven:
                # No lock is needed, because two threads that store the same answer do no harm.
                if len(self._rejections) >= _MAX_REJECTIONS:
                    self._rejections.clear()
                self._rejections[key] = answer
        return answer
