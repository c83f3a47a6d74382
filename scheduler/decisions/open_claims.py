"""Reads what pods request through open ResourceClaims, those that are not allocated yet, so that nodes can be rated.

kube-scheduler calls its extender only for pods that name a managed resource. mgpu's webhook adds the resource
`mgpu.io/claims` with the amount 0 to pods with claims (`webhook.claim_mark`), which nothing else notices. So
kube-scheduler asks mgpu for the nodes of these pods, too, and the node is chosen by the ledger and by the node policy
and not by the order of kube-scheduler's own allocator. The claims of the pod then count like the containers of another
pod. A claim that is allocated already fixes the node, and kube-scheduler itself takes that into account.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import read_pod
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import DRA, Claim, DeviceRequest, base_request, requests_before_allocation
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.claim_pods import claim_names
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.claim_decider import ClaimDecider

_MOST_SETS = 64
"""The most combinations of alternatives of one claim that are tried."""


class OpenClaims:
    """Reads the open claims of pods. Thread-safe."""

    def __init__(self, state: ClusterCache, decider: ClaimDecider) -> None:
        self._state = state
        self._decider = decider

    def read(self, raw: Mapping[str, Any]) -> GpuPod | None:
        """Return the pod with the request of its open claims; None if it has none that mgpu's driver may serve.

        The containers of the request are named after claims and their requests. Of alternatives (`firstAvailable`) the
        least amounts count, because kube-scheduler may choose any of them: if the first one counted, a pod would wait
        for it although another one fits. Selectors are not considered: kube-scheduler has evaluated them for the nodes
        of its call.
        """
        names = claim_names(raw)
        if not names:
            return None
        namespace = str(table_at(raw, "metadata").get("namespace", ""))
        claims = [claim for name in names if (claim := self._state.claims.named(namespace, name)) is not None]
        requests = [request for claim in claims if not claim.allocated for request in self._requests(claim)]
        if not requests:
            return None
        containers = tuple(container for request in requests for container in request.containers)
        return GpuPod(read_pod(raw), GpuRequest(DRA, containers, constraints=requests[0].constraints))

    def _requests(self, claim: Claim) -> Iterator[GpuRequest]:
        of_cards = (request for request in claim.requests if self._decider.is_for_cards(request) and not request.admin)
        least = tuple(map(_least, alternatives(of_cards)))
        found = requests_before_allocation(replace(claim, requests=least), [request.name for request in least])
        if found.containers:
            named = (replace(one, container=f"{claim.name}/{one.container}") for one in found.containers)
            yield replace(found, containers=tuple(named))


def alternatives(requests: Iterable[DeviceRequest]) -> list[list[DeviceRequest]]:
    """Return the alternatives of each request of a claim in their order; one for a request without `firstAvailable`."""
    found: dict[str, list[DeviceRequest]] = {}
    for request in requests:
        found.setdefault(base_request(request.name), []).append(request)
    return list(found.values())


def sets_of_alternatives(requests: Iterable[DeviceRequest]) -> list[frozenset[str]]:
    """Return sets of names of requests, each with one alternative of each request. One of them must fit.

    kube-scheduler tries every combination. That would be too many here, where each costs a search on each node: 32
    requests may have 8 alternatives each. So only the first `_MOST_SETS` are returned, in kube-scheduler's order. A
    claim that fits only by a later combination counts as one that does not fit.
    """
    rows = [[one.name for one in row] for row in alternatives(requests)]
    return [frozenset(names) for names in islice(product(*rows), _MOST_SETS)] if rows else []


def _least(found: Sequence[DeviceRequest]) -> DeviceRequest:
    """Return a request that every node passes on which one of these alternatives fits.

    An amount that an alternative does not state is all of the card.
    """
    cores = [one.core for one in found if one.core is not None]
    memory = [one.memory for one in found if one.memory is not None]
    return replace(
        found[0],
        count=min(max(1, one.count) for one in found),
        core=min(cores, default=None),
        memory=min(memory, default=None),
    )
