"""Creates the pods of `examples/` on a running cluster, waits for them and reads the result.

Mainly `mgpu demo` and the tests use it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.kube import Api
from mgpu.model.cards import Card, CardState
from mgpu.model.device_object import DEVICE_API, read_device
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share
from mgpu.model.node_slices import NodeSlices, read_slices
from mgpu.model.pods import read_node, read_pod
from mgpu.presentation.overview import Overview, make_overview
from mgpu.settings import Settings

Json = dict[str, Any]
EXAMPLES = Path(__file__).parents[1] / "examples"
_DEVICES = f"/apis/{DEVICE_API}/devices"
_PODS = "/api/v1/namespaces/default/pods"
_MTGPUPODS = f"/apis/{mtgpu.API_VERSION}/namespaces/default/mtgpupods"
_POLL_SECONDS = 0.02


def example(name: str) -> Json:
    """Return the pod or the MtgpuPod in `examples/<name>.yaml`."""
    pod: Json = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return pod


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a pod.

    Attributes:
        pod: The pod as the API server returned it.
        node: The name of its node, or "" if it has none.
        reason: Why the pod failed, or why the scheduler rejected it; "" if neither is the case.
    """

    pod: Json
    node: str = ""
    reason: str = ""

    @property
    def running(self) -> bool:
        return bool((self.pod.get("status") or {}).get("phase") == "Running")


class Samples:
    """Creates and reads pods and MtgpuPods in the namespace `default`, and reads the nodes."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._settings = settings

    def create(self, pod: Mapping[str, Any]) -> Json:
        """Create the pod and return it as it is stored. Raises ApiError if it is denied."""
        return self._api.create(_PODS, pod)

    def create_mtgpupod(self, raw: Mapping[str, Any]) -> Json:
        """Create the MtgpuPod and return it as it is stored. Raises ApiError if it is denied."""
        return self._api.create(_MTGPUPODS, raw)

    def mtgpupod(self, name: str) -> Json:
        """Return the MtgpuPod. Raises ApiError if it does not exist."""
        return self._api.get(f"{_MTGPUPODS}/{name}")

    def delete_mtgpupod(self, name: str) -> None:
        """Delete the MtgpuPod, as `kubectl delete --wait=false` does. Raises ApiError if it does not exist."""
        self._api.delete(f"{_MTGPUPODS}/{name}", {"propagationPolicy": "Background"})

    def settled(self, name: str, seconds: float = 60.0) -> Outcome:
        """Wait at most `seconds` until the pod runs or fails, or the scheduler rejects it. Return its state."""
        return self._wait(name, lambda o: bool(o.running or o.reason), seconds)

    def running(self, name: str, seconds: float = 60.0) -> Outcome:
        """Wait at most `seconds` until the pod runs. Return its state."""
        return self._wait(name, lambda o: o.running, seconds)

    def request(self, pod: Json) -> GpuRequest | None:
        """Return the GPUs that the pod requests, or None if it requests none. Raises BadObject."""
        return dialects.read_request(read_pod(pod), self._settings)

    def record(self, pod: Json) -> tuple[Share, ...] | None:
        """Return the shares of the pod's allocation record, or None if it has none. Raises BadObject."""
        request = self.request(pod)
        return dialects.by_name(request.dialect).read_placement(read_pod(pod), request) if request else None

    def cards(self, node: str) -> tuple[Card, ...]:
        """Return the cards in the node's Device. Raises ApiError if the node has no Device, and BadObject."""
        return read_device(self._api.get(f"{_DEVICES}/{node}"))

    def slices(self, node: str) -> NodeSlices:
        """Return the slices that the annotations of the node describe. Raises BadObject."""
        return read_slices(read_node(self._api.get(f"/api/v1/nodes/{node}")))

    def overview(self) -> Overview:
        paths = "/api/v1/nodes", _DEVICES, "/api/v1/pods", mtgpu.COLLECTION
        nodes, devices, pods, mtgpupods = (self._api.list(path)[0] for path in paths)
        return make_overview(nodes, devices, pods, self._settings, mtgpupods=mtgpupods)

    def states(self) -> dict[str, tuple[CardState, ...]]:
        return {node.name: tuple(view.state for view in node.cards) for node in self.overview().nodes}

    def _wait(self, name: str, reached: Callable[[Outcome], bool], seconds: float) -> Outcome:
        """Poll the pod until `reached` is true, at most for `seconds`. Return its last state."""
        deadline = time.monotonic() + seconds
        while not reached(outcome := self._outcome(name)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return outcome

    def _outcome(self, name: str) -> Outcome:
        pod = self._api.get(f"{_PODS}/{name}")
        node, status = pod["spec"].get("nodeName", ""), pod.get("status") or {}
        if status.get("phase") == "Failed":
            return Outcome(pod, node, str(status.get("message") or status.get("reason")))
        refused = (c for c in status.get("conditions") or () if (c["type"], c["status"]) == ("PodScheduled", "False"))
        return Outcome(pod, node, "" if node else next((str(c.get("message", "")) for c in refused), ""))
