"""Builders of AdmissionReviews, and readers of their answers."""

import base64
from typing import Any

import jsonpatch
import orjson


def review(obj: Any, operation: str = "CREATE", **over: Any) -> dict[str, Any]:
    """Return a review of a pod. Keywords: `old`, `user`, `subresource`, and any field of the request."""
    old, user, subresource = over.pop("old", None), over.pop("user", "alice"), over.pop("subresource", "")
    request = {
        "uid": "review-1",
        "operation": operation,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "default",
        "name": "p",
        "userInfo": {"username": user, "groups": ["system:authenticated"]},
        "dryRun": False,
        "object": obj,
        **({"subResource": subresource} if subresource else {}),
        **({"oldObject": old} if old is not None else {}),
        **over,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def patch_of(answer: Any) -> list[dict[str, Any]]:
    """Return the JSON Patch in an answer, or []."""
    response = answer["response"]
    return orjson.loads(base64.b64decode(response["patch"])) if "patch" in response else []


def patched(raw: dict[str, Any], patch: Any) -> dict[str, Any]:
    """Return a copy of `raw` with the patch applied."""
    result: dict[str, Any] = jsonpatch.apply_patch(raw, list(patch))
    return result
