"""Create, read, update and delete."""

import pytest

from tests.playground.apiserver.api import JSON, MERGE, STRATEGIC, Api, pod


@pytest.mark.kubernetes(1, 34)
def test_new_pod_has_identity_defaults_and_status(api: Api, pods: str, ns: str) -> None:
    made = api.ok("POST", pods, pod(resources={"limits": {"a.com/x": "2"}}))
    assert made["metadata"]["uid"]
    assert made["metadata"]["namespace"] == ns
    assert made["metadata"]["generation"] == 1
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    assert made["spec"]["containers"][0]["resources"]["requests"] == {"a.com/x": "2"}
    assert (made["spec"]["restartPolicy"], made["spec"]["priority"]) == ("Always", 0)
    assert api.get(f"{pods}/p") == made


@pytest.mark.parametrize(
    ("written", "read"),
    [("1024Mi", "1Gi"), ("6000", "6k"), (50, "50"), ("1500Mi", "1500Mi"), ("2e3", "2e3"), ("1000k", "1M")],
)
def test_quantities_are_written_in_canonical_form(api: Api, pods: str, written: object, read: str) -> None:
    made = api.ok("POST", pods, pod(resources={"limits": {"a.com/x": written}}))
    assert made["spec"]["containers"][0]["resources"]["limits"] == {"a.com/x": read}


@pytest.mark.parametrize(
    ("resources", "rule"),
    [
        ({"limits": {"a.com/x": "2"}, "requests": {"a.com/x": "1"}}, "must be equal to a.com/x limit of 2"),
        ({"requests": {"a.com/x": "1"}}, "Limit must be set for non overcommitable resources"),
        ({"limits": {"a.com/x": "500m"}}, "must be an integer"),
        ({"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}, "must be less than or equal to cpu limit of 1"),
        ({"limits": {"x": "1"}}, "must be a standard resource type or fully qualified"),
    ],
)
def test_unusable_resources_are_refused(api: Api, pods: str, resources: object, rule: str) -> None:
    reply = api.call("POST", pods, pod(resources=resources))
    assert (reply.code, reply.reason) == (422, "Invalid")
    assert rule in reply.message
    assert reply.body["details"]["causes"][0]["field"].startswith("spec.containers[0].resources")


def test_empty_amounts_are_not_stored(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod(resources={"limits": {}, "requests": {}, "claims": []}))
    assert made["spec"]["containers"][0]["resources"] == {}


def test_refusals_have_code_reason_and_message(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    cases = {
        ("POST", pods): (409, "AlreadyExists", 'pods "p" already exists'),
        ("GET", f"{pods}/q"): (404, "NotFound", 'pods "q" not found'),
        ("POST", "/api/v1/namespaces/no-such/pods"): (404, "NotFound", 'namespaces "no-such" not found'),
        ("PUT", pods): (405, "MethodNotAllowed", "the server does not allow this method on the requested resource"),
        ("GET", "/api/v1/foos"): (404, "NotFound", "the server could not find the requested resource"),
        ("GET", f"{pods}/p/foo"): (404, "NotFound", "the server could not find the requested resource"),
    }
    for (method, path), expected in cases.items():
        reply = api.call(method, path, pod() if method != "GET" else None)
        assert (reply.code, reply.reason, reply.message) == expected
        assert reply.body["kind"] == "Status"


def test_request_with_unknown_token_is_unauthorized(api: Api, pods: str) -> None:
    reply = api.call("GET", pods, Authorization="Bearer wrong")
    assert (reply.code, reply.reason) == (401, "Unauthorized")


@pytest.mark.parametrize("body", [b"{nope", b"", b"[]", b'{"kind":"Node","apiVersion":"v1"}'])
def test_body_of_another_kind_is_a_bad_request(api: Api, pods: str, body: bytes) -> None:
    reply = api.call("POST", pods, body)
    assert (reply.code, reply.reason) == (400, "BadRequest")


def test_number_as_annotation_is_refused(api: Api, pods: str) -> None:
    reply = api.call("POST", pods, pod(annotations={"cards": 2}))
    assert reply.code == 400
    assert (
        "cannot unmarshal number into Go struct field ObjectMeta.metadata.annotations of type string" in reply.message
    )


def test_unknown_fields_are_refused_named_or_dropped(api: Api, pods: str) -> None:
    body = pod(spec={"nodeNaem": "n"})
    strict = api.call("POST", f"{pods}?fieldValidation=Strict", body)
    assert strict.code == 400
    assert 'strict decoding error: unknown field "spec.nodeNaem"' in strict.message
    warned = api.call("POST", f"{pods}?dryRun=All", body)
    assert warned.warnings == ['299 - "unknown field \\"spec.nodeNaem\\""']
    assert "nodeNaem" not in warned.body["spec"]
    assert api.call("POST", f"{pods}?dryRun=All&fieldValidation=Ignore", body).warnings == []


def test_generated_names_differ(api: Api, pods: str) -> None:
    body = {**pod(), "metadata": {"generateName": "gen-"}}
    names = {api.ok("POST", pods, body)["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(len(n) == 9 and n.startswith("gen-") for n in names)


def test_dry_run_answers_like_a_write_and_stores_nothing(api: Api, pods: str) -> None:
    assert api.ok("POST", f"{pods}?dryRun=All", pod())["metadata"]["uid"]
    assert api.call("GET", f"{pods}/p").code == 404
    api.ok("POST", pods, pod())
    assert api.call("POST", f"{pods}?dryRun=All", pod()).reason == "AlreadyExists"
    api.ok("PATCH", f"{pods}/p?dryRun=All", {"metadata": {"labels": {"a": "b"}}}, media=MERGE)
    api.ok("DELETE", f"{pods}/p?dryRun=All")
    assert "labels" not in api.get(f"{pods}/p")["metadata"]
    assert api.call("POST", f"{pods}?dryRun=Some", pod("q")).reason == "Invalid"


def test_stale_resource_version_is_a_conflict(api: Api, pods: str) -> None:
    first = api.ok("POST", pods, pod())
    api.ok("PATCH", f"{pods}/p", {"metadata": {"labels": {"a": "1"}}}, media=MERGE)
    stale = api.call("PUT", f"{pods}/p", first)
    assert (stale.code, stale.reason) == (409, "Conflict")
    assert "the object has been modified" in stale.message
    patch = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"], "labels": {"a": "2"}}}
    assert api.patch(f"{pods}/p", patch).code == 409
    del first["metadata"]["resourceVersion"]
    assert api.call("PUT", f"{pods}/p", first).code == 200


def test_write_with_another_uid_is_a_conflict(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod())
    made["metadata"]["uid"] = "other"
    assert api.call("PUT", f"{pods}/p", made).code == 409
    assert api.call("DELETE", f"{pods}/p", {"preconditions": {"uid": "other"}}).code == 409
    assert api.call("DELETE", f"{pods}/p", {"preconditions": {"resourceVersion": "1"}}).code == 409
    assert api.get(f"{pods}/p")


def test_write_without_change_keeps_the_resource_version(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod(labels={"a": "1"}))
    assert api.patch(f"{pods}/p", {"metadata": {"labels": {"a": "1"}}}).rv == made["metadata"]["resourceVersion"]


def test_resource_versions_rise_over_all_resources(api: Api, pods: str, ns: str) -> None:
    seen = [int(api.ok("POST", pods, pod())["metadata"]["resourceVersion"])]
    maps = f"/api/v1/namespaces/{ns}/configmaps"
    seen.append(int(api.ok("POST", maps, {"metadata": {"name": "m"}})["metadata"]["resourceVersion"]))
    seen.append(int(api.patch(f"{pods}/p", {"metadata": {"labels": {"a": "1"}}}).rv))
    assert seen == sorted(set(seen))


@pytest.mark.kubernetes(1, 34)
def test_only_some_fields_of_a_pod_may_change(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    changed = api.patch(f"{pods}/p", {"spec": {"containers": [{"name": "c", "image": "new"}]}}, STRATEGIC)
    assert changed.body["metadata"]["generation"] == 2
    for spec in ({"nodeName": "n"}, {"containers": [{"name": "c", "env": [{"name": "A"}]}]}):
        refused = api.patch(f"{pods}/p", {"spec": spec}, STRATEGIC)
        assert (refused.code, refused.body["details"]["causes"][0]["field"]) == (422, "spec")
        assert "pod updates may not change fields other than" in refused.message
    assert "may not add or remove containers" in api.patch(f"{pods}/p", {"spec": {"containers": []}}).message


def test_pod_status_and_spec_are_written_separately(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    mixed = {
        "metadata": {"annotations": {"a": "1"}},
        "spec": {"activeDeadlineSeconds": 9},
        "status": {"phase": "Running"},
    }
    through_status = api.patch(f"{pods}/p/status", mixed).body
    assert through_status["metadata"]["annotations"] == {"a": "1"}, "annotations pass through pods/status"
    assert through_status["status"]["phase"] == "Running"
    assert "activeDeadlineSeconds" not in through_status["spec"]
    through_pod = api.patch(f"{pods}/p", {"spec": {"activeDeadlineSeconds": 9}, "status": {"phase": "Failed"}}).body
    assert (through_pod["status"]["phase"], through_pod["spec"]["activeDeadlineSeconds"]) == ("Running", 9)


def test_json_patch_is_all_or_nothing(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(annotations={"a": "1"}))
    good = [{"op": "test", "path": "/metadata/annotations/a", "value": "1"}]
    good += [{"op": "add", "path": "/metadata/annotations/b~1c", "value": "2"}]
    assert api.patch(f"{pods}/p", good, JSON).body["metadata"]["annotations"] == {"a": "1", "b/c": "2"}
    missing = [{"op": "replace", "path": "/metadata/annotations/e", "value": "4"}]
    assert api.patch(f"{pods}/p", missing, JSON).body["metadata"]["annotations"]["e"] == "4", "replace may add"
    bad = [{"op": "add", "path": "/metadata/annotations/d", "value": "3"}, {"op": "remove", "path": "/metadata/x"}]
    assert (api.patch(f"{pods}/p", bad, JSON).code, api.patch(f"{pods}/p", {}, JSON).code) == (422, 400)
    assert "d" not in api.get(f"{pods}/p")["metadata"]["annotations"]
    assert api.patch(f"{pods}/p", {}, "application/foo").code == 415


def test_merge_patch_removes_with_null(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(labels={"a": "1", "b": "2"}))
    assert api.patch(f"{pods}/p", {"metadata": {"labels": {"a": None}}}).body["metadata"]["labels"] == {"b": "2"}


def test_strategic_merge_finds_list_items_by_their_key(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    for status in ("False", "True"):
        patch = {"status": {"conditions": [{"type": "Ready", "status": status}]}}
        changed = api.patch(f"{pods}/p/status", patch, STRATEGIC).body
    api.patch(f"{pods}/p/status", {"status": {"conditions": [{"type": "Other", "status": "True"}]}}, STRATEGIC)
    found = [(c["type"], c["status"]) for c in api.get(f"{pods}/p")["status"]["conditions"]]
    assert sorted(found) == [("Other", "True"), ("Ready", "True")]
    assert len(changed["status"]["conditions"]) == 1
    missing = api.patch(f"{pods}/p", {"spec": {"containers": [{"image": "x"}]}}, STRATEGIC)
    assert "does not contain declared merge key: name" in missing.message


@pytest.mark.kubernetes(1, 34)
def test_deleted_pod_is_removed_at_once_unless_it_is_bound(api: Api, pods: str) -> None:
    for name, spec in (("free", {}), ("bound", {"nodeName": "n1"})):
        api.ok("POST", pods, pod(name, spec=spec))
    assert api.ok("DELETE", f"{pods}/free")["kind"] == "Pod"
    assert api.call("GET", f"{pods}/free").code == 404
    going = api.ok("DELETE", f"{pods}/bound")["metadata"]
    assert (going["deletionGracePeriodSeconds"], going["generation"]) == (30, 2)
    assert api.ok("DELETE", f"{pods}/bound", {"gracePeriodSeconds": 60})["metadata"]["deletionGracePeriodSeconds"] == 30
    assert api.ok("DELETE", f"{pods}/bound", {"gracePeriodSeconds": 5})["metadata"]["deletionGracePeriodSeconds"] == 5
    api.ok("DELETE", f"{pods}/bound", {"gracePeriodSeconds": 0, "preconditions": {"uid": going["uid"]}})
    assert api.call("GET", f"{pods}/bound").code == 404


def test_deleted_pod_that_has_ended_is_removed_at_once(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(spec={"nodeName": "n1"}))
    api.patch(f"{pods}/p/status", {"status": {"phase": "Succeeded"}})
    api.ok("DELETE", f"{pods}/p")
    assert api.call("GET", f"{pods}/p").code == 404


def test_deleted_object_stays_until_its_last_finalizer_is_removed(api: Api, ns: str) -> None:
    maps = f"/api/v1/namespaces/{ns}/configmaps"
    api.ok("POST", maps, {"metadata": {"name": "m", "finalizers": ["a.b/c"]}})
    assert api.ok("DELETE", f"{maps}/m")["metadata"]["deletionTimestamp"]
    more = api.patch(f"{maps}/m", {"metadata": {"finalizers": ["a.b/c", "d.e/f"]}})
    assert "no new finalizers can be added if the object is being deleted" in more.message
    api.patch(f"{maps}/m", {"metadata": {"finalizers": None}})
    assert api.call("GET", f"{maps}/m").code == 404


@pytest.mark.parametrize(("policy", "finalizer"), [("Foreground", "foregroundDeletion"), ("Orphan", "orphan")])
def test_propagation_policy_becomes_a_finalizer(api: Api, ns: str, policy: str, finalizer: str) -> None:
    maps = f"/api/v1/namespaces/{ns}/configmaps"
    api.ok("POST", maps, {"metadata": {"name": "m", "finalizers": ["a.b/c"]}})
    api.ok("DELETE", f"{maps}/m", {"propagationPolicy": policy})
    metadata = api.get(f"{maps}/m")["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["finalizers"] == ["a.b/c", finalizer]
    api.ok("DELETE", f"{maps}/m", {"propagationPolicy": "Background"})
    assert api.get(f"{maps}/m")["metadata"]["finalizers"] == ["a.b/c"]


def test_unknown_propagation_policy_is_refused(api: Api, ns: str) -> None:
    maps = f"/api/v1/namespaces/{ns}/configmaps"
    api.ok("POST", maps, {"metadata": {"name": "m"}})
    refused = api.call("DELETE", f"{maps}/m", {"propagationPolicy": "Sideways"})
    assert refused.code == 422
    assert "propagationPolicy" in refused.message
    assert api.get(f"{maps}/m")


def test_deleting_plain_objects_is_answered_with_a_status(api: Api, ns: str) -> None:
    maps = f"/api/v1/namespaces/{ns}/configmaps"
    made = api.ok("POST", maps, {"metadata": {"name": "m"}, "data": {"a": "b"}})
    status = api.ok("DELETE", f"{maps}/m")
    assert status["status"] == "Success"
    assert status["details"] == {"name": "m", "kind": "configmaps", "uid": made["metadata"]["uid"]}


def test_eviction_deletes_the_pod_and_sets_a_condition(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod(spec={"nodeName": "n1"}))
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
    assert api.call("POST", f"{pods}/p/eviction", eviction).code == 201
    found = api.get(f"{pods}/p")
    assert found["metadata"]["deletionGracePeriodSeconds"] == 30
    assert found["status"]["conditions"][-1]["type"] == "DisruptionTarget"


@pytest.mark.kubernetes(1, 34)
def test_lease_update_without_resource_version_is_refused(api: Api, ns: str) -> None:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{ns}/leases"
    made = api.ok("POST", leases, {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}})
    blind = api.call("PUT", f"{leases}/l", {"metadata": {"name": "l"}, "spec": {"holderIdentity": "b"}})
    assert blind.code == 422
    assert "metadata.resourceVersion: Invalid value: 0: must be specified for an update" in blind.message
    made["spec"]["holderIdentity"] = "b"
    assert api.ok("PUT", f"{leases}/l", made)["spec"]["holderIdentity"] == "b"


@pytest.mark.parametrize("time", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00.123Z", "garbage"])
def test_lease_time_without_six_decimals_is_refused(api: Api, ns: str, time: str) -> None:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{ns}/leases"
    reply = api.call("POST", leases, {"metadata": {"name": "l"}, "spec": {"renewTime": time}})
    assert reply.code == 400
    assert f'parsing time "{time}"' in reply.message
    good = {"metadata": {"name": "l"}, "spec": {"renewTime": "2026-01-01T02:00:00.123000+02:00"}}
    assert api.ok("POST", leases, good)["spec"]["renewTime"] == "2026-01-01T00:00:00.123000Z"


def test_object_larger_than_etcds_limit_is_refused(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    for length, code in ((1_000_000, 200), (1_600_000, 500), (3_200_000, 413)):
        assert api.patch(f"{pods}/p/status", {"status": {"message": "x" * length}}).code == code


@pytest.mark.kubernetes(1, 34)
def test_status_without_qos_class_keeps_it(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    api.ok("PUT", f"{pods}/p/status", {"metadata": {"name": "p"}, "status": {"phase": "Running"}})
    assert api.get(f"{pods}/p")["status"]["qosClass"] == "BestEffort"


def test_node_status_patch_of_capacity_keeps_allocatable(api: Api, name: str) -> None:
    api.ok("POST", "/api/v1/nodes", {"metadata": {"name": name}, "status": {"capacity": {"cpu": "4"}}})
    patch = {"status": {"capacity": {"a.com/y": "1024Mi"}}, "spec": {"unschedulable": True}}
    node = api.patch(f"/api/v1/nodes/{name}/status", patch, STRATEGIC).body
    assert node["status"]["capacity"] == {"cpu": "4", "a.com/y": "1Gi"}
    assert node["status"]["allocatable"] == {"cpu": "4"}
    assert node["spec"] == {}
    api.ok("DELETE", f"/api/v1/nodes/{name}")


def test_priority_class_sets_the_pods_priority(api: Api, pods: str, name: str) -> None:
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    api.ok("POST", classes, {"metadata": {"name": name}, "value": 7})
    assert api.ok("POST", pods, pod(spec={"priorityClassName": name}))["spec"]["priority"] == 7
    unknown = api.call("POST", pods, pod("q", spec={"priorityClassName": "no-such"}))
    assert (unknown.code, unknown.reason) == (403, "Forbidden")
    api.ok("DELETE", f"{classes}/{name}")
