"""ResourceClaims in the scheduling loop, against our API server and its controllers."""

from collections.abc import Iterator
from typing import Any

import pytest

from playground.controller_manager import ControllerManager
from playground.installation import manifests
from tests.playground.claim_objects import (
    CLAIMS,
    CLASSES,
    SLICES,
    TEMPLATES,
    card,
    device_class,
    device_slice,
    results_of,
    share,
    template,
)
from tests.playground.fake_cluster import PODS, FakeCluster, Json
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
    claim: Json = claims.api.get(f"{CLAIMS}/{name}")
    found = claim["status"]["allocation"]["devices"]["results"]
    assert [{k: v for k, v in row.items() if k != "shareID"} for row in found] == [
        {
            "request": "gpu",
            "driver": "gpu.mgpu.io",
            "pool": "n1",
            "device": "card-0",
            "consumedCapacity": {"cores": "30", "memory": "8Gi"},
        }
    ]
    assert claim["metadata"]["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert [row["name"] for row in claim["status"]["reservedFor"]] == ["p"]
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
