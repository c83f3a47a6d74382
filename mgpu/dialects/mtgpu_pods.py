"""The Pod that runs for an MtgpuPod: what the scheduler creates, and what admission makes of any that it creates."""

from collections.abc import Mapping
from typing import Any

from mgpu.dialects.mtgpu import API_VERSION, KIND, MtgpuPod, environment

_NOT_COPIED = "kubectl.kubernetes.io/last-applied-configuration"


def manifest(raw: Mapping[str, Any], pod: MtgpuPod, uuid: str, index: int) -> dict[str, Any]:
    """Return the Pod of an MtgpuPod (`raw`, and as read) on the card with this UUID and index, for the API server."""
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
    made: dict[str, Any] = {"namespace": pod.namespace, "name": pod.name, "ownerReferences": [owner]}
    if meta.get("labels"):
        made["labels"] = dict(meta["labels"])
    made["annotations"] = {key: text for key, text in meta["annotations"].items() if key != _NOT_COPIED}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": {**spec, **containers}}


def _with_environment(container: Mapping[str, Any], env: list[dict[str, str]]) -> dict[str, Any]:
    """First, so that the container's own variables may refer to them."""
    ours = {row["name"] for row in env}
    return {**container, "env": [*env, *(row for row in container.get("env") or () if row.get("name") not in ours)]}
