"""The pods that the scheduler creates for MtgpuPods: their Pods, and occupy pods."""

from typing import Any

from mgpu.dialects import mtgpu
from tests.builders import pod
from tests.deviceplugin.records import requesting

WHOLE = "nvidia.com/gpu"
GIB = 1 << 30


def pod_of(
    name: str,
    card: str,
    request: str = "0.2",
    limit: str = "1.0",
    memory: int = GIB,
    **more: Any,
) -> dict[str, Any]:
    """Return the Pod of the MtgpuPod of this name, on the card with this UUID."""
    share = dict(zip(mtgpu.ANNOTATIONS, (request, limit, str(memory), "zxcvb"), strict=True))
    raw = pod(name, {"name": "c", "image": "cuda", "env": [{"name": mtgpu.VISIBLE, "value": card}]}, **more)
    raw["metadata"]["annotations"] = share
    owner = {"apiVersion": mtgpu.API_VERSION, "kind": mtgpu.KIND, "name": name, "uid": f"mtgpu-{name}"}
    raw["metadata"]["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    return raw


def occupy_pod(gpuid: str = "zxcvb", node: str = "n1") -> dict[str, Any]:
    """Return an occupy pod without a record, as on a node with NVIDIA's plugin."""
    raw = pod(mtgpu.occupy_name(node, gpuid), requesting("c", {WHOLE: 1}), namespace="kube-system", node=node)
    raw["metadata"]["labels"] = {mtgpu.OCCUPY_LABEL: gpuid, "app.kubernetes.io/managed-by": "mgpu"}
    return raw
