"""The controller that makes, frees and deletes the ResourceClaims of pods."""

from collections.abc import Iterator
from typing import Any

import pytest

from playground.controller_manager import ControllerManager
from playground.controller_manager.pod_claims import CLAIM_ANNOTATION, FINALIZER
from playground.installation import manifests
from tests.playground.claim_objects import CLAIMS, SLICES, TEMPLATES, card, claim, device_slice, result, share, template
from tests.playground.fake_cluster import EVENTS, PODS, FakeCluster, Json
from tests.waiting import until

ALLOCATION = {"devices": {"results": [result(0)]}}


@pytest.fixture
def managed(cluster: FakeCluster) -> Iterator[FakeCluster]:
    """With the CRDs of mgpu, the node n1, a template `share`, and all controllers."""
    for crd in (raw for raw in manifests() if raw["kind"] == "CustomResourceDefinition"):
        cluster.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    cluster.node("n1")
    cluster.api.create(TEMPLATES, template("share", share(30, "8Gi")))
    controllers = ControllerManager(cluster.api, node_seconds=0.1)
    controllers.start()
    yield cluster
    controllers.stop()


def submit(cluster: FakeCluster, name: str, **spec: Any) -> Json:
    """Create a pod with a claim from the template."""
    rows = [{"name": "gpu", "resourceClaimTemplateName": "share"}]
    return cluster.submit(name, **{"resourceClaims": rows, **spec})


def generated(cluster: FakeCluster, pod: str) -> Json:
    """Wait for the claim of a pod and return it."""
    rows = until(lambda: cluster.pod(pod)["status"].get("resourceClaimStatuses"))
    return cluster.api.get(f"{CLAIMS}/{rows[0]['resourceClaimName']}")


def allocate(cluster: FakeCluster, made: Json, *consumers: Json) -> str:
    """Allocate a claim for pods, as kube-scheduler does, and return its path."""
    path = f"{CLAIMS}/{made['metadata']['name']}"
    cluster.api.patch(path, {"metadata": {"finalizers": [FINALIZER]}})
    rows = [{"resource": "pods", "name": p["metadata"]["name"], "uid": p["metadata"]["uid"]} for p in consumers]
    cluster.api.patch(f"{path}/status", {"status": {"allocation": ALLOCATION, "reservedFor": rows}})
    return path


def finish(cluster: FakeCluster, pod: str) -> None:
    cluster.api.patch(f"{PODS}/{pod}/status", {"status": {"phase": "Succeeded"}})


def test_claim_is_made_from_the_template(managed: FakeCluster) -> None:
    body = template("marked", share(30, "8Gi"))
    body["spec"]["metadata"] = {"labels": {"a": "b"}, "annotations": {"c": "d"}}
    managed.api.create(TEMPLATES, body)
    pod = submit(managed, "p", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "marked"}])
    made = generated(managed, "p")
    meta = made["metadata"]
    assert meta["name"].startswith("p-gpu-")
    assert meta["labels"] == {"a": "b"}
    assert meta["annotations"] == {"c": "d", CLAIM_ANNOTATION: "gpu"}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod["metadata"]["uid"]}
    assert meta["ownerReferences"] == [{**owner, "controller": True, "blockOwnerDeletion": True}]
    requests = made["spec"]["devices"]["requests"]
    assert requests[0]["exactly"]["capacity"]["requests"] == {"cores": "30", "memory": "8Gi"}


def test_each_claim_of_a_pod_is_made_once(managed: FakeCluster) -> None:
    rows = [{"name": name, "resourceClaimTemplateName": "share"} for name in ("a", "b")]
    submit(managed, "p", resourceClaims=[*rows, {"name": "c", "resourceClaimName": "own"}])
    statuses = until(lambda: managed.pod("p")["status"].get("resourceClaimStatuses"))
    managed.api.patch(f"{PODS}/p", {"metadata": {"labels": {"touched": "1"}}})
    submit(managed, "q")
    generated(managed, "q")
    assert [row["name"] for row in statuses] == ["a", "b"]
    names = {item["metadata"]["name"].rpartition("-")[0] for item in managed.api.list(CLAIMS)[0]}
    assert names == {"p-a", "p-b", "q-gpu"}


def test_deleted_claim_of_a_waiting_pod_is_made_again(managed: FakeCluster) -> None:
    submit(managed, "p")
    first = generated(managed, "p")["metadata"]["name"]
    managed.api.delete(f"{CLAIMS}/{first}")
    until(lambda: generated_name(managed, "p") != first)


def generated_name(cluster: FakeCluster, pod: str) -> str:
    return str(cluster.pod(pod)["status"]["resourceClaimStatuses"][0]["resourceClaimName"])


def test_missing_template_is_reported_and_waited_for(managed: FakeCluster) -> None:
    submit(managed, "p", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "later"}])
    until(lambda: "FailedResourceClaimCreation" in {event["reason"] for event in managed.api.list(EVENTS)[0]})
    managed.api.create(TEMPLATES, template("later", share(30, "8Gi")))
    generated(managed, "p")


def test_claim_of_a_pod_that_has_ended_is_deallocated_and_deleted(managed: FakeCluster) -> None:
    pod = submit(managed, "p", nodeName="n1")
    path = allocate(managed, generated(managed, "p"), pod)
    finish(managed, "p")
    managed.wait_gone(path)
    assert managed.phase("p") == "Succeeded"


def test_claim_of_a_deleted_pod_is_deallocated_and_deleted(managed: FakeCluster) -> None:
    pod = submit(managed, "p", nodeName="n1")
    path = allocate(managed, generated(managed, "p"), pod)
    managed.api.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
    managed.wait_gone(path)


def test_shared_claim_stays_allocated_for_its_other_consumers(managed: FakeCluster) -> None:
    made = managed.api.create(CLAIMS, claim("c", share(30, "8Gi")))
    rows = [{"name": "gpu", "resourceClaimName": "c"}]
    pods = [managed.submit(name, nodeName="n1", resourceClaims=rows) for name in ("p", "q")]
    path = allocate(managed, made, *pods)
    finish(managed, "p")
    until(lambda: [row["name"] for row in managed.api.get(path)["status"]["reservedFor"]] == ["q"])
    assert managed.api.get(path)["status"]["allocation"] == ALLOCATION
    finish(managed, "q")
    until(lambda: managed.api.get(path)["status"] == {})
    until(lambda: "finalizers" not in managed.api.get(path)["metadata"])


def test_consumer_that_never_existed_is_removed(managed: FakeCluster) -> None:
    made = managed.api.create(CLAIMS, claim("c", share(30, "8Gi")))
    path = allocate(managed, made, {"metadata": {"name": "ghost", "uid": "ghost-uid"}})
    until(lambda: managed.api.get(path)["status"] == {})


def test_allocation_without_the_finalizer_is_not_removed(managed: FakeCluster) -> None:
    managed.api.create(CLAIMS, claim("c", share(30, "8Gi")))
    ghost = {"resource": "pods", "name": "ghost", "uid": "ghost-uid"}
    managed.api.patch(f"{CLAIMS}/c/status", {"status": {"allocation": ALLOCATION, "reservedFor": [ghost]}})
    until(lambda: managed.api.get(f"{CLAIMS}/c")["status"] == {"allocation": ALLOCATION})


def test_deleted_claim_waits_for_its_consumers(managed: FakeCluster) -> None:
    made = managed.api.create(CLAIMS, claim("c", share(30, "8Gi")))
    pod = managed.submit("p", nodeName="n1", resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    path = allocate(managed, made, pod)
    managed.api.delete(path)
    assert managed.api.get(path)["status"]["allocation"] == ALLOCATION
    finish(managed, "p")
    managed.wait_gone(path)


def test_pod_that_is_bound_without_the_scheduler_becomes_a_consumer(managed: FakeCluster) -> None:
    made = managed.api.create(CLAIMS, claim("c", share(30, "8Gi")))
    rows = [{"name": "gpu", "resourceClaimName": "c"}]
    path = allocate(managed, made, managed.submit("p", nodeName="n1", resourceClaims=rows))
    managed.submit("q", nodeName="n1", resourceClaims=rows)
    until(lambda: {row["name"] for row in managed.api.get(path)["status"]["reservedFor"]} == {"p", "q"})
    later = managed.api.create(CLAIMS, claim("later", share(30, "8Gi")))
    pod = managed.submit("r", nodeName="n1", resourceClaims=[{"name": "gpu", "resourceClaimName": "later"}])
    managed.api.patch(f"{CLAIMS}/later/status", {"status": {"allocation": ALLOCATION}})
    uid = pod["metadata"]["uid"]
    until(lambda: [row["uid"] for row in managed.api.get(f"{CLAIMS}/later")["status"].get("reservedFor", ())] == [uid])
    assert later["status"] == {}


def test_slices_of_a_deleted_node_are_deleted(managed: FakeCluster) -> None:
    node = managed.api.get("/api/v1/nodes/n1")["metadata"]
    body = device_slice("n1", card(0))
    body["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node["uid"]}]
    managed.api.create(SLICES, body)
    managed.api.delete("/api/v1/nodes/n1")
    managed.wait_gone(f"{SLICES}/n1-gpu.mgpu.io")
