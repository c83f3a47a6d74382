"""The garbage collector with each propagation policy, and pods of deleted nodes."""

from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.kube import Api
from playground.controller_manager import ControllerManager
from playground.installation import manifests
from tests.playground.fake_cluster import PODS, FakeCluster, Json
from tests.waiting import until

OWNERS = "/apis/lsalab.nthu/v1/namespaces/default/mtgpupods"


@pytest.fixture
def collected(cluster: FakeCluster) -> Iterator[FakeCluster]:
    """With both CRDs, a node, and a collector."""
    for crd in (raw for raw in manifests() if raw["kind"] == "CustomResourceDefinition"):
        cluster.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    cluster.api.create("/api/v1/nodes", {"metadata": {"name": "n1"}})
    controllers = ControllerManager(cluster.api, node_seconds=0.1)
    controllers.start()
    yield cluster
    controllers.stop()


def owner(api: Api, name: str = "owner", **metadata: Any) -> Json:
    spec = {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}
    body = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "metadata": {"name": name, **metadata}, "spec": spec}
    return api.create(OWNERS, body)


def owned(api: Api, by: Json, name: str = "owned", *, blocks: bool = True, **spec: Any) -> Json:
    ref = {"apiVersion": by["apiVersion"], "kind": by["kind"], **{k: by["metadata"][k] for k in ("name", "uid")}}
    metadata = {"name": name, "ownerReferences": [{**ref, "controller": True, "blockOwnerDeletion": blocks}]}
    return api.create(PODS, {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}], **spec}})


def test_dependent_of_deleted_owner_is_deleted(collected: FakeCluster) -> None:
    owned(collected.api, owner(collected.api))
    other = owned(collected.api, owner(collected.api, "other"), "stays")
    collected.api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Background"})
    collected.wait_gone(f"{PODS}/owned")
    assert collected.api.get(f"{PODS}/stays")["metadata"]["uid"] == other["metadata"]["uid"]


def test_foreground_deletion_deletes_dependents_before_the_owner(collected: FakeCluster) -> None:
    owned(collected.api, owner(collected.api), nodeName="n1")
    collected.api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Foreground"})
    until(lambda: collected.api.get(f"{PODS}/owned")["metadata"].get("deletionTimestamp"))
    assert collected.api.get(f"{OWNERS}/owner")["metadata"]["finalizers"] == ["foregroundDeletion"]
    collected.api.delete(f"{PODS}/owned", {"gracePeriodSeconds": 0})
    collected.wait_gone(f"{OWNERS}/owner")


def test_foreground_deletion_does_not_wait_for_dependents_that_do_not_block(collected: FakeCluster) -> None:
    owned(collected.api, owner(collected.api), nodeName="n1", blocks=False)
    collected.api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Foreground"})
    collected.wait_gone(f"{OWNERS}/owner")


def test_orphan_deletion_keeps_dependents_without_owner(collected: FakeCluster) -> None:
    made = owned(collected.api, owner(collected.api))
    collected.api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Orphan"})
    collected.wait_gone(f"{OWNERS}/owner")
    metadata = collected.api.get(f"{PODS}/owned")["metadata"]
    assert metadata["uid"] == made["metadata"]["uid"]
    assert "ownerReferences" not in metadata


def test_dependent_of_a_recreated_owner_is_deleted(collected: FakeCluster) -> None:
    first = owner(collected.api)
    collected.api.delete(f"{OWNERS}/owner")
    owner(collected.api)
    owned(collected.api, first)
    collected.wait_gone(f"{PODS}/owned")
    assert collected.exists(f"{OWNERS}/owner")


def test_foreground_deletion_keeps_other_finalizers(collected: FakeCluster) -> None:
    owned(collected.api, owner(collected.api, finalizers=["mgpu.io/mtgpupod"]))
    collected.api.delete(f"{OWNERS}/owner", {"propagationPolicy": "Foreground"})
    collected.wait_gone(f"{PODS}/owned")
    until(lambda: collected.api.get(f"{OWNERS}/owner")["metadata"]["finalizers"] == ["mgpu.io/mtgpupod"])


def test_pods_of_a_deleted_node_fail_and_are_deleted(collected: FakeCluster) -> None:
    collected.api.create("/api/v1/nodes", {"metadata": {"name": "n2"}})
    for node in ("n1", "n2"):
        spec = {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}
        collected.api.create(PODS, {"metadata": {"name": f"on-{node}", "finalizers": ["a.b/c"]}, "spec": spec})
    collected.api.delete("/api/v1/nodes/n2")
    gone = until(lambda: (pod := collected.api.get(f"{PODS}/on-n2"))["metadata"].get("deletionTimestamp") and pod)
    assert gone["status"]["phase"] == "Failed"
    assert [row["reason"] for row in gone["status"]["conditions"]] == ["DeletionByPodGC"]
    assert "deletionTimestamp" not in collected.api.get(f"{PODS}/on-n1")["metadata"]


def test_device_of_a_deleted_node_is_deleted(collected: FakeCluster) -> None:
    node = collected.api.create("/api/v1/nodes", {"metadata": {"name": "n2"}})
    devices = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
    ref = {"apiVersion": "v1", "kind": "Node", "name": "n2", "uid": node["metadata"]["uid"]}
    collected.api.create(devices, {"metadata": {"name": "n2", "ownerReferences": [ref]}, "spec": {"devices": []}})
    collected.api.delete("/api/v1/nodes/n2")
    collected.wait_gone(f"{devices}/n2")
