"""Builders: objects as the API has them, with only what a test is about written out."""

import json
from typing import Any

from mgpu.model.cards import Card, CardState

GIB = 1 << 30
CORE, MEMORY = "vke.volcengine.com/mgpu-core", "vke.volcengine.com/mgpu-memory"


def container(name: str = "c", core: object = None, mib: object = None, **more: Any) -> dict[str, Any]:
    """A container that asks for an mGPU share, in requests and limits."""
    amounts = {k: str(v) for k, v in ((CORE, core), (MEMORY, mib)) if v is not None}
    resources = {"requests": amounts, "limits": dict(amounts)} if amounts else {}
    return {"name": name, "image": "cuda", "resources": resources, **more}


def pod(
    name: str = "p",
    *containers: dict[str, Any],
    init: tuple[dict[str, Any], ...] = (),
    annotations: dict[str, str] | None = None,
    namespace: str = "default",
    uid: str | None = None,
    node: str = "",
    phase: str = "Pending",
) -> dict[str, Any]:
    """A pod as JSON. `pod("p", container(core=50, mib=1024))`."""
    spec: dict[str, Any] = {"containers": list(containers)}
    if init:
        spec["initContainers"] = list(init)
    if node:
        spec["nodeName"] = node
    meta = {"namespace": namespace, "name": name, "uid": f"uid-{name}" if uid is None else uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "annotations": annotations or {}},
        "spec": spec,
        "status": {"phase": phase},
    }


def share(name: str = "p", core: int = 50, mib: int = 1024, **more: Any) -> dict[str, Any]:
    """A pod with one container that asks for a share of one card."""
    return pod(name, container("c", core, mib), **more)


def node(name: str = "n1", *, labels: dict[str, str] | None = None, **annotations: str) -> dict[str, Any]:
    """A node that serves mGPU pods."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"vke.node.gpu.schedule": "mgpu", **(labels or {})},
            "annotations": annotations,
        },
        "spec": {},
        "status": {
            "capacity": {"cpu": "64", "memory": "256Gi", "pods": "250"},
            "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "250"},
        },
    }


def card(index: int = 0, gib: int = 80, *, healthy: bool = True, node: str = "n1") -> Card:
    return Card(index, f"GPU-{node}-{index}", "A100-SXM4-80GB", gib * GIB, healthy=healthy, minor=index)


def cards(count: int = 2, gib: int = 80, node: str = "n1") -> tuple[Card, ...]:
    return tuple(card(i, gib, node=node) for i in range(count))


def state(index: int = 0, core: int = 0, gib_used: float = 0, shares: int | None = None, gib: int = 80) -> CardState:
    """A card that is part used: `core` in milli."""
    used = int(gib_used * GIB)
    return CardState(card(index, gib), core, used, (1 if core or used else 0) if shares is None else shares)


def mtgpupod(
    name: str = "m",
    gpuid: str = "zxcvb",
    request: str = "0.2",
    *,
    limit: str = "1",
    memory: object = GIB,
    node: str = "n1",
    bound: str = "",
    **more: Any,
) -> dict[str, Any]:
    """An MtgpuPod with one container `c`; bound: the UUID of its card. more: as of `pod`."""
    said = {"gpu_request": request, "gpu_limit": limit, "gpu_mem": str(memory), "GPUID": gpuid}
    annotations = {f"lsalab.nthu/{key}": value for key, value in said.items()} | (more.pop("annotations", None) or {})
    raw = pod(name, container(), node=node, annotations=annotations, **more)
    status = {**raw["status"], "BoundDeviceID": bound} if bound else raw["status"]
    return {**raw, "apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "status": status}


def owned(name: str = "m") -> dict[str, Any]:
    """The ownerReference of the Pod of `mtgpupod(name)`."""
    uid = mtgpupod(name)["metadata"]["uid"]
    return {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": name, "uid": uid, "controller": True}


def occupy_pod(gpuid: str = "zxcvb", node: str = "n1", *, card: int | None = None, **more: Any) -> dict[str, Any]:
    """The occupy pod of a GPUID; card: the index of the one that its record names, whole. more: as of `pod`."""
    whole = {"name": "occupy", "image": "mgpu", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    raw = pod(f"mtgpupod-occupypod-{node}-{gpuid}", whole, namespace="kube-system", node=node, **more)
    raw["metadata"]["labels"] = {"mgpu.io/occupies": gpuid}
    if card is not None:
        amounts = {"gpu-core": "100", "gpu-memory-ratio": "100"}
        given = [{"minor": card, "resources": {f"koordinator.sh/{k}": v for k, v in amounts.items()}}]
        raw["metadata"]["annotations"]["scheduling.koordinator.sh/device-allocated"] = json.dumps({"gpu": given})
    return raw
