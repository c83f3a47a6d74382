"""Tries a pod on nodes: whether it fits there by kube-scheduler's rules and by its cards, and how good the node is.

`pipeline` calls `NodeTrials`. Nothing stays placed, except that a node may be partitioned for the pod.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import vocabulary_of
from mgpu.model.compute_resources import allocatable
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.pods import Pod
from mgpu.model.resource_claims import DRA
from mgpu.settings import Settings
from playground import fit
from playground.simulate.claim_trials import Allocation
from playground.simulate.documents import Raw
from playground.simulate.outcomes import Outcome
from playground.simulate.simulated_claims import PodClaims, SimulatedClaims
from playground.simulate.simulated_cluster import SimulatedCluster
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid
from scheduler.decisions.scores import Ranking
from scheduler.engine import nvidia_plugin
from scheduler.engine.node_assessment import Foresight, assess, score

_OPTIONAL = ("cpu", "memory", "ephemeral-storage", "pods")  # a Node in a file may omit them


@dataclass(frozen=True, slots=True)
class Fit:
    """How a pod fits a node.

    Attributes:
        placement: The cards that it gets by its own request, or None if it requests none.
        claims: Its claims on this node.
        allocations: The allocations of those that have none yet.
    """

    placement: Placement | None
    claims: PodClaims
    allocations: Sequence[Allocation]


class NodeTrials:
    """The trials of one simulation."""

    def __init__(self, cluster: SimulatedCluster, claims: SimulatedClaims, settings: Settings) -> None:
        self._cluster = cluster
        self._claims = claims
        self._settings = settings
        self._ranking = Ranking(cluster, settings)

    def refresh(self) -> None:
        """Score all nodes again, because the expectation of future pods has changed."""
        self._ranking.refresh()

    def filter(self, outcome: Outcome, raw: Raw, request: GpuRequest | None, claims: PodClaims) -> dict[str, Fit]:
        """Return how the pod fits each node that it fits, by the name of the node.

        The reasons why the pod does not fit the other nodes are stored in the outcome. If the pod fits no node, one
        node is partitioned for it, provided that it then fits this node.
        """
        fits: dict[str, Fit] = {}
        tried: list[str] = []
        for name, node in self._cluster.raw.items():
            reasons = fit.fits(raw, node, self._cluster.used[name], counted(node))
            if reasons:
                outcome.rejections[name] = ", ".join(reasons)
                continue
            if request is None and outcome.dialect not in (None, DRA):
                outcome.rejections[name] = f"no node serves {outcome.dialect} pods"
                continue
            tried.append(name)
            self._try(outcome, raw, request, claims, name, fits)
        if request is not None and not fits:
            node_name = self._cluster.partition_for(outcome.pod, request, tried)
            if node_name:
                self._try(outcome, raw, request, claims, node_name, fits)
        ranked = GpuPod(outcome.pod, request or claims.request())
        points = self._ranking.points(ranked, list(fits))
        if points is not None:
            outcome.scores = dict(zip(fits, points, strict=True))
        return fits

    def _try(
        self,
        outcome: Outcome,
        raw: Raw,
        request: GpuRequest | None,
        claims: PodClaims,
        name: str,
        fits: dict[str, Fit],
    ) -> None:
        """Assess one node. Store how the pod fits there and the node's score, or the reason why it does not fit."""
        outcome.rejections.pop(name, None)
        if nvidia_plugin.needs_claim(self._cluster.nodes[name], request):
            claims = self._claims.with_whole_cards(outcome.pod, raw, claims)
            request = None
        allocations = claims.missing or self._claims.allocate(outcome.pod, claims, name)
        if not isinstance(allocations, list):
            outcome.rejections[name] = str(allocations)
            return
        if request is None:
            fits[name] = Fit(None, claims, allocations)
            points = self._claims.score(allocations, self._cluster.devices(name))
            if points is not None:
                outcome.scores[name] = points
            return
        self._claims.hold(allocations)
        found = self.assess(outcome.pod, request, name)
        self._claims.release(allocations)
        if isinstance(found, Rejection):
            outcome.rejections[name] = str(found)
            return
        fits[name] = Fit(found, claims, allocations)
        points = self._cluster.slices_score(outcome.pod, request, name)
        if points is None:
            devices = self._cluster.devices(name, "", occupied_gpuid(outcome.pod, name))
            points = score(request, found, devices, self._settings)
        outcome.scores[name] = points

    def assess(self, pod: Pod, request: GpuRequest, node: str) -> Placement | Rejection:
        """Return the best placement of the pod on the node, or why the pod does not fit there."""
        gpuid = occupied_gpuid(pod, node)
        snapshot = self._cluster.node_snapshot(node, pod.uid)
        group_cards = self._cluster.group_cards(request, pod.uid)
        known, devices = self._cluster.nodes[node], self._cluster.devices(node, pod.uid, gpuid)
        if nvidia_plugin.chooses_cards(known, request):
            ours = nvidia_plugin.indexes_used_by_mgpu(self._cluster.ledger, node, pod.uid, gpuid)
            rejection = nvidia_plugin.rejection(request, known, snapshot.cards, ours)
            # The placement is one of those that NVIDIA's plugin may choose.
            return rejection or assess(request, known, devices, self._settings)
        refusal = request.unmet_requirement(known) is None and self._cluster.slices_refusal(pod, request, node)
        if refusal:
            return refusal
        foresight = Foresight(self._cluster.forecast.judges, snapshot.free_resources, pod.cpu_memory)
        return assess(request, known, devices, self._settings, foresight, group_cards=group_cards)


def counted(node: Raw) -> Callable[[str], bool]:
    """Return a predicate that tells whether `fit` must check the amount of a resource on the node.

    GPU resources are not checked, because mgpu's own filter does that. The resources of `_OPTIONAL` are checked if the
    Node states an amount of them.
    """
    there = allocatable(node)
    return lambda name: name != SHARE and vocabulary_of(name) is None and (name in there or name not in _OPTIONAL)
