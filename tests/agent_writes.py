"""Writes that a stolen agent token may try: the same list for the policies' expressions and for a real API server."""

from typing import Any, NamedTuple

OWN, OTHER = "own", "sliced"
"""The node that the token is bound to, and another one."""


class Write(NamedTuple):
    """A merge patch of `target`: `node`, `node/status`, `pod` or `device`, of the node `on`. why: in the refusal."""

    target: str
    patch: dict[str, Any]
    why: str
    on: str = OWN


def annotated(*keys: str) -> dict[str, Any]:
    return {"metadata": {"annotations": dict.fromkeys(keys, "x")}}


def labelled(key: str, value: str | None = "") -> dict[str, Any]:
    return {"metadata": {"labels": {key: value}}}


_OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}
_RDMA = {"type": "rdma", "minor": 0, "id": "rdma-0"}

REFUSED = [
    Write("node/status", annotated("mgpu.io/agent"), "and no other", OTHER),
    Write("node", {"spec": {"unschedulable": True}}, "no spec"),
    Write("node", {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}, "no spec"),
    Write("node", labelled("node-role.kubernetes.io/x"), "no labels"),
    Write("node", labelled("gpu.partitioning", "mig"), "no labels"),
    Write("node", labelled("mgpu.io/isolation", "none"), "no labels"),
    Write("node/status", labelled("kubernetes.io/os", None), "no labels"),
    Write("node", annotated("flannel.alpha.coreos.com/public-ip"), "no annotations"),
    Write("node", annotated("mgpu.io/slices-planned"), "no annotations"),
    Write("node", {"metadata": {"finalizers": ["a.io/b"]}}, "no metadata"),
    Write("node", {"metadata": {"ownerReferences": [_OWNER]}}, "no metadata"),
    Write("node/status", {"status": {"capacity": {"cpu": "1000"}}}, "no capacity"),
    Write("node/status", {"status": {"capacity": {"memory": None}}}, "no capacity"),
    Write("node/status", {"status": {"capacity": {"nvidia.com/gpu": "8"}}}, "no capacity"),
    Write("node/status", {"status": {"capacity": {"example.com/license": "8"}}}, "no capacity"),
    Write(
        "node/status",
        {"status": {"capacity": {f"koordinator.sh/r{i}": "1" for i in range(17)}}},
        "at most 16 resources",
    ),
    Write("node/status", {"status": {"allocatable": {"cpu": "1000"}}}, "no status"),
    Write("node/status", {"status": {"allocatable": {"koordinator.sh/gpu-core": "100000"}}}, "no status"),
    Write("node/status", {"status": {"nodeInfo": {"kubeletVersion": "v1.0.0"}}}, "no status"),
    Write("node/status", {"status": {"addresses": [{"type": "InternalIP", "address": "10.6.6.6"}]}}, "no status"),
    Write("node/status", {"status": {"images": [{"names": ["a"], "sizeBytes": 1}]}}, "no status"),
    Write("node/status", {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 6666}}}}, "no status"),
    Write("node/status", {"status": {"volumesInUse": ["a/b"]}}, "no status"),
    Write("node/status", {"status": {"conditions": None}}, "no status"),
    Write("device", {"spec": {"devices": []}}, "and no other", OTHER),
    Write("device", labelled("a"), "no labels of a Device"),
    Write("device", {"metadata": {"finalizers": ["a.io/b"]}}, "no metadata of a Device"),
    Write("device", annotated("a.io/b"), "no annotations of a Device"),
    Write("device", {"metadata": {"ownerReferences": [_OWNER]}}, "its own Node"),
    Write("device", {"spec": {"devices": [_RDMA]}}, "no devices but GPUs"),
    Write("pod", annotated("mgpu.io/slices-given"), "and no others", OTHER),
    Write("pod", annotated("a.io/b"), "no annotations"),
    Write("pod", annotated("mgpu.io/card-models"), "no annotations"),
    Write("pod", annotated("mgpu.io/resized"), "no annotations"),
    Write("pod", annotated("mgpu.io/resize"), "no annotations"),
    Write("pod", annotated("vke.volcengine.com/anything"), "no annotations"),
    Write("pod", labelled("app", "x"), "but annotations"),
    Write("pod", {"metadata": {"finalizers": ["a.io/b"]}}, "but annotations"),
    Write("pod", {"spec": {"containers": [{"name": "c", "image": "x"}]}}, "but annotations"),
]


def event(**fields: Any) -> dict[str, Any]:
    """An Event as the agent on OWN writes it, with these fields instead."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "p.", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "p", "uid": "u"},
        "reason": "MgpuStartRefused",
        "message": "no card",
        "type": "Warning",
        "source": {"component": "mgpu-deviceplugin", "host": OWN},
        "reportingComponent": "mgpu-deviceplugin",
        **fields,
    }


REFUSED_EVENTS = [
    (event(source={"component": "mgpu-deviceplugin", "host": OTHER}), "as their source"),
    (event(source={"component": "kubelet", "host": OWN}), "as their source"),
    (event(source={}), "as their source"),
    (event(reportingComponent="kubelet"), "as their source"),
    (event(involvedObject={"apiVersion": "v1", "kind": "Node", "name": OTHER}), "about pods and the Node"),
    (event(involvedObject={"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}), "about pods and the Node"),
    (event(metadata={"generateName": "p.", "namespace": "default", "labels": {"a": "b"}}), "without labels"),
    (event(message="x" * 1025), "at most 1024"),
    (event(reason="x" * 1025), "at most 253"),
    (event(action="x"), "its own fields alone"),
    (event(reportingInstance="x" * 1025), "at most 253"),
    (event(related={"kind": "Pod", "name": "p"}), "its own fields alone"),
    (event(series={"count": 1}), "its own fields alone"),
    (
        event(involvedObject={"kind": "Pod", "namespace": "default", "name": "p", "fieldPath": "x" * 1025}),
        "its own fields alone",
    ),
    (event(involvedObject={"kind": "Pod", "namespace": "default", "name": "p", "uid": "x" * 1025}), "at most 253"),
]
