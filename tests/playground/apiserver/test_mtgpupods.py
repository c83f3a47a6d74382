"""MtgpuPods with their CustomResourceDefinition and webhook configuration from `manifests/`."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.model.budget import MAX_LABELS
from playground.installation import manifests
from tests.playground.apiserver.api import JSON, TABLE, Api, pod
from tests.playground.apiserver.hooks import Hooks, deny
from tests.playground.apiserver.test_kubectl import Kubectl, kubectl  # noqa: F401

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
FOUND = {(m["kind"], m["metadata"]["name"]): m for m in manifests()}
DEFINITION = FOUND["CustomResourceDefinition", "mtgpupods.lsalab.nthu"]
OF_PODS, OF_MTGPUPODS = FOUND["ValidatingWebhookConfiguration", "mgpu-webhook"]["webhooks"]
SAID = {
    "lsalab.nthu/gpu_request": "0.5",
    "lsalab.nthu/gpu_limit": "1.0",
    "lsalab.nthu/gpu_mem": "1073741824",
    "lsalab.nthu/GPUID": "abc",
}
BOUND = {
    "type": "Bound",
    "status": "False",
    "reason": "ResourceExceeded",
    "message": "0.3 left",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "observedGeneration": 1,
}
CONDITIONS = [{"type": "PodCreated", "status": "True", "reason": "Made"}, BOUND]
STATUS = {
    "phase": "Pending",
    "observedGeneration": 1,
    "BoundDeviceID": "GPU-1",
    "PodStatus": {"qosClass": "Guaranteed", "newer": {"field": 1}},
    "PodObjectMeta": {"uid": "u"},
    "conditions": CONDITIONS,
}


def mtgpupod(**spec: Any) -> dict[str, Any]:
    body = {"metadata": {"name": "p", "annotations": dict(SAID)}, "spec": {"nodeName": "n1", **pod()["spec"], **spec}}
    return {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", **body}


@pytest.fixture(scope="module")
def defined(api: Api) -> Iterator[None]:
    api.ok("POST", DEFINITIONS, DEFINITION)
    for _ in range(10_000):
        if api.call("GET", "/apis/lsalab.nthu/v1/mtgpupods").code == 200:
            break
    yield
    api.ok("DELETE", f"{DEFINITIONS}/mtgpupods.lsalab.nthu")


@pytest.fixture
def path(defined: None, ns: str) -> str:  # noqa: ARG001
    return f"/apis/lsalab.nthu/v1/namespaces/{ns}/mtgpupods"


def test_mtgpupod_spec_is_stored_unchanged(api: Api, path: str) -> None:
    spec = {"overhead": {"cpu": "1"}, "newer": {"field": [1, 2.5, None]}, "initContainers": [{"name": "i"}]}
    made = api.ok("POST", path, mtgpupod(**spec) | {"status": STATUS})
    assert made["spec"] == mtgpupod(**spec)["spec"]
    assert "status" not in made


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "containers": ({"containers": [{"name": str(i)} for i in range(257)]}, "spec.containers: Too many: 257: "),
    "init containers": (
        {"initContainers": [{"name": str(i)} for i in range(257)]},
        "spec.initContainers: Too many: 257: ",
    ),
    "variables": ({"containers": [{"env": [{}] * 16_385}]}, "spec.containers[0].env: Too many: 16385: "),
    "fields of a variable": (
        {"containers": [{"env": [{str(i): 1 for i in range(17)}]}]},
        "spec.containers[0].env[0]: Too many: 17: ",
    ),
    "amounts": (
        {"containers": [{"resources": {"limits": {f"a/{i}": "1" for i in range(2049)}}}]},
        "spec.containers[0].resources.limits: Too many: 2049: ",
    ),
    "fields": ({f"f{i}": 1 for i in range(130)}, "spec: Too many: 1"),
    "a long node": ({"nodeName": "n" * 254}, "spec.nodeName: Too long: may not be more than 253 bytes"),
}


@pytest.mark.kubernetes(1, 34)
@pytest.mark.parametrize(("spec", "says"), LIMITS.values(), ids=LIMITS)
def test_spec_larger_than_its_limits_is_refused_by_the_schema(
    api: Api, path: str, spec: dict[str, Any], says: str
) -> None:
    refused = api.call("POST", path, mtgpupod(**spec))
    assert refused.code == 422
    assert says in refused.message


def test_spec_with_nulls_is_accepted_as_a_pod_with_nulls_is(api: Api, path: str) -> None:
    container = {"name": "c", "image": "i", "env": None, "resources": None}
    api.ok("POST", path, mtgpupod(containers=[container], initContainers=None, volumes=None, tolerations=None))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no node": ({"nodeName": None}, "spec.nodeName: Required value"),
    "no containers": ({"containers": None}, "spec.containers: Required value"),
    "an empty node": ({"nodeName": ""}, "spec.nodeName in body should be at least 1 chars long"),
    "a node of a wrong type": ({"nodeName": 1}, 'spec.nodeName in body must be of type string: "integer"'),
    "no list of containers": ({"containers": {}}, 'spec.containers in body must be of type array: "object"'),
    "no container": ({"containers": []}, "spec.containers in body should have at least 1 items"),
    "null as a container": ({"containers": [None]}, 'spec.containers[0] in body must be of type object: "null"'),
    "a container of a wrong type": (
        {"containers": ["c"]},
        'spec.containers[0] in body must be of type object: "string"',
    ),
}


@pytest.mark.parametrize(("spec", "words"), BROKEN.values(), ids=BROKEN)
def test_schema_violation_is_refused(api: Api, path: str, spec: dict[str, Any], words: str) -> None:
    reply = api.call("POST", path, mtgpupod(**spec))
    assert (reply.code, reply.reason) == (422, "Invalid")
    assert words in reply.message


@pytest.mark.parametrize("spec", [{}, {"spec": None}], ids=["no spec", "null"])
def test_mtgpupod_without_spec_is_refused(api: Api, path: str, spec: dict[str, Any]) -> None:
    body = {key: value for key, value in mtgpupod().items() if key != "spec"}
    assert "spec: Required value" in api.call("POST", path, body | spec).message


def test_mtgpupod_status_is_written_separately_and_pruned(api: Api, path: str) -> None:
    made = api.ok("POST", path, mtgpupod())
    mixed = {**made, "spec": {**made["spec"], "nodeName": "n2"}, "status": {**STATUS, "unknown": 1}}
    mixed["metadata"] = {**made["metadata"], "annotations": {"lsalab.nthu/GPUID": "other"}}
    stored = api.ok("PUT", f"{path}/p/status", mixed)
    assert stored["status"] == STATUS
    assert (stored["spec"], stored["metadata"]["annotations"]) == (made["spec"], SAID)
    assert stored["metadata"]["generation"] == 1
    forged = api.patch(f"{path}/p", {"status": {"BoundDeviceID": "GPU-2"}}).body
    assert forged["status"] == STATUS, "who may write MtgpuPods cannot say which card they have"


@pytest.mark.kubernetes(1, 34)
@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"type": "Bound"}, "status.conditions[2].status: Required value"),
        (BOUND, 'status.conditions[2]: Duplicate value: {"type":"Bound"}'),
        *(
            ({**BOUND, "type": "x", "lastTransitionTime": time}, f'in body must be of type date-time: "{time}"')
            for time in ("", "now", "2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z", "20260101T000000Z")
        ),
    ],
)
def test_mtgpupod_with_malformed_condition_is_refused(
    api: Api, path: str, condition: dict[str, Any], words: str
) -> None:
    made = api.ok("POST", path, mtgpupod())
    reply = api.call("PUT", f"{path}/p/status", {**made, "status": {**STATUS, "conditions": [*CONDITIONS, condition]}})
    assert reply.code == 422
    assert words in reply.message


@pytest.mark.parametrize("time", ["2026-01-01T00:00:00.123456Z", "2026-01-01T00:00:00+02:00", "2026-01-01t00:00:00z"])
def test_mtgpupod_condition_accepts_rfc_3339_times(api: Api, path: str, time: str) -> None:
    made = api.ok("POST", path, mtgpupod())
    status = {"conditions": [{**BOUND, "lastTransitionTime": time}]}
    assert api.ok("PUT", f"{path}/p/status", {**made, "status": status})["status"] == status


def test_mtgpupod_table_has_its_columns(api: Api, path: str) -> None:
    api.ok("POST", path, mtgpupod())
    names = ["Name", "Phase", "GPUID", "Request", "Limit", "Memory", "Node", "Card", "Reason", "Age"]
    before = api.call("GET", path, Accept=TABLE).body
    assert [column["name"] for column in before["columnDefinitions"]] == names
    assert [column["name"] for column in before["columnDefinitions"] if column["priority"]] == [
        "Limit",
        "Memory",
        "Card",
    ]
    api.ok("PATCH", f"{path}/p/status", {"status": STATUS}, media="application/merge-patch+json")
    after = api.call("GET", path, Accept=TABLE).body
    (first,), (second,) = ([row["cells"][:-1] for row in table["rows"]] for table in (before, after))
    assert first == ["p", None, "abc", "0.5", "1.0", "1073741824", "n1", None, None]
    assert second == ["p", "Pending", "abc", "0.5", "1.0", "1073741824", "n1", "GPU-1", "ResourceExceeded"]


def test_occupy_priority_class_sets_priority_and_policy(api: Api, pods: str) -> None:
    found = FOUND["PriorityClass", "mgpu-occupy"]
    api.ok("POST", CLASSES, found)
    spec = api.ok("POST", pods, pod(spec={"priorityClassName": "mgpu-occupy"}))["spec"]
    assert (spec["priority"], spec["preemptionPolicy"]) == (10**9, "Never")
    plain = api.ok("POST", pods, pod("plain"))["spec"]
    assert (plain["priority"], plain["preemptionPolicy"]) == (0, "PreemptLowerPriority")
    for spec in ({"priority": 10**9}, {"preemptionPolicy": "Never"}):
        reply = api.call("POST", pods, pod("q", spec=spec))
        assert (reply.code, reply.reason) == (403, "Forbidden")
        assert "must not be provided in pod spec; priority admission controller computed" in reply.message
    api.ok("DELETE", f"{CLASSES}/mgpu-occupy")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine")
def test_kubectl_lists_mtgpupods_by_short_name(api: Api, path: str, kubectl: Kubectl) -> None:  # noqa: F811
    kubectl("create", "-f", "-", given=mtgpupod())
    api.ok("PATCH", f"{path}/p/status", {"status": STATUS}, media="application/merge-patch+json")
    header, row = (line.split() for line in kubectl("get", "mtgp").stdout.splitlines())
    assert header == ["NAME", "PHASE", "GPUID", "REQUEST", "NODE", "REASON", "AGE"]
    assert row[:-1] == ["p", "Pending", "abc", "0.5", "n1", "ResourceExceeded"]
    wide = kubectl("get", "mtgpupods", "-o", "wide").stdout.splitlines()[1].split()
    assert wide[:-1] == ["p", "Pending", "abc", "0.5", "1.0", "1073741824", "n1", "GPU-1", "ResourceExceeded"]


def watched(hooks: Hooks, hook: dict[str, Any]) -> None:
    """Add a webhook that refuses every request, with the rules and conditions of the manifest."""
    more = {key: hook[key] for key in ("rules", "matchConditions", "matchPolicy", "failurePolicy")}
    hooks.add("v", deny("asked", 422), mutating=False, **more)


def test_mtgpupod_webhook_reviews_creates_and_changes_of_fixed_fields(api: Api, path: str, hooks: Hooks) -> None:
    made = api.ok("POST", path, mtgpupod() | {"metadata": {"name": "p", "annotations": SAID, "finalizers": ["a.b/c"]}})
    watched(hooks, OF_MTGPUPODS)
    assert api.call("POST", path, {**mtgpupod(), "metadata": {"name": "q"}}).code == 422
    one = f"{path}/p"
    for body in ({"metadata": {"annotations": {"lsalab.nthu/GPUID": "x"}}}, {"metadata": {"annotations": None}}):
        assert api.patch(one, body).code == 422
    assert api.patch(one, {"spec": {"nodeName": "n2"}}).code == 422
    assert api.patch(one, {"metadata": {"labels": {"a": "b"}, "finalizers": ["a.b/c", "d.e/f"]}}).code == 200
    many = {f"a{i}": "" for i in range(MAX_LABELS)}
    assert api.patch(one, {"metadata": {"labels": many}}).code == 422, "one more than an object may have"
    assert api.patch(f"{one}/status", {"status": STATUS}).code == 200
    api.ok("DELETE", one)
    assert api.patch(one, {"metadata": {"annotations": {"lsalab.nthu/GPUID": "x"}}}).code == 422, (
        "its card is held still"
    )
    assert api.patch(f"{one}/status", {"status": {"phase": "Failed"}}).code == 200
    api.ok(
        "PATCH",
        one,
        {"metadata": {"finalizers": None, "uid": made["metadata"]["uid"]}},
        media="application/merge-patch+json",
    )
    assert api.call("GET", one).code == 404


def test_mtgpupod_without_annotations_can_lose_its_finalizer(api: Api, path: str, hooks: Hooks) -> None:
    bare = {**mtgpupod(), "metadata": {"name": "p", "finalizers": ["a.b/c"]}}
    api.ok("POST", path, bare)
    watched(hooks, OF_MTGPUPODS)
    assert api.patch(f"{path}/p", {"metadata": {"finalizers": None}}).code == 200
    assert api.patch(f"{path}/p", {"metadata": {"annotations": SAID}}).code == 422
    api.ok("DELETE", f"{path}/p")


def test_pod_webhook_reviews_changes_of_mtgpu_annotations(api: Api, pods: str, hooks: Hooks) -> None:
    api.ok("POST", pods, pod("old", annotations=SAID))
    api.ok("POST", pods, pod("plain"))
    watched(hooks, OF_PODS)
    assert api.call("POST", pods, pod(annotations={"lsalab.nthu/x": ""})).code == 422
    for name, change in (("old", None), ("old", {"lsalab.nthu/GPUID": None}), ("plain", SAID)):
        body = {"metadata": {"annotations": change}}
        assert [api.patch(f"{pods}/{name}{sub}", body).code for sub in ("", "/status")] == [422, 422]
    assert api.patch(f"{pods}/old", {"metadata": {"labels": {"a": "b"}}}).code == 200
    assert api.patch(f"{pods}/old/status", {"status": {"phase": "Running"}}).code == 200
    assert api.patch(f"{pods}/plain", {"metadata": {"annotations": {"team": "a"}}}).code == 200
    unlabel = [{"op": "remove", "path": "/metadata/labels/a"}]
    assert api.patch(f"{pods}/old", unlabel, JSON).code == 200
    assert api.call("POST", pods, pod("other")).code == 201
