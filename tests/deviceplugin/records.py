"""Pods with requests and allocation records, for tests of the agent."""

from collections.abc import Mapping, Sequence
from typing import Any

from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from mgpu import dialects
from mgpu.model.cards import Card
from mgpu.model.gpu_requests import Placement
from mgpu.model.pods import read_pod
from mgpu.settings import load_settings
from tests.builders import cards, share

ASSUMED = "vke.volcengine.com/assumed"
RECORD = "vke.volcengine.com/gpu-index-container-"
SETTINGS = load_settings()


def decided(name: str, card: str, core: int = 2, **more: Any) -> dict[str, Any]:
    """Return a pod with a share of this card in its record."""
    return share(name, core=core, annotations={ASSUMED: "true", RECORD + "c": card}, **more)


def started(raw: dict[str, Any], *containers: str) -> dict[str, Any]:
    """Return the pod with these containers running; by default all of `spec.containers`."""
    names = containers or tuple(container["name"] for container in raw["spec"]["containers"])
    rows = [{"name": name, "containerID": "x", "state": {"running": {}}} for name in names]
    return {**raw, "status": {**raw["status"], "containerStatuses": rows}}


def read(raw: dict[str, Any]) -> GpuPod:
    """Return the pod as the agent reads it."""
    gpu_pod = read_gpu_pod(raw, SETTINGS)
    assert gpu_pod is not None
    return gpu_pod


def requesting(name: str, amounts: Mapping[str, object]) -> dict[str, Any]:
    """Return a container that requests these resources."""
    texts = {resource: str(amount) for resource, amount in amounts.items()}
    return {"name": name, "image": "cuda", "resources": {"requests": texts, "limits": dict(texts)}}


def recorded(raw: dict[str, Any], on: Mapping[str, int], own: Sequence[Card] = ()) -> dict[str, Any]:
    """Return the pod with the record that its dialect writes if its containers get these of the node's cards (two)."""
    pod = read_pod(raw)
    request = dialects.read_request(pod, SETTINGS)
    assert request is not None
    placement = Placement(tuple((c.container, (on[c.container],)) for c in request.containers))
    written = dialects.by_name(request.dialect).write_placement(pod, request, placement, own or cards(2), SETTINGS, 1)
    return {**raw, "metadata": {**raw["metadata"], "annotations": {**raw["metadata"]["annotations"], **written}}}
