"""Tells which cards the containers of a pod hold through ResourceClaims.

`playground.samples` calls the functions, which have no side effects.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share
from mgpu.model.resource_claims import DRA, Claim, claim_holding, requests_before_allocation
from playground.kubelet.pod_claims import ALL_REQUESTS, requests_of_container

Raw = Mapping[str, Any]


def request_of(claims: Sequence[Claim]) -> GpuRequest:
    """Return what these claims request together. Its "containers" are the requests of the claims."""
    requests = [requests_before_allocation(claim, [request.name for request in claim.requests]) for claim in claims]
    return GpuRequest(DRA, tuple(container for request in requests for container in request.containers))


def shares_of_containers(pod: Raw, claims: Sequence[Claim]) -> tuple[Share, ...]:
    """Return what each container of a pod may use of the cards of the pod's claims. The shares name the container.

    Args:
        pod: The pod, whose status names the claims that were created from templates.
        claims: These claims, which are allocated.
    """
    spec = pod["spec"]
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    return tuple(share for container in containers for share in _shares_of(pod, container, claims))


def _shares_of(pod: Raw, container: Raw, claims: Sequence[Claim]) -> Iterator[Share]:
    by_name = {claim.name: claim for claim in claims}
    for name, request in requests_of_container(pod, container):
        holding = claim_holding(by_name[name])
        for share in holding.shares if holding else ():
            if request in (ALL_REQUESTS, share.container.partition("/")[0]):
                yield replace(share, container=container["name"])
