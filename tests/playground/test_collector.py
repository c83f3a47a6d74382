"""What is owned, and pods of nodes that are gone, on an API server: as `kubectl delete --cascade` has it."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from mgpu.kube import Api, ApiError
from playground.apiserver import ApiServer, User, running
from playground.collector import Collector
from playground.installation import manifests
from tests.waiting import until

Json = dict[str, Any]
PODS, OWNERS = "/api/v1/namespaces/default/pods", "/apis/lsalab.nthu/v1/namespaces/default/mtgpupods"


@pytest.fixture
def api() -> Iterator[Api]:
    """With both CRDs, a node, and a collector."""
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url:
        made = Api(client.Configuration(host=url, api_key={"authorization": "Bearer admin"}))
        for crd in (raw for raw in manifests() if raw["kind"] == "CustomResourceDefinition"):
            made.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        made.create("/api/v1/nodes", {"metadata": {"name": "n1"}})
        collector = Collector(made, node_seconds=0.1)
        collector.start()
        yield made
        collector.stop()
        made.close()


def owner(api: Api, name: str = "owner", **metadata: Any) -> Json:
    spec = {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}
    body = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "metadata": {"name": name, **metadata}, "spec": spec}
    return api.create(OWNERS, body)


def owned(api: Api, by: Json, name: str = "owned", *, blocks: bool = True, **spec: Any) -> Json:
    ref = {"apiVersion": by["apiVersion"], "kind": by["kind"], **{k: by["metadata"][k] for k in ("name", "uid")}}
    metadata = {"name": name, "ownerReferences": [{**ref, "controller": True, "blockOwnerDeletion": blocks}]}
    return api.create(PODS, {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}], **spec}})


def there(api: Api, path: str) -> Json | None:
    try:
        return api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def test_what_is_owned_goes_after_its_owner(api: Api) -> None:
    owned(api, owner(api))
    other = owned(api, owner(api, "other"), "stays")
    api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Background"})
    until(lambda: not there(api, f"{PODS}/owned"))
    assert api.get(f"{PODS}/stays")["metadata"]["uid"] == other["metadata"]["uid"]


def test_foreground_what_is_owned_goes_first(api: Api) -> None:
    owned(api, owner(api), nodeName="n1")
    api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Foreground"})
    until(lambda: api.get(f"{PODS}/owned")["metadata"].get("deletionTimestamp"))
    assert api.get(f"{OWNERS}/owner")["metadata"]["finalizers"] == ["foregroundDeletion"]
    api.delete(f"{PODS}/owned", {"gracePeriodSeconds": 0})
    until(lambda: not there(api, f"{OWNERS}/owner"))


def test_foreground_waits_for_nobody_that_does_not_block(api: Api) -> None:
    owned(api, owner(api), nodeName="n1", blocks=False)
    api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Foreground"})
    until(lambda: not there(api, f"{OWNERS}/owner"))


def test_orphans_stay_and_are_nobodys(api: Api) -> None:
    made = owned(api, owner(api))
    api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Orphan"})
    until(lambda: not there(api, f"{OWNERS}/owner"))
    metadata = api.get(f"{PODS}/owned")["metadata"]
    assert metadata["uid"] == made["metadata"]["uid"]
    assert "ownerReferences" not in metadata


def test_a_successor_of_the_owners_name_is_another_owner(api: Api) -> None:
    first = owner(api)
    api.delete(f"{OWNERS}/owner")
    owner(api)
    owned(api, first)
    until(lambda: not there(api, f"{PODS}/owned"))
    assert there(api, f"{OWNERS}/owner")


def test_finalizers_of_others_are_left_alone(api: Api) -> None:
    owned(api, owner(api, finalizers=["mgpu.io/mtgpupod"]))
    api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Foreground"})
    until(lambda: not there(api, f"{PODS}/owned"))
    until(lambda: api.get(f"{OWNERS}/owner")["metadata"]["finalizers"] == ["mgpu.io/mtgpupod"])


def test_pods_of_a_node_that_is_gone_fail_and_go(api: Api) -> None:
    api.create("/api/v1/nodes", {"metadata": {"name": "n2"}})
    for node in ("n1", "n2"):
        spec = {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}
        api.create(PODS, {"metadata": {"name": f"on-{node}", "finalizers": ["a.b/c"]}, "spec": spec})
    api.delete("/api/v1/nodes/n2")
    gone = until(lambda: (pod := api.get(f"{PODS}/on-n2"))["metadata"].get("deletionTimestamp") and pod)
    assert gone["status"]["phase"] == "Failed"
    assert [row["reason"] for row in gone["status"]["conditions"]] == ["DeletionByPodGC"]
    assert "deletionTimestamp" not in api.get(f"{PODS}/on-n1")["metadata"]


def test_a_device_goes_with_its_node(api: Api) -> None:
    node = api.create("/api/v1/nodes", {"metadata": {"name": "n2"}})
    devices = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
    ref = {"apiVersion": "v1", "kind": "Node", "name": "n2", "uid": node["metadata"]["uid"]}
    api.create(devices, {"metadata": {"name": "n2", "ownerReferences": [ref]}, "spec": {"devices": []}})
    api.delete("/api/v1/nodes/n2")
    until(lambda: not there(api, f"{devices}/n2"))
