"""Tells which ResourceClaims a pod uses, and which requests of them each container uses.

The functions have no side effects. They follow `k8s.io/dynamic-resource-allocation/resourceclaim` and the kubelet's
pkg/kubelet/cm/dra. `claim_manager`, `device_manager` and `kubelet` call them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Raw = Mapping[str, Any]

ALL_REQUESTS = ""
"""The name of a request that stands for all requests of a claim, as in `resources.claims` without `request`."""


class ClaimError(Exception):
    """A claim of a pod cannot be used. The message reads like that of the real kubelet, which is written in Go."""


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """A claim that a pod uses.

    Attributes:
        entry: The name of the entry in the pod's `spec.resourceClaims`, or "" for the claim that kube-scheduler has
            created for extended resources.
        claim: The name of the ResourceClaim.
        generated: Whether the claim was made from a template, so that the pod must be its owner.
    """

    entry: str
    claim: str
    generated: bool = False


def has_claims(pod: Raw) -> bool:
    """Return whether the pod uses or may use claims."""
    return bool(pod["spec"].get("resourceClaims") or _extended(pod))


def claims_of(pod: Raw) -> list[ClaimUse]:
    """Return the claims that the pod uses. An entry for which no claim is needed is left out.

    Raises ClaimError if the claim for a template has not been created yet.
    """
    found = [use for entry in pod["spec"].get("resourceClaims") or () if (use := _use(pod, entry))]
    extended = _extended(pod)
    return [*found, ClaimUse("", extended["resourceClaimName"])] if extended else found


def requests_of_container(pod: Raw, container: Raw) -> list[tuple[str, str]]:
    """Return the claims and the requests whose devices the container gets, each as names.

    The request `ALL_REQUESTS` stands for all requests of a claim. Raises ClaimError like `claims_of`.
    """
    wanted: dict[str, list[str]] = {}
    for row in (container.get("resources") or {}).get("claims") or ():
        wanted.setdefault(row["name"], []).append(row.get("request") or ALL_REQUESTS)
    uses = [use for e in pod["spec"].get("resourceClaims") or () if e["name"] in wanted and (use := _use(pod, e))]
    pairs = [(use.claim, request) for use in uses for request in wanted[use.entry]]
    extended = _extended(pod)
    amounts = (container.get("resources") or {}).get("requests") or {}
    mapped = [
        row["requestName"]
        for row in extended.get("requestMappings") or ()
        if row["containerName"] == container["name"] and str(amounts.get(row["resourceName"], "0")) != "0"
    ]
    return [*pairs, *((extended["resourceClaimName"], request) for request in mapped)]


def listed_claims(pod: Raw, container: Raw) -> list[str]:
    """Return the names of the claims that PodResources lists for the container. Raises ClaimError like `claims_of`."""
    own = {row["name"] for row in (container.get("resources") or {}).get("claims") or ()}
    uses = [use for e in pod["spec"].get("resourceClaims") or () if e["name"] in own and (use := _use(pod, e))]
    names = [use.claim for use in uses]
    return [*names, _extended(pod)["resourceClaimName"]] if backed_resources(pod, container["name"]) else names


def backed_resources(pod: Raw, container: str) -> set[str]:
    """Return the extended resources of a container whose devices come from a claim, and not from a device plugin."""
    rows = _extended(pod).get("requestMappings") or ()
    return {row["resourceName"] for row in rows if row["containerName"] == container}


def without_backed_resources(pod: Raw) -> Raw:
    """Return the pod without the requests that claims serve, so that they do not count on the node's resources."""
    if not _extended(pod):
        return pod
    kinds = ("initContainers", "containers")
    spec = {kind: list(_unbacked(pod, kind)) for kind in kinds if pod["spec"].get(kind)}
    return {**pod, "spec": {**pod["spec"], **spec}}


def _unbacked(pod: Raw, kind: str) -> Iterator[Raw]:
    for container in pod["spec"][kind]:
        backed = backed_resources(pod, container["name"])
        resources = {
            field: {name: amount for name, amount in (amounts or {}).items() if name not in backed}
            for field, amounts in (container.get("resources") or {}).items()
            if field in ("requests", "limits")
        }
        yield {**container, "resources": {**(container.get("resources") or {}), **resources}}


def check_use(pod: Raw, use: ClaimUse, claim: Raw) -> None:
    """Raise ClaimError unless the claim is reserved for the pod, and made for it if it comes from a template."""
    meta = pod["metadata"]
    if use.generated and not _controls(meta["uid"], claim):
        raise ClaimError(
            f"ResourceClaim {meta['namespace']}/{use.claim} was not created for Pod "
            f"{meta['namespace']}/{meta['name']} (Pod is not owner)"
        )
    reserved = {consumer["uid"] for consumer in (claim.get("status") or {}).get("reservedFor") or ()}
    if meta["uid"] not in reserved:
        raise ClaimError(
            f"pod {meta['name']} ({meta['uid']}) is not allowed to use ResourceClaim {use.claim} "
            f"({claim['metadata']['uid']})"
        )


def _use(pod: Raw, entry: Raw) -> ClaimUse | None:
    """Return the claim of an entry in `spec.resourceClaims`, or None if the entry needs none."""
    if entry.get("resourceClaimName"):
        return ClaimUse(entry["name"], entry["resourceClaimName"])
    for row in (pod.get("status") or {}).get("resourceClaimStatuses") or ():
        if row["name"] == entry["name"]:
            name = row.get("resourceClaimName")
            return ClaimUse(entry["name"], name, generated=True) if name else None
    meta = pod["metadata"]
    raise ClaimError(f'pod "{meta["namespace"]}/{meta["name"]}": ResourceClaim not created yet')


def _extended(pod: Raw) -> Raw:
    """Return the status of the claim for extended resources, or {} if the pod has none."""
    return (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}


def _controls(uid: str, claim: Raw) -> bool:
    owners = claim["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid and owner.get("controller") for owner in owners)
