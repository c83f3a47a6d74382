"""Contract of resource.k8s.io/v1: claims, templates, classes and the pods that use them."""

import uuid
from typing import Any

import pytest

from mgpu.model.resource_claims import DRIVER
from tests.playground.apiserver.api import MERGE, TABLE, Api, Reply, pod
from tests.playground.apiserver.hooks import Hooks, allow, deny, patched
from tests.playground.claim_objects import (
    CLASSES,
    ROOT,
    claim,
    claim_spec,
    device_class,
    request,
    share,
    template,
)

pytestmark = pytest.mark.kubernetes(1, 34)

SHARE = "3f1f5c2e-0f0c-4f6b-8a3e-0a3c7ad7a001"
STATUS_RULE = {
    "operations": ["UPDATE"],
    "apiGroups": ["resource.k8s.io"],
    "apiVersions": ["v1"],
    "resources": ["resourceclaims/status"],
    "scope": "Namespaced",
}
NEWLY_ALLOCATED = (
    "has(object.status) && has(object.status.allocation) && "
    "!(has(oldObject.status) && has(oldObject.status.allocation))"
)
OURS = f"object.status.allocation.devices.results.exists(r, r.driver == '{DRIVER}')"


@pytest.fixture
def claims(ns: str) -> str:
    """The path of the claims in the test's namespace."""
    return f"{ROOT}/namespaces/{ns}/resourceclaims"


def allocation(device: str = "card-0", **more: Any) -> dict[str, Any]:
    result = {"request": "gpu", "driver": DRIVER, "pool": "n1", "device": device, **more}
    return {"devices": {"results": [result]}}


def consumer(name: str = "p") -> dict[str, str]:
    return {"resource": "pods", "name": name, "uid": f"uid-{name}"}


def write_status(api: Api, claims: str, status: Any, name: str = "c") -> Reply:
    """Replace the status of a claim."""
    return api.call("PUT", f"{claims}/{name}/status", {**api.get(f"{claims}/{name}"), "status": status})


def refusal(reply: Reply) -> tuple[str, str]:
    """The field and the reason of the first cause of a 422."""
    assert reply.code == 422, reply
    cause = reply.body["details"]["causes"][0]
    return cause["field"], cause["reason"]


def test_kinds_are_discovered(api: Api) -> None:
    found = {row["name"]: row["namespaced"] for row in api.get(ROOT)["resources"]}
    expected = {"resourceclaims": True, "resourceclaims/status": True, "resourceclaimtemplates": True}
    expected |= {"resourceslices": False, "deviceclasses": False}
    assert expected.items() <= found.items()
    assert not {"resourceclaims/binding", "resourceclaims/driver"} & found.keys()


def test_claim_gets_defaults_and_canonical_quantities(api: Api, claims: str) -> None:
    made = api.ok("POST", claims, {**claim("c", share(30, "8192Mi")), "status": {"allocation": allocation()}})
    exactly = made["spec"]["devices"]["requests"][0]["exactly"]
    assert exactly["capacity"]["requests"] == {"cores": "30", "memory": "8Gi"}
    assert (exactly["allocationMode"], exactly["count"]) == ("ExactCount", 1)
    assert made["status"] == {}, "a client cannot create an allocated claim"
    assert "generation" not in made["metadata"]
    every = api.ok("POST", claims, claim("all", request(allocationMode="All")))
    assert "count" not in every["spec"]["devices"]["requests"][0]["exactly"]


def test_alternatives_get_defaults(api: Api, claims: str) -> None:
    rows = [{"name": "big", "deviceClassName": "mgpu"}, {"name": "small", "deviceClassName": "mgpu", "count": 2}]
    made = api.ok("POST", claims, claim("c", {"name": "gpu", "firstAvailable": rows}))
    found = made["spec"]["devices"]["requests"][0]["firstAvailable"]
    assert [(row["allocationMode"], row["count"]) for row in found] == [("ExactCount", 1), ("ExactCount", 2)]


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        (claim_spec({"name": "gpu"}), "spec.devices.requests[0]", "FieldValueRequired"),
        (claim_spec(request(name="")), "spec.devices.requests[0].name", "FieldValueInvalid"),
        (claim_spec(request(deviceClassName="")), "spec.devices.requests[0].exactly.deviceClassName",
         "FieldValueRequired"),
        pytest.param(claim_spec(request(), request()), "spec.devices.requests[1]", "FieldValueDuplicate",
                     marks=pytest.mark.kubernetes(1, 35)),
        (claim_spec(request(count=-1)), "spec.devices.requests[0].exactly.count", "FieldValueInvalid"),
        (claim_spec(request(count=2, allocationMode="All")), "spec.devices.requests[0].exactly.count",
         "FieldValueInvalid"),
        (claim_spec(request(allocationMode="Some")), "spec.devices.requests[0].exactly.allocationMode",
         "FieldValueNotSupported"),
        (claim_spec(request(selectors=[{}])), "spec.devices.requests[0].exactly.selectors[0].cel",
         "FieldValueRequired"),
        (claim_spec(request(selectors=[{"cel": {"expression": "nonsense("}}])),
         "spec.devices.requests[0].exactly.selectors[0].cel.expression", "FieldValueInvalid"),
        (claim_spec(request(selectors=[{"cel": {"expression": "1 + 1"}}])),
         "spec.devices.requests[0].exactly.selectors[0].cel.expression", "FieldValueInvalid"),
        (claim_spec(*(request(name=f"r{i}") for i in range(33))), "spec.devices.requests", "FieldValueTooMany"),
        (claim_spec(request(), constraints=[{"requests": ["other"], "matchAttribute": "a.b/c"}]),
         "spec.devices.constraints[0].requests[0]", "FieldValueInvalid"),
        (claim_spec(request(), constraints=[{"matchAttribute": "model"}]),
         "spec.devices.constraints[0].matchAttribute", "FieldValueInvalid"),
        (claim_spec(request(), config=[{"requests": ["gpu"]}]), "spec.devices.config[0].opaque",
         "FieldValueRequired"),
    ],
)  # fmt: skip
def test_claim_with_an_invalid_spec_is_refused(api: Api, claims: str, spec: Any, field: str, reason: str) -> None:
    reply = api.call("POST", claims, {"metadata": {"name": "c"}, "spec": spec})
    assert refusal(reply) == (field, reason)


def test_quantity_in_a_claim_must_be_well_formed(api: Api, claims: str) -> None:
    assert api.call("POST", claims, claim("c", share("thirty", "8Gi"))).code == 400


def test_spec_of_a_claim_is_immutable_and_its_metadata_is_not(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    changed = api.patch(f"{claims}/c", {"spec": claim_spec(share(40, "8Gi"))})
    assert refusal(changed) == ("spec", "FieldValueInvalid")
    assert "field is immutable" in changed.message
    assert api.patch(f"{claims}/c", {"metadata": {"annotations": {"a": "b"}}}).code == 200


def test_spec_of_a_template_is_immutable(api: Api, ns: str) -> None:
    templates = f"{ROOT}/namespaces/{ns}/resourceclaimtemplates"
    api.ok("POST", templates, template("t", share(30, "8Gi")))
    reply = api.patch(f"{templates}/t", {"spec": {"spec": claim_spec(share(40, "8Gi"))}})
    assert refusal(reply) == ("spec", "FieldValueInvalid")


def test_status_write_keeps_spec_and_metadata(api: Api, claims: str) -> None:
    made = api.ok("POST", claims, claim("c", share(30, "8Gi")))
    sent = {**made, "spec": claim_spec(share(90, "8Gi")), "status": {"allocation": allocation()}}
    sent["metadata"] = {**made["metadata"], "labels": {"a": "b"}, "finalizers": ["a.b/c"]}
    written = api.ok("PUT", f"{claims}/c/status", sent)
    assert written["spec"] == made["spec"]
    assert {k: v for k, v in written["metadata"].items() if k not in ("resourceVersion", "managedFields")} == {
        k: v for k, v in made["metadata"].items() if k not in ("resourceVersion", "managedFields")
    }
    assert written["status"]["allocation"] == allocation()


def test_allocation_is_immutable_but_can_be_removed_and_written_again(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    first = {"allocation": allocation(), "reservedFor": [consumer()]}
    assert write_status(api, claims, first).code == 200
    changed = write_status(api, claims, {**first, "allocation": allocation("card-1")})
    assert refusal(changed) == ("status.allocation", "FieldValueInvalid")
    assert "field is immutable" in changed.message
    kept = write_status(api, claims, {"reservedFor": [consumer()]})
    assert refusal(kept) == ("status.reservedFor", "FieldValueForbidden")
    assert write_status(api, claims, {}).body["status"] == {}
    assert write_status(api, claims, {**first, "allocation": allocation("card-1")}).code == 200


def test_allocation_names_devices_that_need_not_exist(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    found = allocation("no-such-card", shareID=SHARE, consumedCapacity={"cores": "1k"})
    assert write_status(api, claims, {"allocation": found}).body["status"] == {"allocation": found}


@pytest.mark.parametrize(
    ("result", "field"),
    [
        ({"request": "other"}, "request"),
        ({"driver": ""}, "driver"),
        ({"pool": "a//b"}, "pool"),
        ({"device": "Card_0"}, "device"),
        ({"shareID": "one"}, "shareID"),
    ],
)
def test_allocation_with_an_invalid_result_is_refused(api: Api, claims: str, result: Any, field: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    reply = write_status(api, claims, {"allocation": allocation(**result)})
    assert refusal(reply)[0] == f"status.allocation.devices.results[0].{field}"


def test_lists_of_a_status_are_limited(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    many = {"devices": {"results": [allocation(f"d-{i}")["devices"]["results"][0] for i in range(33)]}}
    found = refusal(write_status(api, claims, {"allocation": many}))
    assert found == ("status.allocation.devices.results", "FieldValueTooMany")
    users = [consumer(f"p{i}") for i in range(257)]
    found = refusal(write_status(api, claims, {"allocation": allocation(), "reservedFor": users}))
    assert found == ("status.reservedFor", "FieldValueTooMany")
    assert write_status(api, claims, {"allocation": allocation(), "reservedFor": users[:256]}).code == 200


@pytest.mark.kubernetes(1, 35)
def test_consumers_have_different_uids_and_all_fields(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    twice = {"allocation": allocation(), "reservedFor": [consumer(), consumer()]}
    assert refusal(write_status(api, claims, twice)) == ("status.reservedFor[1]", "FieldValueDuplicate")
    nameless = {"allocation": allocation(), "reservedFor": [{**consumer(), "name": ""}]}
    assert refusal(write_status(api, claims, nameless)) == ("status.reservedFor[0].name", "FieldValueRequired")


def test_consumer_can_be_removed_by_its_uid(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    write_status(api, claims, {"allocation": allocation(), "reservedFor": [consumer(), consumer("q")]})
    body = {"status": {"reservedFor": [{"$patch": "delete", "uid": "uid-p"}]}}
    reply = api.patch(f"{claims}/c/status", body, "application/strategic-merge-patch+json")
    assert reply.body["status"]["reservedFor"] == [consumer("q")]


def test_devices_of_a_status_are_allocated_ones_and_go_with_the_allocation(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    found = allocation(shareID=SHARE)
    ready = {"type": "Prepared", "status": "True", "reason": "Prepared", "message": ""}
    ready["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    row: dict[str, Any] = {"driver": DRIVER, "pool": "n1", "device": "card-0", "shareID": SHARE, "conditions": [ready]}
    row["data"] = {"any": ["thing"]}
    assert write_status(api, claims, {"allocation": found}).code == 200
    stored = write_status(api, claims, {"allocation": found, "devices": [row]})
    assert stored.body["status"]["devices"] == [row]
    other = write_status(api, claims, {"allocation": found, "devices": [{**row, "device": "card-1"}]})
    assert refusal(other) == ("status.devices[0]", "FieldValueInvalid")
    gone = write_status(api, claims, {"devices": [row]})
    assert gone.body["status"] == {}, "devices that are deallocated are removed"


def test_deleted_claim_gets_no_new_consumers(api: Api, claims: str) -> None:
    api.ok("POST", claims, {**claim("c", share(30, "8Gi")), "metadata": {"name": "c", "finalizers": ["a.b/c"]}})
    write_status(api, claims, {"allocation": allocation(), "reservedFor": [consumer()]})
    api.ok("DELETE", f"{claims}/c")
    more = {"allocation": allocation(), "reservedFor": [consumer(), consumer("q")]}
    assert refusal(write_status(api, claims, more)) == ("status.reservedFor", "FieldValueForbidden")
    api.patch(f"{claims}/c", {"metadata": {"finalizers": None}})
    assert api.call("GET", f"{claims}/c").code == 404


def test_admin_access_needs_a_label_of_the_namespace(api: Api, claims: str, ns: str) -> None:
    wanted = claim("c", request(adminAccess=True))
    assert refusal(api.call("POST", claims, wanted))[1] == "FieldValueForbidden"
    api.patch(f"/api/v1/namespaces/{ns}", {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}})
    assert api.call("POST", claims, wanted).code == 201


def test_class_has_valid_selectors_and_an_extended_resource(api: Api, name: str) -> None:
    made = api.ok("POST", CLASSES, device_class(name, extendedResourceName=f"example.com/{name}"))
    assert made["metadata"]["generation"] == 1
    assert api.patch(f"{CLASSES}/{name}", {"spec": {"extendedResourceName": None}}).body["metadata"]["generation"] == 2
    reply = api.call("POST", CLASSES, device_class(f"{name}-2", "device.nonsense("))
    assert refusal(reply)[0] == "spec.selectors[0].cel.expression"
    for bad in ("cpu", "kubernetes.io/gpu", "requests.a.b/c"):
        reply = api.call("POST", CLASSES, device_class(f"{name}-2", extendedResourceName=bad))
        assert refusal(reply)[0] == "spec.extendedResourceName"
    api.ok("DELETE", f"{CLASSES}/{name}")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"resourceClaims": [{"name": "gpu"}]}, "spec.resourceClaims[0]"),
        ({"resourceClaims": [{"name": "gpu", "resourceClaimName": "a", "resourceClaimTemplateName": "b"}]},
         "spec.resourceClaims[0]"),
        ({"resourceClaims": [{"name": "gpu", "resourceClaimName": "a"}] * 2}, "spec.resourceClaims[1].name"),
        ({"resourceClaims": [{"name": "GPU", "resourceClaimName": "a"}]}, "spec.resourceClaims[0].name"),
    ],
)  # fmt: skip
def test_pod_with_invalid_claims_is_refused(api: Api, pods: str, spec: Any, field: str) -> None:
    assert refusal(api.call("POST", pods, pod(spec=spec)))[0] == field


def test_container_names_claims_of_its_pod(api: Api, pods: str) -> None:
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}
    made = api.ok("POST", pods, pod(spec=spec, resources={"claims": [{"name": "gpu", "request": "one"}]}))
    assert made["spec"]["containers"][0]["resources"] == {"claims": [{"name": "gpu", "request": "one"}]}
    reply = api.call("POST", pods, pod("q", spec=spec, resources={"claims": [{"name": "other"}]}))
    assert refusal(reply) == ("spec.containers[0].resources.claims[0]", "FieldValueNotFound")
    changed = api.patch(f"{pods}/p", {"spec": {"resourceClaims": None}})
    assert changed.code == 422, "the claims of a pod are immutable"


def test_claims_in_the_status_of_a_pod_are_those_of_its_spec(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(spec={"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]}))
    statuses = [{"name": "gpu", "resourceClaimName": "p-gpu-x"}]
    written = api.patch(f"{pods}/p/status", {"status": {"resourceClaimStatuses": statuses}}).body
    assert written["status"]["resourceClaimStatuses"] == statuses
    reply = api.patch(f"{pods}/p/status", {"status": {"resourceClaimStatuses": [{"name": "other"}]}})
    assert refusal(reply)[0].startswith("status.resourceClaimStatuses[0]")


def test_extended_resource_claim_in_the_status_of_a_pod(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(resources={"limits": {"nvidia.com/gpu": "1"}}))
    mapping = {"containerName": "c", "resourceName": "nvidia.com/gpu", "requestName": "container-0-request-0"}
    extended = {"requestMappings": [mapping], "resourceClaimName": "p-extended-resources-x"}
    written = api.patch(f"{pods}/p/status", {"status": {"extendedResourceClaimStatus": extended}}).body
    assert written["status"]["extendedResourceClaimStatus"] == extended


def test_kubectl_prints_the_state_of_claims(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    api.ok("POST", claims, claim("d", share(30, "8Gi")))
    write_status(api, claims, {"allocation": allocation(), "reservedFor": [consumer()]}, "d")
    rows = api.ok("GET", claims, Accept=TABLE)["rows"]
    assert [row["cells"][:2] for row in rows] == [["c", "pending"], ["d", "allocated,reserved"]]


def allocating(hooks: Hooks, answer: Any, **more: Any) -> None:
    """Register a webhook for newly allocated claims, as docs/design/dra.md describes it."""
    conditions = [{"name": "new", "expression": NEWLY_ALLOCATED}, {"name": "ours", "expression": OURS}]
    hooks.add("claims", answer, rules=[STATUS_RULE], matchConditions=conditions, **more)


def test_webhook_replaces_the_device_of_a_new_allocation(api: Api, claims: str, hooks: Hooks) -> None:
    path = "/status/allocation/devices/results/0/device"
    allocating(hooks, patched({"op": "replace", "path": path, "value": "card-2"}))
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    found = allocation(shareID=SHARE, consumedCapacity={"cores": "30"})
    written = write_status(api, claims, {"allocation": found, "reservedFor": [consumer()]}).body
    assert written["status"]["allocation"] == allocation("card-2", shareID=SHARE, consumedCapacity={"cores": "30"})
    assert api.get(f"{claims}/c")["status"] == written["status"]
    asked = hooks.requests("claims")
    assert [(row["subResource"], row["oldObject"]["status"]) for row in asked] == [("status", {})]
    write_status(api, claims, {"allocation": written["status"]["allocation"]})
    write_status(api, claims, {})
    foreign = allocation(driver="other.example.com")
    write_status(api, claims, {"allocation": foreign})
    assert len(hooks.requests("claims")) == 1, "the match conditions select new allocations of our driver"


@pytest.mark.parametrize("code", [403, 422])
def test_webhook_denies_an_allocation(api: Api, claims: str, hooks: Hooks, code: int) -> None:
    allocating(hooks, deny("no card is free", code))
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    reply = write_status(api, claims, {"allocation": allocation()})
    assert (reply.code, "no card is free" in reply.message) == (code, True)
    assert api.get(f"{claims}/c")["status"] == {}


@pytest.mark.parametrize(("policy", "code"), [("Fail", 500), ("Ignore", 200)])
def test_webhook_that_cannot_be_reached_follows_its_failure_policy(
    api: Api, claims: str, hooks: Hooks, policy: str, code: int
) -> None:
    client = {"url": "https://127.0.0.1:1/claims"}
    allocating(hooks, allow(), failurePolicy=policy, client=client)
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    assert write_status(api, claims, {"allocation": allocation()}).code == code


def test_merge_patch_writes_a_status(api: Api, claims: str) -> None:
    api.ok("POST", claims, claim("c", share(30, "8Gi")))
    share_id = str(uuid.uuid4())
    reply = api.patch(f"{claims}/c/status", {"status": {"allocation": allocation(shareID=share_id)}}, MERGE)
    assert reply.body["status"]["allocation"] == allocation(shareID=share_id)
