"""Filters and scores nodes for open ResourceClaims for MIG instances, for kube-scheduler's extender calls.

kube-scheduler itself counts which instances fit together on each node. It does not know about reservations of claims
that are being allocated, nor about annotations of claims, and it compares no nodes: any node on which the claims fit is
as good for it as any other. So its pods with small instances would start to partition one card after the other, until
none is left for a large instance. `Extender` asks this module after the filter for cards.

A node is the better, the fewer instances can no longer be created there once the pod has its own. That is the measure
by which `engine.mig_placement` chooses among the cards of a node.

A search on a node takes some milliseconds, and a call may name thousands of nodes. Users choose how many claims a pod
has, how many alternatives these have, and how long their selectors take: 32 claims with 32 requests of eight
alternatives took a minute for a single node, while kube-scheduler waits and schedules no pod at all. So a call examines
nodes for a limited time, which all claims, alternatives and selectors share. A node that is not examined completely
passes, with 0 points: kube-scheduler is right about most of them, and the admission decides.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from mgpu.model.gpu_requests import Rejection
from mgpu.model.resource_claims import Claim
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.claim_pods import claim_names
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.claim_selectors import Patience
from scheduler.decisions.effort_budgets import EffortExceeded
from scheduler.decisions.open_claims import sets_of_alternatives
from scheduler.engine.node_fit import HIGHEST

_CALL_SECONDS = 0.1
"""The CPU time after which a call examines nothing more. It is exceeded by at most one search."""


class _Effort:
    """The time of one call.

    Attributes:
        patience: The time that is left for selectors.
    """

    def __init__(self, cpu_clock: Callable[[], float]) -> None:
        self._cpu_clock = cpu_clock
        self._end = cpu_clock() + _CALL_SECONDS
        self.patience = Patience(_CALL_SECONDS)

    @property
    def is_over(self) -> bool:
        return self._cpu_clock() > self._end


class InstanceFilter:
    """Rates nodes for claims for MIG instances. Thread-safe.

    Args:
        cpu_clock: Returns the CPU time of the thread.
    """

    def __init__(
        self, state: ClusterCache, decider: ClaimDecider, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._state = state
        self._decider = decider
        self._cpu_clock = cpu_clock

    def claims_of(self, raw: Mapping[str, object]) -> tuple[Claim, ...]:
        """Return the claims of a pod that have no allocation and request MIG instances."""
        metadata = raw.get("metadata")
        namespace = str(metadata.get("namespace") or "") if isinstance(metadata, Mapping) else ""
        claims = (self._state.claims.named(namespace, name) for name in claim_names(raw))
        return tuple(claim for claim in claims if claim is not None and not claim.allocated and self._concerns(claim))

    def _concerns(self, claim: Claim) -> bool:
        by_class = {request.device_class: request for request in claim.requests if not request.admin}
        return any(self._decider.is_for_instances(request) for request in by_class.values())

    def rejections(self, claims: Sequence[Claim], names: Sequence[str]) -> dict[str, Rejection]:
        """Return which of these nodes have no instances for one of the claims, each with the reason."""
        answers = self._answers(claims, names)
        return {name: answer.summary() for name, answer in answers if isinstance(answer, Rejection)}

    def scores(self, claims: Sequence[Claim], names: Sequence[str]) -> list[int]:
        """Return a score from 0 to 10 for each node: 10 where the claims leave the most choice, and 0 where the least.

        If all nodes are equal, all of them have 10.
        """
        costs = {name: answer for name, answer in self._answers(claims, names) if isinstance(answer, int)}
        if not costs:
            return [0] * len(names)
        least = min(costs.values())
        range_ = max(costs.values()) - least
        points = {name: HIGHEST - HIGHEST * (cost - least) // max(1, range_) for name, cost in costs.items()}
        return [points.get(name, 0) for name in names]

    def _answers(self, claims: Sequence[Claim], names: Sequence[str]) -> Iterator[tuple[str, Rejection | int]]:
        """Yield for each node what the claims cost there, or why one of them does not fit, until the time is over."""
        effort = _Effort(self._cpu_clock)
        for name in names:
            found: list[Rejection | int | None] = []
            for claim in claims:
                if effort.is_over:
                    return
                found.append(self._answer(claim, self._state.node_snapshot(name, claim.uid), effort))
            rejection = next((one for one in found if isinstance(one, Rejection)), None)
            if rejection is not None:
                yield name, rejection
            elif None not in found:
                yield name, sum(one for one in found if isinstance(one, int))

    def _answer(self, claim: Claim, snapshot: NodeSnapshot, effort: _Effort) -> Rejection | int | None:
        """Return what a claim costs on a node, or why it does not fit; None if that was not found out.

        The first alternative that fits counts, as for kube-scheduler.
        """
        first: Rejection | None = None
        if snapshot.node is None:
            return None
        for names in sets_of_alternatives(request for request in claim.requests if not request.admin):
            if effort.is_over:
                return None
            try:
                rejection = self._decider.assess(claim, names, snapshot, effort.patience)
                if rejection is None:
                    return self._decider.cost_of_instances(claim, names, snapshot, effort.patience)
            except EffortExceeded:
                return None
            if not rejection.proven:
                return None
            first = first or rejection
        return first
