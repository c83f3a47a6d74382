"""ResourceClaims in the scheduling loop, against our API server and its controllers."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.kube import Api, ApiError
from playground.controller_manager import ControllerManager
from playground.controller_manager.pod_claims import FINALIZER, PodClaims
from playground.installation import manifests
from playground.scheduling import Extender, Scheduling
from tests.playground.claim_objects import (
    CLAIMS,
    CLASSES,
    SLICES,
    TEMPLATES,
    card,
    claim,
    device_class,
    device_slice,
    request,
    result,
    results_of,
    share,
    template,
)
from tests.playground.fake_cluster import EVENTS, PODS, FakeCluster, Json
from tests.playground.scheduling.fake_extender import FakeExtender
from tests.waiting import until


@pytest.fixture
def claims(cluster: FakeCluster) -> Iterator[FakeCluster]:
    """Two nodes with two cards each, the class `mgpu`, the controllers, and the scheduling loop."""
    for node in ("n1", "n2"):
        cluster.node(node)
        cluster.api.create(SLICES, device_slice(node, card(0), card(1)))
    cluster.api.create(CLASSES, device_class())
    for crd in (raw for raw in manifests() if raw["kind"] == "CustomResourceDefinition"):
        cluster.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    controllers = ControllerManager(cluster.api)
    controllers.start()
    cluster.start_scheduling()
    yield cluster
    controllers.stop()


def using(*names: str, template: str = "share") -> dict[str, Any]:
    """The fields of a pod with claims from a template, each with a name."""
    rows = [{"name": name, "resourceClaimTemplateName": template} for name in names]
    return {"resourceClaims": rows}


def claim_of(cluster: FakeCluster, pod: str) -> str:
    statuses = cluster.pod(pod)["status"]["resourceClaimStatuses"]
    return str(statuses[0]["resourceClaimName"])


def test_claim_of_a_template_is_created_allocated_and_bound(claims: FakeCluster) -> None:
    claims.api.create(TEMPLATES, template("share", share(30, "8Gi")))
    claims.submit("p", **using("gpu"))
    assert claims.wait_bound("p") == "n1"
    name = claim_of(claims, "p")
    made = claims.api.get(f"{CLAIMS}/{name}")
    found = made["status"]["allocation"]["devices"]["results"]
    assert [{k: v for k, v in row.items() if k != "shareID"} for row in found] == [
        {
            "request": "gpu",
            "driver": "gpu.mgpu.io",
            "pool": "n1",
            "device": "card-0",
            "consumedCapacity": {"cores": "30", "memory": "8Gi"},
        }
    ]
    assert made["metadata"]["finalizers"] == [FINALIZER]
    assert [row["name"] for row in made["status"]["reservedFor"]] == ["p"]
    claims.api.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
    claims.wait_gone(f"{CLAIMS}/{name}")


def test_claims_share_a_card_until_it_is_full(claims: FakeCluster) -> None:
    claims.api.create(TEMPLATES, template("share", share(40, "8Gi")))
    for i in range(8):
        claims.submit(f"p{i}", **using("gpu"))
    for i in range(8):
        claims.wait_bound(f"p{i}")
    devices = sorted(
        (row["pool"], row["device"]) for i in range(8) for row in results_of(claims.api, claim_of(claims, f"p{i}"))
    )
    assert devices == sorted((node, f"card-{i}") for node in ("n1", "n2") for i in (0, 0, 1, 1))
    claims.submit("more", **using("gpu"))
    assert claims.wait_refused("more") == "0/2 nodes are available: 2 cannot allocate all claims."
    claims.api.delete(f"{PODS}/p0", {"gracePeriodSeconds": 0})
    until(lambda: claims.node_of("more"))


def test_pod_waits_for_the_template_of_its_claim(claims: FakeCluster) -> None:
    claims.submit("p", **using("gpu"))
    until(lambda: "FailedResourceClaimCreation" in {event["reason"] for event in claims.api.list(EVENTS)[0]})
    assert "conditions" not in claims.pod("p")["status"], "a pod without its claim is not tried"
    claims.api.create(TEMPLATES, template("share", share(40, "8Gi")))
    claims.wait_bound("p")


def test_pods_that_share_a_claim_run_on_its_node(claims: FakeCluster) -> None:
    claims.api.create(CLAIMS, claim("c", share(40, "8Gi")))
    for name in ("p", "q"):
        claims.submit(name, {"cpu": "1"}, resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    assert claims.wait_bound("p") == claims.wait_bound("q")
    consumers = {row["name"] for row in claims.api.get(f"{CLAIMS}/c")["status"]["reservedFor"]}
    assert consumers == {"p", "q"}
    node = claims.node_of("p")
    claims.submit("elsewhere", nodeSelector={"zone": "z"}, resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    other = "n2" if node == "n1" else "n1"
    claims.api.patch(f"/api/v1/nodes/{other}", {"metadata": {"labels": {"zone": "z"}}})
    until(lambda: "1 resourceclaim not available on the node" in claims.wait_refused("elsewhere"))


def test_claim_that_only_an_unschedulable_pod_uses_is_freed(claims: FakeCluster) -> None:
    claims.api.create(CLAIMS, claim("c", share(40, "8Gi")))
    status = {"allocation": {"devices": {"results": [result(0)]}, "nodeSelector": on_node("n1")}}
    claims.api.patch(f"{CLAIMS}/c/status", {"status": status})
    claims.api.patch("/api/v1/nodes/n2", {"metadata": {"labels": {"zone": "z"}}})
    claims.submit("p", nodeSelector={"zone": "z"}, resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    assert claims.wait_bound("p") == "n2"
    assert [row["pool"] for row in results_of(claims.api, "c")] == ["n2"]


def test_missing_class_and_devices_are_named_and_waited_for(claims: FakeCluster) -> None:
    claims.api.create(TEMPLATES, template("share", request(deviceClassName="other")))
    claims.submit("p", **using("gpu"))
    reason = "request gpu: device class other does not exist"
    assert claims.wait_refused("p") == f"0/2 nodes are available: {reason}."
    claims.api.create(CLASSES, device_class("other", 'device.attributes["gpu.mgpu.io"].index == 7'))
    until(lambda: "2 cannot allocate all claims" in claims.wait_refused("p"))
    claims.api.replace(f"{SLICES}/n2-gpu.mgpu.io", device_slice("n2", card(0), card(7)))
    assert claims.wait_bound("p") == "n2"


def test_failing_selector_is_an_error_of_the_scheduler(claims: FakeCluster) -> None:
    selector = [{"cel": {"expression": 'device.attributes["gpu.mgpu.io"].nonsense == 1'}}]
    claims.api.create(TEMPLATES, template("share", request(selectors=selector)))
    claims.submit("p", **using("gpu"))
    assert "CEL runtime error" in claims.wait_refused("p")


class Writes(Api):
    """Passes calls on. `refuse` makes writes of allocations fail, and `move` replaces their devices."""

    def __init__(self, inner: Api) -> None:
        super().__init__(inner._server)
        self._inner = inner
        self.refuse: ApiError | None = None
        self.move = ""
        self.tries = 0
        self.started = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()

    def replace(self, path: str, body: Any, **query: object) -> Json:
        if path.endswith("/status") and "resourceclaims" in path:
            self.tries += 1
            self.started.set()
            self.proceed.wait(30)
            if self.refuse is not None:
                raise self.refuse
            if self.move:
                row = body["status"]["allocation"]["devices"]["results"][0]
                row["device"] = self.move
        return self._inner.replace(path, body, **query)


@pytest.fixture
def writes(cluster: FakeCluster) -> Writes:
    return Writes(cluster.api)


@pytest.fixture
def watched(cluster: FakeCluster, writes: Writes) -> Iterator[FakeCluster]:
    """One node with one card, a template `share`, and a loop that writes claims through `writes`."""
    cluster.node("n1")
    cluster.api.create(SLICES, device_slice("n1", card(0)))
    cluster.api.create(CLASSES, device_class())
    cluster.api.create(TEMPLATES, template("share", share(60, "8Gi")))
    controllers = PodClaims(cluster.api)
    controllers.start()
    cluster.start_scheduling(api=writes)
    yield cluster
    controllers.stop()


def test_denied_claim_is_tried_once_and_then_after_a_back_off(watched: FakeCluster, writes: Writes) -> None:
    writes.refuse = ApiError(403, "Forbidden", "no card is left")
    writes.proceed.clear()
    watched.submit("p", **using("gpu"))
    assert writes.started.wait(30)
    writes.proceed.set()
    reason = 'running PreBind plugin "DynamicResources": no card is left'
    assert watched.wait_refused("p") == reason
    writes.refuse = None
    watched.wait_bound("p")


def test_conflict_is_tried_five_times(watched: FakeCluster, writes: Writes) -> None:
    writes.refuse = ApiError(409, "Conflict", "modified")
    watched.submit("p", **using("gpu"))
    watched.wait_refused("p")
    assert writes.tries >= 5
    writes.refuse = None
    watched.wait_bound("p")
    assert watched.api.get(f"{CLAIMS}/{claim_of(watched, 'p')}")["metadata"]["finalizers"] == [FINALIZER]


def test_replaced_device_counts_from_then_on(watched: FakeCluster, writes: Writes) -> None:
    watched.api.replace(f"{SLICES}/n1-gpu.mgpu.io", device_slice("n1", card(0), card(1)))
    writes.move = "card-1"
    watched.submit("p", **using("gpu"))
    watched.wait_bound("p")
    writes.move = ""
    watched.submit("q", **using("gpu"))
    watched.wait_bound("q")
    devices = [results_of(watched.api, claim_of(watched, name))[0]["device"] for name in ("p", "q")]
    assert devices == ["card-1", "card-0"]


def test_pod_refused_because_of_a_denied_claim_waits_for_a_slice(watched: FakeCluster, writes: Writes) -> None:
    writes.refuse = ApiError(403, "Forbidden", "no card is left")
    writes.proceed.clear()
    watched.submit("first", **using("gpu"))
    assert writes.started.wait(30)
    watched.submit("stranded", **using("gpu"))
    watched.wait_refused("stranded")
    watched.api.delete(f"{PODS}/first", {"gracePeriodSeconds": 0})
    writes.proceed.set()
    watched.api.create(PODS, {"metadata": {"name": "other"}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    watched.wait_bound("other")
    writes.refuse = None
    assert not watched.node_of("stranded"), "no event tells that the claim in flight was given up"
    watched.api.patch(f"{SLICES}/n1-gpu.mgpu.io", {"metadata": {"annotations": {"mgpu.io/wake": "1"}}})
    watched.wait_bound("stranded")


def test_failed_binding_releases_the_claim(cluster: FakeCluster, claims: FakeCluster) -> None:
    claims.api.create(CLAIMS, claim("c", share(40, "8Gi")))
    claims.submit("p", resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}], schedulingGates=[{"name": "wait"}])

    written: Json = {}

    class Refusing(Api):
        refusals = 1

        def create(self, path: str, body: Any, **query: object) -> Json:
            if path.endswith("/binding"):
                if self.refusals:
                    self.refusals -= 1
                    raise ApiError(409, "Conflict", "no card is left")
                written.update(cluster.pod("q")["status"])  # A poll of the test could come after the second attempt.
            return cluster.api.create(path, body, **query)

    cluster.submit("q", schedulerName="second", resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    loop = Scheduling(Refusing(cluster.api._server), scheduler="second", backoff=(0.02, 0.2))
    loop.start()
    try:
        cluster.wait_bound("q")
    finally:
        loop.stop()
    assert any("no card is left" in row["message"] for row in written["conditions"] if row["type"] == "PodScheduled")
    assert [row["name"] for row in cluster.api.get(f"{CLAIMS}/c")["status"]["reservedFor"]] == ["q"]


def test_extended_resource_gets_a_claim_on_a_node_without_it(claims: FakeCluster) -> None:
    whole = "nvidia.com/gpu"
    claims.api.create(CLASSES, device_class("whole", extendedResourceName=whole))
    claims.submit("p", {whole: "1"})
    assert claims.wait_bound("p") == "n1"
    extended = claims.pod("p")["status"]["extendedResourceClaimStatus"]
    name = extended["resourceClaimName"]
    assert name.startswith("p-extended-resources-")
    request_name = "container-0-request-0"
    mapping = {"containerName": "c", "resourceName": whole, "requestName": request_name}
    assert extended["requestMappings"] == [mapping]
    found = claims.api.get(f"{CLAIMS}/{name}")
    assert found["metadata"]["annotations"] == {"resource.kubernetes.io/extended-resource-claim": "true"}
    row = found["status"]["allocation"]["devices"]["results"][0]
    assert (row["request"], row["consumedCapacity"]) == (request_name, {"cores": "100", "memory": "80Gi"})
    claims.api.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
    claims.wait_gone(f"{CLAIMS}/{name}")


def test_claim_of_an_earlier_attempt_for_extended_resources_is_replaced(cluster: FakeCluster) -> None:
    cluster.node("n1")
    cluster.api.create(SLICES, device_slice("n1", card(0)))
    cluster.api.create(CLASSES, device_class("whole", extendedResourceName="nvidia.com/gpu"))
    pod = cluster.submit("p", {"nvidia.com/gpu": "1"})
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod["metadata"]["uid"], "controller": True}
    stale = claim("stale", request("container-0-request-0", deviceClassName="whole"))
    marks = {"resource.kubernetes.io/extended-resource-claim": "true"}
    stale["metadata"] |= {"ownerReferences": [owner], "annotations": marks, "finalizers": [FINALIZER]}
    cluster.api.create(CLAIMS, stale)
    cluster.start_scheduling()
    cluster.wait_bound("p")
    assert not cluster.exists(f"{CLAIMS}/stale")


def test_extender_is_asked_about_extended_resources_and_not_about_claims(
    cluster: FakeCluster, extender: FakeExtender
) -> None:
    cluster.node("n1")
    cluster.api.create(SLICES, device_slice("n1", card(0), card(1)))
    cluster.api.create(CLASSES, device_class())
    cluster.api.create(CLASSES, device_class("whole", extendedResourceName="nvidia.com/gpu"))
    cluster.api.create(CLAIMS, claim("c", share(40, "8Gi")))
    cluster.start_scheduling(Extender(extender.url, managed={"nvidia.com/gpu": False, "mgpu.io/claims": True}))
    row = {"name": "gpu", "resourceClaimName": "c"}
    cluster.submit("claiming", resourceClaims=[row])
    cluster.submit("marked", {"mgpu.io/claims": "0"}, resourceClaims=[row])
    cluster.submit("extended", {"nvidia.com/gpu": "1"})
    for name in ("claiming", "marked", "extended"):
        cluster.wait_bound(name)
    assert {body["Pod"]["metadata"]["name"] for _, body in extender.asked} == {"marked", "extended"}


def test_extended_resource_of_the_node_itself_needs_no_claim(claims: FakeCluster) -> None:
    claims.api.create(CLASSES, device_class("whole", extendedResourceName="nvidia.com/gpu"))
    claims.node("n3", **{"nvidia.com/gpu": "1"})
    claims.submit("p", {"nvidia.com/gpu": "1"}, nodeSelector={"kubernetes.io/hostname": "n3"})
    claims.api.patch("/api/v1/nodes/n3", {"metadata": {"labels": {"kubernetes.io/hostname": "n3"}}})
    assert claims.wait_bound("p") == "n3"
    assert "extendedResourceClaimStatus" not in claims.pod("p")["status"]
    claims.submit("q", {"nvidia.com/gpu": "1"}, nodeSelector={"kubernetes.io/hostname": "n3"})
    assert "1 Insufficient nvidia.com/gpu" in claims.wait_refused("q")


def on_node(node: str) -> Json:
    return {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]}
