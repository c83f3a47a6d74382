"""Admission webhooks: which are called, in which order, and what their answers do."""

import threading
from typing import Any

import pytest

from tests.playground.apiserver.api import MERGE, Api, binding, pod
from tests.playground.apiserver.hooks import Hooks, allow, annotated, deny, patched


def test_webhook_changes_a_pod_before_it_is_stored(api: Api, ns: str, pods: str, hooks: Hooks) -> None:
    hooks.add("m", annotated("seen", "yes"))
    made = api.ok("POST", pods, pod())
    assert made["metadata"]["annotations"] == {"seen": "yes"}
    asked = hooks.requests("m")[0]
    assert asked["userInfo"]["username"] == "kubernetes-admin"
    assert "system:masters" in asked["userInfo"]["groups"]
    assert (asked["operation"], asked["namespace"], asked["name"]) == ("CREATE", ns, "p")
    assert asked["object"]["spec"]["containers"][0]["imagePullPolicy"] == "Always", "defaults are set before"
    assert (asked["object"]["kind"], asked["object"]["apiVersion"]) == ("Pod", "v1")
    assert asked["options"]["kind"] == "CreateOptions"


def test_object_from_a_webhook_is_defaulted_and_validated(api: Api, pods: str, hooks: Hooks) -> None:
    sidecar = {"name": "side", "image": "x:1", "resources": {"limits": {"a.com/x": "2000"}}}
    hooks.add("m", patched({"op": "add", "path": "/spec/containers/-", "value": sidecar}))
    made = api.ok("POST", pods, pod())["spec"]["containers"][1]
    assert made["resources"]["requests"] == {"a.com/x": "2k"}
    assert made["imagePullPolicy"] == "IfNotPresent"


def test_denial_carries_code_and_message(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("v", deny("core must be positive", 403), mutating=False)
    reply = api.call("POST", pods, pod())
    assert reply.code == 403
    assert reply.message == 'admission webhook "v.test.mgpu.io" denied the request: core must be positive'
    assert reply.body["status"] == "Failure"
    assert api.call("GET", f"{pods}/p").code == 404


@pytest.mark.parametrize("mutating", [True, False])
def test_denial_without_message_or_code_is_a_bad_request(api: Api, pods: str, hooks: Hooks, *, mutating: bool) -> None:
    hooks.add("v", deny(), mutating=mutating)
    reply = api.call("POST", pods, pod())
    assert reply.code == 400
    assert reply.message == 'admission webhook "v.test.mgpu.io" denied the request without explanation'


def test_warnings_reach_the_client(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("m", allow(warnings=["NVIDIA_VISIBLE_DEVICES is ours"]))
    assert api.call("POST", pods, pod()).warnings == ['299 - "NVIDIA_VISIBLE_DEVICES is ours"']


@pytest.mark.parametrize(("policy", "code"), [("Ignore", 201), ("Fail", 500)])
def test_failure_policy_decides_what_a_failed_call_does(
    api: Api, pods: str, hooks: Hooks, policy: str, code: int
) -> None:
    nowhere = {"url": "https://127.0.0.1:1/x", "caBundle": ""}
    hooks.add("m", allow(), failurePolicy=policy, client=nowhere)
    reply = api.call("POST", pods, pod())
    assert reply.code == code
    if code == 500:
        assert reply.reason == "InternalError"
        assert (
            'Internal error occurred: failed calling webhook "m.test.mgpu.io": failed to call webhook' in reply.message
        )


def test_certificate_of_another_authority_is_a_failed_call(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("m", allow(), client={"url": f"{hooks.url}/m", "caBundle": ""}, failurePolicy="Fail")
    reply = api.call("POST", pods, pod())
    assert reply.code == 500
    assert "failed to verify certificate" in reply.message


def test_webhook_that_takes_too_long_is_a_failed_call(api: Api, pods: str, hooks: Hooks) -> None:
    answered = threading.Event()

    def slow(_: object) -> dict[str, object]:
        answered.wait(timeout=20)
        return {"allowed": True}

    hooks.add("m", slow, timeoutSeconds=1)
    reply = api.call("POST", pods, pod())
    answered.set()
    assert reply.code == 500
    assert "context deadline exceeded" in reply.message or "Client.Timeout exceeded" in reply.message


@pytest.mark.parametrize("policy", ["Ignore", "Fail"])
def test_patch_that_does_not_apply_is_a_500_under_every_policy(api: Api, pods: str, hooks: Hooks, policy: str) -> None:
    hooks.add("m", patched({"op": "remove", "path": "/metadata/no-such"}), failurePolicy=policy)
    reply = api.call("POST", pods, pod())
    assert (reply.code, reply.reason) == (500, "InternalError")


def test_answer_for_another_review_is_a_failed_call(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("m", allow(uid="another"))
    reply = api.call("POST", pods, pod())
    assert reply.code == 500
    assert "expected response.uid=" in reply.message


@pytest.mark.parametrize(("policy", "code"), [("Ignore", 201), ("Fail", 500)])
def test_patch_of_no_type_is_a_failed_call(api: Api, pods: str, hooks: Hooks, policy: str, code: int) -> None:
    hooks.add("m", patched({"op": "add", "path": "/metadata/labels", "value": {}}, patchType=""), failurePolicy=policy)
    assert api.call("POST", pods, pod()).code == code


def test_dry_runs_reach_only_webhooks_without_side_effects(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("m", annotated("seen", "yes"), sideEffects="NoneOnDryRun")
    dry = api.ok("POST", f"{pods}?dryRun=All", pod())
    assert dry["metadata"]["annotations"] == {"seen": "yes"}
    assert hooks.requests("m")[0]["dryRun"] is True
    assert api.call("GET", f"{pods}/p").code == 404


def test_webhooks_run_in_the_order_of_their_configurations(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("first", annotated("a", "1"))
    hooks.add("second", annotated("b", "2"))
    assert api.ok("POST", pods, pod())["metadata"]["annotations"] == {"a": "1", "b": "2"}
    assert [path for path, _ in hooks.asked if not path.startswith("canary")] == ["first", "second"]
    assert hooks.requests("second")[0]["object"]["metadata"]["annotations"] == {"a": "1"}


def test_webhook_is_reinvoked_when_a_later_one_changed_the_object(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("again", allow(), reinvocationPolicy="IfNeeded")
    hooks.add("once", allow())
    hooks.add("change", annotated("b", "2"))
    api.ok("POST", pods, pod())
    counts = {path: len(hooks.requests(path)) for path in ("again", "once", "change")}
    assert counts == {"again": 2, "once": 1, "change": 1}


def test_webhook_that_was_not_called_is_not_reinvoked(api: Api, pods: str, hooks: Hooks) -> None:
    """Not even if a later webhook makes its conditions true."""
    condition = {
        "name": "annotated",
        "expression": "has(object.metadata.annotations) && 'b' in object.metadata.annotations",
    }
    hooks.add("again", allow(), reinvocationPolicy="IfNeeded", matchConditions=[condition])
    hooks.add("change", annotated("b", "2"))
    hooks.add("after", allow(), matchConditions=[condition])
    api.ok("POST", pods, pod())
    assert {path: len(hooks.requests(path)) for path in ("again", "after")} == {"again": 0, "after": 1}


@pytest.mark.kubernetes(1, 34)
def test_status_of_a_new_pod_is_reset_only_after_mutating_admission(api: Api, pods: str, hooks: Hooks) -> None:
    """A mutating webhook must not trust the status; a validating one sees the reset one."""
    claims = {
        "resourceClaimName": "x",
        "requestMappings": [{"containerName": "c", "requestName": "r", "resourceName": "a/b"}],
    }
    raw = pod() | {"status": {"phase": "Running", "extendedResourceClaimStatus": claims}}
    hooks.add("m", allow())
    hooks.add("v", allow(), mutating=False)
    made = api.ok("POST", pods, raw)
    assert hooks.requests("m")[0]["object"]["status"] == raw["status"]
    for status in (hooks.requests("v")[0]["object"]["status"], made["status"]):
        assert (status["phase"], "extendedResourceClaimStatus" in status) == ("Pending", False)


def test_rules_and_object_selector_choose_the_requests(api: Api, pods: str, hooks: Hooks) -> None:
    rule = {"operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["*"], "resources": ["pods/*"]}
    hooks.add("status", allow(), rules=[rule])
    hooks.add("labelled", allow(), objectSelector={"matchExpressions": [{"key": "gpu", "operator": "Exists"}]})
    api.ok("POST", pods, pod())
    api.ok("POST", pods, pod("g", labels={"gpu": "1"}))
    api.patch(f"{pods}/p/status", {"status": {"phase": "Running"}})
    assert [(r["name"], r["subResource"]) for r in hooks.requests("status")] == [("p", "status")]
    assert [r["name"] for r in hooks.requests("labelled")] == ["g"]


_ANY_LIMIT = (
    "object.spec.containers.exists(c, has(c.resources.limits) && c.resources.limits.exists(k, k.startsWith('a.com/')))"
)


@pytest.mark.parametrize(
    ("expression", "asked"),
    [
        (_ANY_LIMIT, "g"),
        ("has(object.metadata.labels) && 'gpu' in object.metadata.labels", "g"),
        ("object.metadata.?labels[?'gpu'].orValue('') == '1' || oldObject != null", "g"),
        ("request.userInfo.username == 'kubernetes-admin' && request.operation == 'CREATE'", "gp"),
        ("!request.userInfo.groups.exists(g, g == 'system:masters')", ""),
    ],
)  # fmt: skip
def test_match_conditions_choose_the_requests(api: Api, pods: str, hooks: Hooks, expression: str, asked: str) -> None:
    hooks.add("m", allow(), matchConditions=[{"name": "c", "expression": expression}])
    api.ok("POST", pods, pod("g", labels={"gpu": "1"}, resources={"limits": {"a.com/x": "1"}}))
    api.ok("POST", pods, pod("p"))
    assert "".join(r["name"] for r in hooks.requests("m")) == asked


@pytest.mark.parametrize(("policy", "code"), [("Ignore", 201), ("Fail", 403)])
def test_condition_that_fails_skips_the_webhook_or_refuses(
    api: Api, pods: str, hooks: Hooks, policy: str, code: int
) -> None:
    condition = {"name": "c", "expression": "object.metadata.labels['gpu'] == '1'"}
    hooks.add("m", allow(), matchConditions=[condition], failurePolicy=policy)
    assert api.call("POST", pods, pod()).code == code
    assert hooks.requests("m") == []


def test_updates_and_deletions_show_the_old_object(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("v", allow(), mutating=False)
    api.ok("POST", pods, pod())
    api.patch(f"{pods}/p", {"metadata": {"labels": {"a": "1"}}})
    api.ok("DELETE", f"{pods}/p")
    create, update, delete, *_ = hooks.requests("v")  # the real server asks several times about one deletion
    assert create["oldObject"] is None
    assert "labels" not in update["oldObject"]["metadata"]
    assert update["object"]["metadata"]["labels"] == {"a": "1"}
    assert delete["object"] is None
    assert delete["oldObject"]["metadata"]["labels"] == {"a": "1"}


def test_status_write_is_reviewed_with_the_writers_name(api: Api, pods: str, hooks: Hooks) -> None:
    hooks.add("v", deny("placement annotations belong to the suite"), mutating=False, resources=["pods/status"])
    api.ok("POST", pods, pod())
    patch = {"metadata": {"annotations": {"cards": "7"}}}
    reply = api.call(
        "PATCH", f"{pods}/p/status", patch, media="application/merge-patch+json", Authorization="Bearer other-token"
    )
    assert reply.code == 400
    assert hooks.requests("v")[0]["userInfo"]["username"] == "system:serviceaccount:ns:other"
    assert "annotations" not in api.get(f"{pods}/p")["metadata"]


@pytest.mark.parametrize(
    ("hook", "field"),
    [
        ({"name": "a"}, "webhooks[0].name"),
        ({"sideEffects": "Some"}, "webhooks[0].sideEffects"),
        ({"admissionReviewVersions": []}, "webhooks[0].admissionReviewVersions"),
        ({"timeoutSeconds": 31}, "webhooks[0].timeoutSeconds"),
        ({"matchConditions": [{"name": "c", "expression": "object."}]}, "webhooks[0].matchConditions[0].expression"),
    ],
)
def test_malformed_webhook_configuration_is_refused(api: Api, name: str, hook: dict[str, object], field: str) -> None:
    good = {"name": "a.b.c", "clientConfig": {"url": "https://x/y"}, "sideEffects": "None"}
    config = {"metadata": {"name": name}, "webhooks": [{**good, "admissionReviewVersions": ["v1"], **hook}]}
    reply = api.call("POST", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", config)
    assert reply.code == 422
    assert reply.body["details"]["causes"][0]["field"] == field


def test_write_during_admission_is_not_lost(api: Api, pods: str, hooks: Hooks) -> None:
    """The patch is applied again to the result of the other write; a PUT with its resourceVersion is refused."""

    def meanwhile(request: Any) -> dict[str, object]:
        if "fast" not in request["object"]["metadata"].get("labels", {}):
            api.ok("PATCH", f"{pods}/p/status", {"metadata": {"labels": {"fast": "1"}}}, media=MERGE)
        return {"allowed": True}

    made = api.ok("POST", pods, pod())
    hooks.add("v", meanwhile, mutating=False, rules=[_update("pods")])
    assert api.patch(f"{pods}/p", {"metadata": {"labels": {"slow": "1"}}}).code == 200
    assert api.get(f"{pods}/p")["metadata"]["labels"] == {"fast": "1", "slow": "1"}
    made["metadata"]["labels"] = {"put": "1"}
    assert api.call("PUT", f"{pods}/p", made).code == 409


def test_pod_recreated_during_binding_admission_is_not_bound(api: Api, pods: str, hooks: Hooks) -> None:
    def meanwhile(_: Any) -> dict[str, object]:
        api.ok("DELETE", f"{pods}/p")
        api.ok("POST", pods, pod())
        return {"allowed": True}

    made = api.ok("POST", pods, pod())
    hooks.add("bind", meanwhile, resources=["pods/binding"])
    assert api.call("POST", f"{pods}/p/binding", binding(uid=made["metadata"]["uid"])).code == 409
    assert "nodeName" not in api.get(f"{pods}/p")["spec"], "the new pod of this name has its own binding"


def _update(plural: str) -> dict[str, list[str]]:
    return {"operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": [plural]}


def test_quota_is_charged_after_mutation(api: Api, ns: str, pods: str, hooks: Hooks) -> None:
    more = {"limits": {"a.com/x": "2"}, "requests": {"a.com/x": "2"}}
    hooks.add("m", patched({"op": "add", "path": "/spec/containers/0/resources", "value": more}))
    quotas, hard = f"/api/v1/namespaces/{ns}/resourcequotas", {"requests.a.com/x": "3"}
    quota = api.ok("POST", quotas, {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    # What a controller would have written.
    api.ok("PUT", f"{quotas}/q/status", {**quota, "status": {"hard": hard, "used": {"requests.a.com/x": "0"}}})
    _until_quota_is_known(api, pods)
    refused = api.call("POST", pods, pod("second"))
    assert (refused.code, refused.reason) == (403, "Forbidden")
    assert refused.message == (
        'pods "second" is forbidden: exceeded quota: q, '
        "requested: requests.a.com/x=2, used: requests.a.com/x=2, limited: requests.a.com/x=3"
    )


def _until_quota_is_known(api: Api, pods: str) -> None:
    """Create and delete pods until one is charged: a real server reads quotas from a cache."""
    path = pods.replace("/pods", "/resourcequotas/q")
    for _ in range(200):
        api.ok("POST", pods, pod("first"))
        if not api.real or api.get(path)["status"]["used"]["requests.a.com/x"] == "2":
            return
        api.ok("DELETE", f"{pods}/first")
