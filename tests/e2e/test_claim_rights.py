"""manifests/components/dra/rbac.yaml against what the processes do: it has no right that is never used."""

from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.model.resource_claims import API, CLAIMS, DRIVER, SLICES
from playground.apiserver.authorization import Request
from playground.cluster import Cluster
from playground.installation import manifests
from playground.nodes import MGPU, NodeSpec
from tests.e2e.bench import Bench, share
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import A100
from tests.e2e.test_rights import account, granted, used
from tests.waiting import until

_TEMPLATES = f"/apis/{API}/namespaces/default/resourceclaimtemplates"
_REPAIR = "where an allocation that mgpu has not decided does not fit (scheduler.claims.repair)"
_OFF = "where dra.enabled is false again, or a slice has another name"
RARE = {
    ("mgpu-scheduler", "get", "resourceclaims"): _REPAIR,
    ("mgpu-scheduler", "patch", "resourceclaims"): _REPAIR,
    ("mgpu-scheduler", "update", "resourceclaims/status"): _REPAIR,
    ("mgpu-scheduler", "update", "resourceclaims/binding"): _REPAIR,
    ("mgpu-scheduler", "patch", "resourceslices"): "where kube-scheduler does not retry a pod that fits",
    ("mgpu-deviceplugin", "get", "resourceslices"): _OFF,
    ("mgpu-deviceplugin", "delete", "resourceslices"): _OFF,
}
"""Who, verb, resource: rights that this story need not use, and what they are for."""
UNSEEN = {("mgpu-deviceplugin", "associated-node:update", "resourceclaims/driver")}
"""Rights that a real API server asks for without a request of their own, so that its audit log does not show them."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient([NodeSpec("n1", [A100], dict(MGPU))], components=("dra",)) as made:
        yield made


def component_rights() -> Iterator[Request]:
    """Yield each right that the component adds to the base."""
    base = {right for right, _ in granted()}
    for manifest in manifests(components=("dra",)):
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "ClusterRole" and name.endswith("-claims"):
            user = f"system:serviceaccount:mgpu-system:{name.removesuffix('-claims')}"
            rules: list[dict[str, Any]] = manifest["rules"]
            rights = {Request(user, v, g, r) for rule in rules for v in rule["verbs"] for g, r in _resources(rule)}
            assert not rights & base
            yield from rights


def _resources(rule: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((group, resource) for group in rule["apiGroups"] for resource in rule["resources"])


@pytest.mark.kubernetes(1, 35)
def test_every_right_of_the_component_is_used_but_for_the_rare_ones(bench: Bench) -> None:
    api = bench.cluster.api
    exactly = {"deviceClassName": "mgpu", "capacity": {"requests": {"cores": "30", "memory": "8Gi"}}}
    spec = {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
    api.create(_TEMPLATES, {"metadata": {"name": "share"}, "spec": spec})
    own = {"name": "c", "image": "cuda", "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "share"}]
    meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "claimed"}}
    bench.create({**meta, "spec": {"containers": [own], "resourceClaims": claims}})
    bench.runs("claimed")
    (claim,) = api.list(CLAIMS)[0]
    assert [row["driver"] for row in claim["status"]["devices"]] == [DRIVER]

    before = api.list(SLICES)[0][0]["metadata"]["resourceVersion"]
    bench.create(share("classic"))  # The agent publishes what it leaves free.
    bench.runs("classic")
    until(lambda: api.list(SLICES)[0][0]["metadata"]["resourceVersion"] != before)

    requests = bench.cluster.requests()
    unused = {(account(r), r.verb, r.resource) for r in component_rights() if not used(r, requests)}
    assert unused <= RARE.keys() | (UNSEEN if bench.cluster.assets else set())
    assert RARE.keys() <= {(account(r), r.verb, r.resource) for r in component_rights()}
