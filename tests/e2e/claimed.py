"""Creates and reads ResourceClaims and their pods for the end-to-end tests. `Bench` does the same for other pods."""

from collections.abc import Sequence
from typing import Any

from mgpu.kube import ApiError
from mgpu.model.resource_claims import API, CLAIMS, DRIVER, Claim
from playground.containers import differences, expected_cards
from tests.e2e.bench import Bench, Json
from tests.waiting import until

NAMED = f"/apis/{API}/namespaces/default/resourceclaims"
TEMPLATES = f"/apis/{API}/namespaces/default/resourceclaimtemplates"
HOST = "kubernetes.io/hostname"


def wanted(name: str = "gpu", cores: int = 0, memory: str = "", selector: str = "", **exactly: Any) -> Json:
    """Return a request for cards of the class `mgpu`. Without amounts it is for whole cards."""
    amounts = ({"cores": str(cores)} if cores else {}) | ({"memory": memory} if memory else {})
    exactly = {"deviceClassName": "mgpu", **exactly}
    exactly |= {"capacity": {"requests": amounts}} if amounts else {}
    exactly |= {"selectors": [{"cel": {"expression": selector}}]} if selector else {}
    return {"name": name, "exactly": exactly}


class Claimed:
    """The ResourceClaims of the namespace `default`, and the pods that use them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.api = bench.cluster.api

    def template(self, name: str, *requests: Json, constraints: Sequence[Json] = ()) -> None:
        devices = {"requests": list(requests), "constraints": list(constraints)}
        self.api.create(TEMPLATES, {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}})

    def create(self, name: str, *requests: Json) -> Json:
        """Create a claim that pods can name."""
        return self.api.create(NAMED, {"metadata": {"name": name}, "spec": {"devices": {"requests": list(requests)}}})

    def pod(self, name: str, *, template: str = "", claim: str = "", node: str = "", **containers: str) -> None:
        """Create a pod with a container for each keyword, which uses that request of the claim; "" stands for all."""
        source = {"resourceClaimTemplateName": template} if template else {"resourceClaimName": claim}
        rows = [
            {
                "name": container,
                "image": "cuda",
                "resources": {"claims": [{"name": "gpu"} | ({"request": request} if request else {})]},
            }
            for container, request in (containers or {"c": ""}).items()
        ]
        spec: Json = {"resourceClaims": [{"name": "gpu", **source}], "containers": rows}
        if node:
            spec["nodeSelector"] = {HOST: node}
        self.bench.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})

    def exact(self, name: str) -> dict[str, list[int]]:
        """Check that the pod runs and that each container sees the cards of its claim. Return their indexes."""
        node = self.bench.runs(name).spec.node_name
        raw = self.bench.raw(name)
        samples = self.bench.samples
        expected = expected_cards(samples.record(raw) or (), samples.cards(node))
        assert expected, "the pod has no cards"
        runtime = self.bench.cluster.kubelets[node].runtime
        seen = {c.name: c.env for c in runtime.containers(raw["metadata"]["uid"]) if c.running}
        assert differences(expected, seen) == []
        return {
            container: [int(uuid.removeprefix(f"GPU-{node}-")) for uuid in uuids.split(",")]
            for container, uuids in expected.items()
        }

    def of(self, pod: str) -> list[Claim]:
        """Return the claims of a pod."""
        return self.bench.samples.claims(self.bench.raw(pod))

    def get(self, name: str) -> Json:
        return self.api.get(f"{NAMED}/{name}")

    def allocate(self, name: str, node: str, card: int, cores: int, memory: str) -> None:
        """Write the allocation of a claim, as somebody does who does not ask mgpu."""
        place = {"request": "gpu", "driver": DRIVER, "pool": node, "device": f"card-{card}"}
        share = {"shareID": f"00000000-0000-4000-8000-{card:012}", "consumedCapacity": {"cores": str(cores)}}
        share["consumedCapacity"]["memory"] = memory  # type: ignore[index]
        on_node = {"key": "metadata.name", "operator": "In", "values": [node]}
        allocation = {
            "devices": {"results": [{**place, **share}]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [on_node]}]},
        }
        self.api.replace(f"{NAMED}/{name}/status", {**self.get(name), "status": {"allocation": allocation}})

    def used(self, node: str) -> list[tuple[int, int]]:
        """Return the compute in percent and the memory in GiB that is held of each card of a node."""
        states = self.bench.samples.states()[node]
        return [(state.core_used // 10, state.memory_used >> 30) for state in states]

    def clear(self) -> None:
        """Delete all pods, claims and templates, and wait until their cards are free."""
        self.bench.clear()
        for raw in self.api.list(NAMED)[0]:
            if not raw["metadata"].get("ownerReferences"):
                self._delete(f"{NAMED}/{raw['metadata']['name']}")
        for raw in self.api.list(TEMPLATES)[0]:
            self._delete(f"{TEMPLATES}/{raw['metadata']['name']}")
        until(lambda: not self.api.list(CLAIMS)[0])

    def _delete(self, path: str) -> None:
        try:
            self.api.delete(path)
        except ApiError as error:
            if error.status != 404:
                raise
