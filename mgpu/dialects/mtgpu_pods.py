"""Builds the manifest of the Pod that runs for an MtgpuPod.

The controller (`scheduler.mtgpupods`) creates the Pod. The webhook (`webhook.mtgpupod_rebuild`) builds the manifest
again and replaces the one that was sent, so that the controller's account cannot create other Pods. Both must get equal
manifests, so `manifest` may depend on nothing but its arguments. `playground.simulate` calls it too.
"""

from collections.abc import Mapping
from typing import Any

from mgpu.dialects.mtgpu import API_VERSION, KIND, MtgpuPod, environment

_NOT_COPIED = "kubectl.kubernetes.io/last-applied-configuration"


def manifest(raw: Mapping[str, Any], pod: MtgpuPod, uuid: str, index: int) -> dict[str, Any]:
    """Return the manifest of the Pod that runs for an MtgpuPod.

    Args:
        pod: the MtgpuPod in `raw`.
        uuid: the UUID of the MtgpuPod's card.
        index: the index of the MtgpuPod's card.
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
    new_meta: dict[str, Any] = {"namespace": pod.namespace, "name": pod.name, "ownerReferences": [owner]}
    if meta.get("labels"):
        new_meta["labels"] = dict(meta["labels"])
    new_meta["annotations"] = {key: text for key, text in meta["annotations"].items() if key != _NOT_COPIED}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": new_meta, "spec": {**spec, **containers}}


def _with_environment(container: Mapping[str, Any], env: list[dict[str, str]]) -> dict[str, Any]:
    """Return the container with `env` before its own variables, so that these can refer to the variables in `env`.

    The container's own variables with the names of variables in `env` are removed.
    """
    ours = {row["name"] for row in env}
    return {**container, "env": [*env, *(row for row in container.get("env") or () if row.get("name") not in ours)]}
