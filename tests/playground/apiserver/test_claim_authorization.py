"""The additional rights for statuses of ResourceClaims (DRAResourceClaimGranularStatusAuthorization)."""

from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.model.resource_claims import DRIVER
from playground.apiserver import User
from tests.playground.apiserver.api import Api, Reply
from tests.playground.apiserver.conftest import served
from tests.playground.apiserver.test_authorization import NAME, Server, rule
from tests.playground.claim_objects import ROOT, claim, share
from tests.waiting import until

pytestmark = pytest.mark.kubernetes(1, 34)

TOKENS = {"admin": User("kubernetes-admin"), "worker": User(NAME, ("system:serviceaccounts",))}
ON_NODE = {"admin": User("kubernetes-admin"), "worker": User(NAME, ("system:serviceaccounts",), node="n1")}
GROUP = "resource.k8s.io"
CLAIMS = f"{ROOT}/namespaces/ns/resourceclaims"
RESULT = {"request": "gpu", "driver": DRIVER, "pool": "n1", "device": "card-0"}
FIELDS = [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
ALLOCATION = {"devices": {"results": [RESULT]}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": FIELDS}]}}
DEVICE = {"driver": DRIVER, "pool": "n1", "device": "card-0"}


@pytest.fixture(params=["playground", "real"])
def server(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Server]:
    """An API server whose worker may read claims and write their status, and nothing more."""
    yield from _server(tmp_path, TOKENS, real=request.param == "real")


@pytest.fixture
def node_server(tmp_path: Any) -> Iterator[Server]:
    """The same, with a worker whose token is bound to the node n1. A real token file cannot bind tokens."""
    yield from _server(tmp_path, ON_NODE, real=False)


def _server(folder: Any, tokens: dict[str, User], *, real: bool) -> Iterator[Server]:
    with served(folder, tokens, [NAME], real=real) as (url, ca, asked):
        admin, worker = (Api(url, str(ca), token, folder, real=real) for token in tokens)
        admin.ok("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
        found = Server(admin, worker, asked)
        found.give("ClusterRole", "claims", rule("get", "resourceclaims", GROUP),
                   rule("get update patch", "resourceclaims/status", GROUP))  # fmt: skip
        admin.ok("POST", CLAIMS, claim("c", share(30, "8Gi")))
        found.allowed("GET", f"{CLAIMS}/c")
        yield found
        admin.close()
        worker.close()


def allocate(by: Api) -> Reply:
    return by.call("PUT", f"{CLAIMS}/c/status", {**by.get(f"{CLAIMS}/c"), "status": {"allocation": ALLOCATION}})


def report(by: Api, method: str = "PUT") -> Reply:
    """Write the status of the device, by a replacement or a patch."""
    status = {"allocation": ALLOCATION, "devices": [DEVICE]}
    if method == "PATCH":
        return by.patch(f"{CLAIMS}/c/status", {"status": {"devices": [DEVICE]}})
    return by.call("PUT", f"{CLAIMS}/c/status", {**by.get(f"{CLAIMS}/c"), "status": status})


def refusal(reply: Reply) -> tuple[int, str, str]:
    cause = reply.body["details"]["causes"][0]
    return reply.code, cause["field"], cause["reason"]


@pytest.mark.kubernetes(1, 36)
def test_allocation_needs_the_right_to_bind(server: Server) -> None:
    found = allocate(server.worker)
    assert (found.code, refusal(found)[2]) == (422, "FieldValueForbidden")
    assert "resourceclaims/binding" in found.message
    server.give("ClusterRole", "binding", rule("update", "resourceclaims/binding", GROUP))
    until(lambda: allocate(server.worker).code == 200)


@pytest.mark.kubernetes(1, 36)
def test_right_to_bind_in_one_namespace_does_not_suffice(server: Server) -> None:
    server.give("Role", "binding", rule("update", "resourceclaims/binding", GROUP))
    server.give("Role", "maps", rule("list", "configmaps"))
    server.allowed("GET", "/api/v1/namespaces/ns/configmaps")  # a real API server reads roles from a cache
    assert allocate(server.worker).code == 422


def test_unchanged_status_needs_no_additional_right(server: Server) -> None:
    allocate(server.admin)
    assert allocate(server.worker).code == 200


@pytest.mark.kubernetes(1, 36)
def test_device_needs_the_right_of_its_driver(server: Server) -> None:
    allocate(server.admin)
    found = report(server.worker)
    assert (found.code, refusal(found)[2]) == (422, "FieldValueForbidden")
    assert "arbitrary-node:update" in found.message
    verbs = "arbitrary-node:update associated-node:update"
    server.give("ClusterRole", "other", rule(verbs, "resourceclaims/driver", GROUP, "other.example.com"))
    assert report(server.worker).code == 422
    server.give("ClusterRole", "driver", rule("arbitrary-node:update", "resourceclaims/driver", GROUP, DRIVER))
    until(lambda: report(server.worker).code == 200)


@pytest.mark.kubernetes(1, 36)
def test_verb_is_that_of_the_request(server: Server) -> None:
    allocate(server.admin)
    server.give("ClusterRole", "driver", rule("arbitrary-node:patch", "resourceclaims/driver", GROUP, DRIVER))
    assert report(server.worker).code == 422
    until(lambda: report(server.worker, "PATCH").code == 200)


@pytest.mark.kubernetes(1, 36)
def test_associated_node_needs_a_token_of_that_node(server: Server) -> None:
    allocate(server.admin)
    server.give("ClusterRole", "driver", rule("associated-node:update", "resourceclaims/driver", GROUP, DRIVER))
    server.give("Role", "maps", rule("list", "configmaps"))
    server.allowed("GET", "/api/v1/namespaces/ns/configmaps")
    assert report(server.worker).code == 422


def test_associated_node_suffices_on_the_node_of_the_claim(node_server: Server) -> None:
    allocate(node_server.admin)
    node_server.give("ClusterRole", "driver", rule("associated-node:update", "resourceclaims/driver", GROUP, DRIVER))
    assert report(node_server.worker).code == 200
    right = {(row.verb, row.resource) for row in node_server.asked() if row.allowed}
    assert ("associated-node:update", "resourceclaims/driver") in right


def test_associated_node_does_not_suffice_for_a_claim_of_another_node(node_server: Server) -> None:
    fields = [{**FIELDS[0], "values": ["n2"]}]
    elsewhere = {**ALLOCATION, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]}}
    whole = {**node_server.admin.get(f"{CLAIMS}/c"), "status": {"allocation": elsewhere}}
    node_server.admin.ok("PUT", f"{CLAIMS}/c/status", whole)
    node_server.give("ClusterRole", "driver", rule("associated-node:patch", "resourceclaims/driver", GROUP, DRIVER))
    assert report(node_server.worker, "PATCH").code == 422
