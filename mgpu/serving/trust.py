"""What the API server must know of a process that serves it: the CA bundle in its webhook configurations."""

import base64
from collections.abc import Mapping
from typing import Any, Protocol

from mgpu.serving.review import pointer
from mgpu.version import VERSION, own_version

JSON_PATCH = "application/json-patch+json"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"


class Api(Protocol):
    """The part of `mgpu.kube.Api` that is used here."""

    def get(self, path: str) -> dict[str, Any]: ...

    def patch(self, path: str, body: object, content_type: str) -> dict[str, Any]: ...


def publish(api: Api, kind: str, name: str, ca: bytes) -> bool:
    """Put the CA bundle into every webhook of a configuration, and who did; whether anything had to be changed.

    kind: `mutatingwebhookconfigurations` or `validatingwebhookconfigurations`. Raises what `api` raises.
    """
    path = f"{CONFIGURATIONS}/{kind}/{name}"
    wanted = base64.b64encode(ca).decode()
    seen = api.get(path)
    patch = _telling(seen.get("metadata") or {})
    for i, webhook in enumerate(seen.get("webhooks") or ()):
        if webhook["clientConfig"].get("caBundle") != wanted:
            # The list may be another one by now: the patch holds only for the webhook that was read.
            patch.append({"op": "test", "path": pointer("webhooks", i, "name"), "value": webhook["name"]})
            patch.append({"op": "add", "path": pointer("webhooks", i, "clientConfig", "caBundle"), "value": wanted})
    if patch:
        api.patch(path, patch, content_type=JSON_PATCH)
    return bool(patch)


def _telling(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """That this version serves it; of two replicas with different ones the later has the word."""
    annotations = meta.get("annotations")
    if annotations is not None:
        told = {"op": "add", "path": pointer("metadata", "annotations", VERSION), "value": own_version()}
        return [] if annotations.get(VERSION) == own_version() else [told]
    return [
        # Others' first annotation may have come meanwhile.
        {"op": "test", "path": pointer("metadata", "resourceVersion"), "value": meta.get("resourceVersion")},
        {"op": "add", "path": pointer("metadata", "annotations"), "value": {VERSION: own_version()}},
    ]
