"""The manifest of the Pod that runs for an MtgpuPod.

The scheduler's controller creates it, and the webhook builds it again in place of whatever the controller's account
sent (`webhook.mtgpupod_rebuild`), so both call this function.
"""

from collections.abc import Mapping
from typing import Any

from mgpu.dialects.mtgpu import API_VERSION, KIND, MtgpuPod, environment

_NOT_COPIED = "kubectl.kubernetes.io/last-applied-configuration"


def manifest(raw: Mapping[str, Any], pod: MtgpuPod, uuid: str, index: int) -> dict[str, Any]:
    """Return the Pod of an MtgpuPod for the API server.

    Args:
        raw: the MtgpuPod as decoded JSON. pod: the same as read.
        uuid: of its card. index: of its card.
    """
    meta, spec = raw["metadata"], raw["spec"]
    env = [{"name": name, "value": value} for name, value in environment(pod, uuid, index).items()]
    containers = {
        key: [_with_environment(container, env) for container in spec[key]]
        for key in ("initContainers", "containers")
        if spec.get(key)
    }
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": pod.name,
        "uid": pod.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    made_meta: dict[str, Any] = {"namespace": pod.namespace, "name": pod.name, "ownerReferences": [owner]}
    if meta.get("labels"):
        made_meta["labels"] = dict(meta["labels"])
    made_meta["annotations"] = {key: text for key, text in meta["annotations"].items() if key != _NOT_COPIED}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": made_meta, "spec": {**spec, **containers}}


def _with_environment(container: Mapping[str, Any], env: list[dict[str, str]]) -> dict[str, Any]:
    """Return the container with `env` before its own variables, so that these may refer to it."""
    ours = {row["name"] for row in env}
    return {**container, "env": [*env, *(row for row in container.get("env") or () if row.get("name") not in ours)]}
