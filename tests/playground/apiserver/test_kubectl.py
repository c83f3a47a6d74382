"""Real kubectl as a user types it, without flags that switch checks off."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.playground.apiserver.api import Api, binding, pod
from tests.playground.apiserver.hooks import Hooks, allow, deny

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine")

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]
_TIMEOUT = 60


@pytest.fixture
def kubectl(api: Api, ns: str, tmp_path: Path) -> Kubectl:
    """Runs kubectl in the test's namespace; a failure fails the test unless `fails` says that it should."""
    environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig), "HOME": str(tmp_path)}

    def run(*words: str, given: object = None, fails: bool = False) -> "subprocess.CompletedProcess[str]":
        text = None if given is None else json.dumps(given)
        command = ["kubectl", "--namespace", ns, *words]
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
        assert (done.returncode != 0) is fails, done.stderr
        return done

    return run


def _named(body: dict[str, object]) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Pod", **body}


def test_kubectl_creates_gets_describes_and_deletes(kubectl: Kubectl) -> None:
    created = kubectl("create", "-f", "-", given=_named(pod(resources={"limits": {"a.com/x": 2}})))
    assert created.stdout == "pod/p created\n"
    listed = kubectl("get", "pods").stdout.splitlines()
    assert listed[0].split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert listed[1].split()[:4] == ["p", "0/1", "Pending", "0"]
    assert "NOMINATED NODE" in kubectl("get", "pods", "-o", "wide").stdout
    assert kubectl("get", "pods", "-o", "name").stdout == "pod/p\n"
    assert 'a.com/x: "2"' in kubectl("get", "pod", "p", "-o", "yaml").stdout
    described = kubectl("describe", "pod", "p").stdout
    assert "a.com/x:  2" in described
    assert "Events:" in described
    assert kubectl("delete", "pod", "p").stdout.startswith('pod "p" deleted')
    assert 'pods "p" not found' in kubectl("get", "pod", "p", fails=True).stderr


def test_kubectl_shows_refusals_and_warnings(kubectl: Kubectl, hooks: Hooks) -> None:
    typo = kubectl("create", "-f", "-", given=_named(pod(spec={"nodeNaem": "n"})), fails=True)
    assert 'strict decoding error: unknown field "spec.nodeNaem"' in typo.stderr
    hooks.add("w", allow(warnings=["this share is small"]))
    hooks.add("v", deny("core must be positive", 403), mutating=False, objectSelector={"matchLabels": {"bad": "1"}})
    denied = kubectl("create", "-f", "-", given=_named(pod(labels={"bad": "1"})), fails=True)
    assert 'admission webhook "v.test.mgpu.io" denied the request: core must be positive' in denied.stderr
    warned = kubectl("create", "-f", "-", given=_named(pod()))
    assert "Warning: this share is small" in warned.stderr


@pytest.mark.parametrize("mode", [(), ("--server-side",)], ids=["client", "server"])
def test_kubectl_apply_twice_updates_and_removes_fields(kubectl: Kubectl, mode: tuple[str, ...]) -> None:
    first = _named(pod(labels={"a": "1", "b": "1"}, annotations={"k": "v"}))
    assert kubectl("apply", *mode, "-f", "-", given=first).returncode == 0
    second = _named(pod(image="new", labels={"a": "2"}, annotations={"k": "v"}))
    assert kubectl("apply", *mode, "-f", "-", given=second).returncode == 0
    found = json.loads(kubectl("get", "pod", "p", "-o", "json").stdout)
    assert found["metadata"]["labels"] == {"a": "2"}
    assert found["metadata"]["annotations"]["k"] == "v"
    assert found["spec"]["containers"][0]["image"] == "new"


def test_kubectl_apply_unchanged_says_so(kubectl: Kubectl) -> None:
    body = _named(pod(labels={"a": "1"}, resources={"limits": {"a.com/x": "1Gi"}}))
    kubectl("apply", "-f", "-", given=body)
    assert kubectl("apply", "-f", "-", given=body).stdout == "pod/p unchanged\n"


def test_kubectl_labels_annotates_and_patches(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", given=_named(pod()))
    kubectl("label", "pod", "p", "a=1")
    kubectl("annotate", "pod", "p", "b=2")
    kubectl("patch", "pod", "p", "-p", '{"metadata":{"labels":{"c":"3"}}}')
    kubectl("patch", "pod", "p", "--type=json", "-p", '[{"op":"remove","path":"/metadata/labels/a"}]')
    assert kubectl("get", "pods", "-l", "c=3", "-o", "jsonpath={.items[*].metadata.labels}").stdout == '{"c":"3"}'
    assert kubectl("get", "pod", "p", "-o", "jsonpath={.metadata.annotations}").stdout == '{"b":"2"}'


def test_kubectl_writes_protobuf(kubectl: Kubectl, name: str) -> None:
    kubectl("create", "configmap", "m", "--from-literal=a=b")
    kubectl("create", "secret", "generic", "s", "--from-literal=a=b")
    assert kubectl("get", "configmap", "m", "-o", "jsonpath={.data}").stdout == '{"a":"b"}'
    assert kubectl("get", "secret", "s", "-o", "jsonpath={.data.a} {.type}").stdout == "Yg== Opaque"
    kubectl("create", "namespace", f"{name}-more")
    kubectl("delete", "namespace", f"{name}-more", "--wait=false")
    assert kubectl("auth", "can-i", "create", "pods").stdout == "yes\n"


def test_kubectl_get_watch_shows_changes_as_rows(api: Api, pods: str, kubectl: Kubectl) -> None:
    api.ok("POST", pods, pod())
    process = subprocess.Popen(
        ["kubectl", "--namespace", pods.split("/")[4], "get", "pods", "--watch"],
        env={**os.environ, "KUBECONFIG": str(api.kubeconfig)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        rows = [process.stdout.readline().split() for _ in range(2)]
        api.patch(f"{pods}/p/status", {"status": {"phase": "Running"}})
        rows.append(process.stdout.readline().split())
        process.terminate()
    assert [row[2] for row in rows] == ["STATUS", "Pending", "Running"]
    kubectl("delete", "pod", "p")


def test_kubectl_delete_of_a_bound_pod_waits_for_the_kubelet(api: Api, pods: str, kubectl: Kubectl) -> None:
    api.ok("POST", pods, pod())
    api.ok("POST", f"{pods}/p/binding", binding())
    kubectl("delete", "pod", "p", "--wait=false")
    assert kubectl("get", "pods").stdout.splitlines()[1].split()[2] == "Terminating"
    kubectl("delete", "pod", "p", "--timeout=1s", fails=True)
    kubectl("delete", "pod", "p", "--force", "--grace-period=0")
    assert kubectl("get", "pods").stdout == ""


def test_kubectl_logs_shows_containers(api: Api, pods: str, kubectl: Kubectl) -> None:
    if api.real:
        pytest.skip("there is no kubelet")
    two = pod(spec={"containers": [{"name": n, "image": "x"} for n in ("a", "b")], "nodeName": "n1"})
    for body in (pod("one", spec={"nodeName": "n1"}), {**two, "metadata": {"name": "two"}}):
        api.ok("POST", pods, body)
    api.ok("POST", pods, pod("not-started", spec={"nodeName": "n1"}))
    namespace = pods.split("/")[4]
    assert kubectl("logs", "one").stdout == f"first\n{namespace}/one/c\n"
    assert kubectl("logs", "two", "-c", "b", "--tail=1").stdout == f"{namespace}/two/b\n"
    assert "is waiting to start" in kubectl("logs", "not-started", fails=True).stderr


def test_kubectl_get_events_lists_them(api: Api, ns: str, kubectl: Kubectl) -> None:
    about = {"kind": "Pod", "name": "p", "namespace": ns}
    event = {"metadata": {"name": "e"}, "involvedObject": about, "reason": "NoCard", "message": "2 cards short"}
    event |= {"type": "Warning", "lastTimestamp": "2026-01-01T00:00:00Z", "firstTimestamp": "2026-01-01T00:00:00Z"}
    api.ok("POST", f"/api/v1/namespaces/{ns}/events", event)
    row = kubectl("get", "events").stdout.splitlines()[1].split(maxsplit=4)
    assert row[1:] == ["Warning", "NoCard", "pod/p", "2 cards short"]


def test_kubectl_lists_nodes_and_api_resources(api: Api, name: str, kubectl: Kubectl) -> None:
    ready = {"type": "Ready", "status": "True"}
    body = {"metadata": {"name": name}, "status": {"conditions": [ready], "capacity": {"cpu": "4"}}}
    api.ok("POST", "/api/v1/nodes", body)
    assert kubectl("get", "node", name).stdout.splitlines()[1].split()[:2] == [name, "Ready"]
    kubectl("cordon", name)
    assert "SchedulingDisabled" in kubectl("get", "node", name).stdout
    assert "Unschedulable:      true" in kubectl("describe", "node", name).stdout
    resources = {line.split()[0] for line in kubectl("api-resources", "--no-headers").stdout.splitlines()}
    assert {"pods", "nodes", "leases", "customresourcedefinitions", "deployments"} <= resources
    api.ok("DELETE", f"/api/v1/nodes/{name}")
