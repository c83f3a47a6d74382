"""The Kubernetes Python client, namespaces, and reviews of users."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, watch

from tests.playground.apiserver.api import Api, binding, pod


@pytest.fixture
def core(api: Api) -> Iterator[Any]:
    configuration = client.Configuration(host=api.url, api_key={"authorization": "Bearer admin-token"})
    configuration.ssl_ca_cert = api.ca
    with client.ApiClient(configuration) as connection:
        yield client.CoreV1Api(connection)


def test_python_client_creates_lists_patches_and_binds_pods(core: Any, ns: str) -> None:
    for name in "abc":
        core.create_namespaced_pod(ns, pod(name))
    page = core.list_namespaced_pod(ns, limit=2)
    rest = core.list_namespaced_pod(ns, limit=2, _continue=page.metadata._continue)
    assert [p.metadata.name for p in page.items + rest.items] == ["a", "b", "c"]
    assert rest.metadata._continue is None
    core.patch_namespaced_pod("a", ns, {"metadata": {"labels": {"x": "1"}}})
    core.patch_namespaced_pod("a", ns, [{"op": "add", "path": "/metadata/labels/y", "value": "2"}])
    core.patch_namespaced_pod_status("a", ns, {"status": {"phase": "Running"}})
    core.create_namespaced_pod_binding("a", ns, binding("a"), _preload_content=False)
    found = core.read_namespaced_pod("a", ns)
    assert (found.metadata.labels, found.status.phase) == ({"x": "1", "y": "2"}, "Running")
    assert found.spec.node_name == "n1"


def test_python_client_watch_follows_a_list(core: Any, ns: str) -> None:
    listed = core.list_namespaced_pod(ns)
    core.create_namespaced_pod(ns, pod())
    core.delete_namespaced_pod("p", ns)
    watcher: Any = watch.Watch  # the client has no types
    stream = watcher().stream(
        core.list_namespaced_pod, ns, resource_version=listed.metadata.resource_version, timeout_seconds=10
    )
    seen = []
    for event in stream:
        seen.append(event["type"])
        if event["type"] == "DELETED":
            break
    assert seen == ["ADDED", "MODIFIED", "DELETED"]


def test_python_client_raises_api_exceptions(core: Any, ns: str) -> None:
    with pytest.raises(client.ApiException, match='pods \\\\"p\\\\" not found') as caught:
        core.read_namespaced_pod("p", ns)
    assert caught.value.status == 404


def test_collection_is_deleted_by_selector(api: Api, core: Any, ns: str, pods: str) -> None:
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "1"}), ("c", {"x": "2"})):
        core.create_namespaced_pod(ns, pod(name, labels=labels))
    core.delete_collection_namespaced_pod(ns, label_selector="x=1")
    assert [p["metadata"]["name"] for p in api.get(pods)["items"]] == ["c"]


def test_deleted_namespace_is_removed_when_it_is_empty(api: Api, ns: str, pods: str) -> None:
    if api.real:
        pytest.skip("there is no controller manager that would empty it")
    api.ok("POST", pods, pod("free"))
    api.ok("POST", pods, pod("bound", spec={"nodeName": "n1"}))
    api.ok("POST", f"/api/v1/namespaces/{ns}/configmaps", {"metadata": {"name": "m"}})
    assert api.ok("DELETE", f"/api/v1/namespaces/{ns}")["status"]["phase"] == "Terminating"
    assert [p["metadata"]["name"] for p in api.get(pods)["items"]] == ["bound"]
    late = api.call("POST", pods, pod("late"))
    assert (late.code, late.body["details"]["causes"][0]["reason"]) == (403, "NamespaceTerminating")
    api.ok("DELETE", f"{pods}/bound", {"gracePeriodSeconds": 0})
    assert api.call("GET", f"/api/v1/namespaces/{ns}").code == 404


def test_permanent_namespace_cannot_be_deleted(api: Api) -> None:
    for name in ("default", "kube-system"):
        reply = api.call("DELETE", f"/api/v1/namespaces/{name}")
        assert (reply.code, reply.message) == (
            403, f'namespaces "{name}" is forbidden: this namespace may not be deleted',
        )  # fmt: skip


def test_self_subject_review_names_the_user(api: Api) -> None:
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    mine = api.ok("POST", path, body)["status"]["userInfo"]
    assert mine["username"] == "kubernetes-admin"
    assert {"system:masters", "system:authenticated"} <= set(mine["groups"])
    lent = api.ok("POST", path, body, **{"Impersonate-User": "someone"})["status"]["userInfo"]
    assert lent["username"] == "someone"
