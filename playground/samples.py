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
from mgpu.cli import cluster_objects
from mgpu.dialects import mtgpu
from mgpu.kube import Api
from mgpu.model.cards import Card, CardState
from mgpu.model.claim_object import read_claim
from mgpu.model.device_object import DEVICE_API, read_device
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share
from mgpu.model.node_slices import NodeSlices, read_slices
from mgpu.model.pods import read_node, read_pod
from mgpu.model.resource_claims import API, Claim, claim_path
from mgpu.presentation.claim_views import read_claims
from mgpu.presentation.overview import Overview, make_overview
from mgpu.settings import CARD_POLICIES, Settings
from playground.claimed_pods import request_of, shares_of_containers

Json = dict[str, Any]
EXAMPLES = Path(__file__).parents[1] / "examples"
_DEVICES = f"/apis/{DEVICE_API}/devices"
_PODS = "/api/v1/namespaces/default/pods"
_MTGPUPODS = f"/apis/{mtgpu.API_VERSION}/namespaces/default/mtgpupods"
_TEMPLATES = f"/apis/{API}/namespaces/default/resourceclaimtemplates"
_POLL_SECONDS = 0.02


def example(name: str) -> Json:
    """Return the pod or the MtgpuPod in `examples/<name>.yaml`, which is the last object of the file."""
    pod: Json = _objects(name)[-1]
    return pod


def templates_for(name: str) -> list[Json]:
    """Return the ResourceClaimTemplates in `examples/<name>.yaml`, which the pod of the example needs."""
    return [found for found in _objects(name) if found["kind"] == "ResourceClaimTemplate"]


def _objects(name: str) -> list[Json]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


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
    """Creates and reads pods, their claims and MtgpuPods in the namespace `default`, and reads the nodes."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._settings = settings

    def create(self, pod: Mapping[str, Any]) -> Json:
        """Create the pod and return it as it is stored. Raises ApiError if it is denied."""
        return self._api.create(_PODS, pod)

    def create_template(self, raw: Mapping[str, Any]) -> None:
        """Create the ResourceClaimTemplate. Raises ApiError if it is denied."""
        self._api.create(_TEMPLATES, raw)

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

    def claims(self, pod: Json) -> list[Claim]:
        """Return the ResourceClaims of the pod. The template stands for a claim that has not been created yet.

        Raises ApiError if there is neither of them, and BadObject.
        """
        statuses = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        created = {row["name"]: row.get("resourceClaimName") for row in statuses}
        found = []
        for entry in pod["spec"].get("resourceClaims") or ():
            name = entry.get("resourceClaimName") or created.get(entry["name"])
            if name:
                found.append(read_claim(self._api.get(claim_path("default", name)), CARD_POLICIES))
            else:
                template = self._api.get(f"{_TEMPLATES}/{entry['resourceClaimTemplateName']}")
                found.append(read_claim(template["spec"], CARD_POLICIES))
        return found

    def request(self, pod: Json) -> GpuRequest | None:
        """Return the GPUs that the pod requests, or None if it requests none. Raises BadObject and ApiError."""
        claims = self.claims(pod)
        if claims:
            return request_of(claims)
        return dialects.read_request(read_pod(pod), self._settings)

    def record(self, pod: Json) -> tuple[Share, ...] | None:
        """Return the shares of the pod's allocation record or of its claims, or None if it has neither.

        Raises BadObject and ApiError.
        """
        claims = self.claims(pod)
        if claims:
            return shares_of_containers(pod, claims) or None
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
        claims = read_claims(cluster_objects.claims(self._api), cluster_objects.device_classes(self._api))
        return make_overview(nodes, devices, pods, self._settings, mtgpupods=mtgpupods, claims=claims)

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
