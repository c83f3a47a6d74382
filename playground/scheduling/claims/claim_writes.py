"""Writes the allocation and the consumers of ResourceClaims to the API server.

Source: pkg/scheduler/framework/plugins/dynamicresources in Kubernetes.
"""

import time
from collections.abc import Mapping
from typing import Any

from mgpu.kube import Api, ApiError
from playground.scheduling.claims.claim_store import allocated

Raw = Mapping[str, Any]
FINALIZER = "resource.kubernetes.io/delete-protection"
_ROOT = "/apis/resource.k8s.io/v1"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_TRIES = 5
_PAUSE_SECONDS = 0.01


class BindError(Exception):
    """A claim cannot be written for the pod. The text is the reason."""


def path_of(claim: Raw) -> str:
    meta = claim["metadata"]
    return f"{_ROOT}/namespaces/{meta['namespace']}/resourceclaims/{meta['name']}"


def reserve(api: Api, claim: Raw, pod: Raw, allocation: Raw | None) -> dict[str, Any]:
    """Make a pod a consumer of a claim, and write the allocation if there is one. Return the claim as it was stored.

    A write that is refused with a 409 is tried up to five times. The result may have another allocation, because
    webhooks can replace it.

    Raises:
        BindError: The claim was deleted, or allocated by someone else.
        ApiError: The API server refuses the claim.
        Unreachable: There is no answer.
    """
    for i in range(_TRIES):
        try:
            return _write(api, api.get(path_of(claim)) if i else claim, pod, allocation)
        except ApiError as error:
            if error.status != 409 or i == _TRIES - 1:
                raise
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


def _write(api: Api, claim: Raw, pod: Raw, allocation: Raw | None) -> dict[str, Any]:
    meta = claim["metadata"]
    if "deletionTimestamp" in meta:
        raise BindError(f"claim {meta['name']} got deleted in the meantime")
    if allocation is not None:
        if allocated(claim):
            raise BindError(f"claim {meta['name']} got allocated elsewhere in the meantime")
        finalizers = meta.get("finalizers") or []
        if FINALIZER not in finalizers:
            claim = api.replace(path_of(claim), {**claim, "metadata": {**meta, "finalizers": [*finalizers, FINALIZER]}})
    status = dict(claim.get("status") or {}) | ({} if allocation is None else {"allocation": allocation})
    consumer = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    status["reservedFor"] = [*(status.get("reservedFor") or []), consumer]
    return api.replace(f"{path_of(claim)}/status", {**claim, "status": status})


def release(api: Api, claim: Raw, pod: Raw) -> dict[str, Any]:
    """Remove a pod from the consumers of a claim. Raises ApiError and Unreachable."""
    consumers = [{"$patch": "delete", "uid": pod["metadata"]["uid"]}]
    body = {"metadata": {"uid": claim["metadata"]["uid"]}, "status": {"reservedFor": consumers}}
    return api.patch(f"{path_of(claim)}/status", body, _STRATEGIC_PATCH)


def deallocate(api: Api, claim: Raw) -> None:
    """Remove the allocation and the consumers of a claim. Raises ApiError and Unreachable."""
    kept = {k: v for k, v in (claim.get("status") or {}).items() if k not in ("allocation", "reservedFor")}
    api.replace(f"{path_of(claim)}/status", {**claim, "status": kept})


def delete(api: Api, claim: Raw) -> None:
    """Delete a claim that the loop has created, with its finalizer. Raises ApiError and Unreachable."""
    for i in range(_TRIES):
        try:
            current = api.get(path_of(claim))
            kept = [name for name in current["metadata"].get("finalizers") or [] if name != FINALIZER]
            api.replace(path_of(claim), {**current, "metadata": {**current["metadata"], "finalizers": kept}})
            api.delete(path_of(claim))
        except ApiError as error:
            if error.status == 404:
                return
            if error.status != 409 or i == _TRIES - 1:
                raise
        else:
            return


def create_extended(api: Api, claim: Raw) -> dict[str, Any]:
    """Create the claim for the extended resources of a pod. Raises ApiError and Unreachable."""
    meta = {key: value for key, value in claim["metadata"].items() if key not in ("name", "uid")}
    return api.create(f"{_ROOT}/namespaces/{meta['namespace']}/resourceclaims", {**claim, "metadata": meta})


def write_extended_status(api: Api, pod: Raw, claim: Raw, mappings: list[dict[str, str]]) -> None:
    """Write to the status of a pod which claim serves its extended resources. Raises ApiError and Unreachable."""
    meta = pod["metadata"]
    status = {
        "extendedResourceClaimStatus": {"requestMappings": mappings, "resourceClaimName": claim["metadata"]["name"]}
    }
    body = {"metadata": {"uid": meta["uid"]}, "status": status}
    api.patch(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status", body, _STRATEGIC_PATCH)
