"""Binding: one write with node, annotations, labels and condition; preconditions; admission first."""

import pytest

from tests.playground.apiserver.api import Api, binding, pod
from tests.playground.apiserver.hooks import Hooks, annotated, deny


@pytest.mark.kubernetes(1, 35)
def test_binding_is_one_write_of_node_annotations_labels_and_condition(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod(annotations={"a": "1", "b": "1"}))
    reply = api.call("POST", f"{pods}/p/binding", binding(annotations={"b": "2"}, labels={"l": "1"}))
    assert (reply.code, reply.body["status"]) == (201, "Success")
    seen = api.watch(pods, made["metadata"]["resourceVersion"], 1)
    bound = seen[0]["object"]
    assert bound == api.get(f"{pods}/p"), "there is one write"
    assert bound["spec"]["nodeName"] == "n1"
    assert bound["metadata"]["annotations"] == {"a": "1", "b": "2"}
    assert bound["metadata"]["labels"] == {"l": "1"}
    assert bound["metadata"]["generation"] == 1
    assert [(c["type"], c["status"]) for c in bound["status"]["conditions"]] == [("PodScheduled", "True")]


def test_uid_and_resource_version_of_a_binding_are_preconditions(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod())["metadata"]
    for wrong in ({"uid": "other"}, {"resourceVersion": "1"}):
        reply = api.call("POST", f"{pods}/p/binding", binding(**wrong))
        assert (reply.code, reply.reason) == (409, "Conflict")
        assert "Precondition failed" in reply.message
    right = {"uid": made["uid"], "resourceVersion": made["resourceVersion"]}
    assert api.call("POST", f"{pods}/p/binding", binding(**right)).code == 201


def test_binding_by_the_legacy_path_ignores_the_uid(api: Api, ns: str, pods: str) -> None:
    api.ok("POST", pods, pod())
    legacy = f"/api/v1/namespaces/{ns}/bindings"
    assert api.call("POST", legacy, binding(uid="other", annotations={"a": "1"})).code == 201
    bound = api.get(f"{pods}/p")
    assert (bound["spec"]["nodeName"], bound["metadata"]["annotations"]) == ("n1", {"a": "1"})
    assert api.call("POST", legacy, binding("q")).code == 404


def test_binding_of_bound_deleted_or_gated_pod_is_refused(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(finalizers=["a.b/c"]))
    api.ok("POST", pods, pod("going", finalizers=["a.b/c"]))
    api.ok("POST", pods, pod("gated", spec={"schedulingGates": [{"name": "a.b/c"}]}))
    api.ok("DELETE", f"{pods}/going")
    assert api.call("POST", f"{pods}/p/binding", binding()).code == 201
    words = {
        "p": 'pod p is already assigned to node "n1"',
        "going": "pod going is being deleted, cannot be assigned to a host",
        "gated": "pod gated has non-empty .spec.schedulingGates",
    }
    for name, why in words.items():
        reply = api.call("POST", f"{pods}/{name}/binding", binding(name))
        assert (reply.code, reply.reason, "retryAfterSeconds" in reply.body["details"]) == (409, "Conflict", False)
        assert reply.message == f'Operation cannot be fulfilled on pods/binding "{name}": {why}'
        api.patch(f"{pods}/{name}", {"metadata": {"finalizers": None}})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"metadata": {"name": "p"}, "target": {}}, 500),
        ({"metadata": {"name": "other"}, "target": {"name": "n1"}}, 400),
        ({"metadata": {"name": "p", "annotations": {"a": 1}}, "target": {"name": "n1"}}, 400),
        ({"metadata": {"name": "p", "namespace": "other"}, "target": {"name": "n1"}}, 400),
    ],
)
def test_malformed_binding_changes_nothing(api: Api, pods: str, body: object, code: int) -> None:
    made = api.ok("POST", pods, pod())
    assert api.call("POST", f"{pods}/p/binding", body).code == code
    assert api.get(f"{pods}/p") == made


def test_dry_run_binding_binds_nothing(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod())
    assert api.call("POST", f"{pods}/p/binding?dryRun=All", binding()).code == 201
    assert api.get(f"{pods}/p") == made


@pytest.mark.parametrize("legacy", [False, True])
def test_binding_annotated_by_a_webhook_annotates_the_pod(
    api: Api, ns: str, pods: str, hooks: Hooks, *, legacy: bool
) -> None:
    hooks.add("bind", annotated("cards", "0,1"), resources=["pods/binding", "bindings"])
    made = api.ok("POST", pods, pod())
    path = f"/api/v1/namespaces/{ns}/bindings" if legacy else f"{pods}/p/binding"
    assert api.call("POST", path, binding(uid=made["metadata"]["uid"])).code == 201
    bound = api.get(f"{pods}/p")
    assert (bound["spec"]["nodeName"], bound["metadata"]["annotations"]) == ("n1", {"cards": "0,1"})
    asked = hooks.requests("bind")[0]
    assert asked["kind"] == {"group": "", "version": "v1", "kind": "Binding"}
    assert (asked["resource"]["resource"], asked.get("subResource", "")) == (
        ("bindings", "") if legacy else ("pods", "binding")
    )
    assert (asked["name"], asked["namespace"], asked["operation"]) == ("p", ns, "CREATE")
    assert asked["object"]["metadata"].get("uid") == (None if legacy else made["metadata"]["uid"])
    assert asked["object"]["target"] == {"kind": "Node", "name": "n1"}
    assert asked["dryRun"] is False
    assert asked.get("oldObject") is None


def test_denied_binding_leaves_the_pod_unchanged(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("bind", deny("no card fits: 2 cards 4.0 GiB short", 409), resources=["pods/binding"])
    made = api.ok("POST", pods, pod())
    reply = api.call("POST", f"{pods}/p/binding", binding())
    assert reply.code == 409
    assert reply.message == (
        'admission webhook "bind.test.mgpu.io" denied the request: no card fits: 2 cards 4.0 GiB short'
    )
    assert api.get(f"{pods}/p") == made


def test_binding_is_admitted_before_its_preconditions_are_checked(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("bind", annotated("cards", "0"), resources=["pods/binding"])
    api.ok("POST", pods, pod())
    assert api.call("POST", f"{pods}/p/binding", binding(uid="other")).code == 409
    assert api.call("POST", f"{pods}/gone/binding", binding("gone")).code == 404
    assert [r["name"] for r in hooks.requests("bind")] == ["p", "gone"]
