"""manifests/base/agent-policy.yaml on a real API server: an agent can do its work, and what a stolen token cannot."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deviceplugin.reporter import DEVICES
from mgpu.kube import Api, ApiError
from mgpu.kube.client import JSON_PATCH
from mgpu.model.inventory import DEVICE_API, MODEL_LABEL
from mgpu.model.slices import MPS
from playground.apiserver import write_kubeconfig
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from playground.nodes import MGPU, NodeSpec
from tests.e2e.bench import Bench, asking
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import A100
from tests.waiting import until

OWN = NodeSpec("own", [A100], dict(MGPU))
SLICED = NodeSpec("sliced", [A100], dict(MGPU), partitioning=MPS)
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
SYSTEM = "/api/v1/namespaces/mgpu-system"
pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBEBUILDER_ASSETS"),
    reason="KUBEBUILDER_ASSETS is not set: ours has no ValidatingAdmissionPolicies",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient([OWN, SLICED]) as made:
        for policy in yaml.safe_load_all((MANIFESTS / "base/agent-policy.yaml").read_text()):
            plural = "policies" if policy["kind"].endswith("Policy") else "policybindings"
            made.api.create(f"{ADMISSION}/validatingadmission{plural}", policy)
        for node in (OWN, SLICED):
            given_a_token_of_its_node(made, node.name)
        yield made


def given_a_token_of_its_node(cluster: Cluster, node: str) -> None:
    """As the kubelet gives one to a DaemonSet's pod; the agent goes on with that."""
    own = [{"name": "c", "image": "mgpu"}]
    spec = {"serviceAccountName": "mgpu-deviceplugin", "nodeName": node, "containers": own}
    pod = cluster.api.create(f"{SYSTEM}/pods", {"metadata": {"name": f"agent-{node}"}, "spec": spec})
    bound = {"apiVersion": "v1", "kind": "Pod", "name": f"agent-{node}", "uid": pod["metadata"]["uid"]}
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}}
    token = cluster.api.create(f"{SYSTEM}/serviceaccounts/mgpu-deviceplugin/token", asked)["status"]["token"]
    ca = (cluster.folder / "api" / "apiserver.crt").read_bytes()
    write_kubeconfig(cluster.kubeconfig_of(f"{node}-token"), cluster.url, ca, token)
    write_kubeconfig(cluster.kubeconfig_of("deviceplugin"), cluster.url, ca, token)
    agent = f"deviceplugin-{node}"
    cluster.processes[agent].kill()
    cluster.restart(agent)


@pytest.fixture(scope="module")
def stolen(cluster: Cluster) -> Iterator[Api]:
    """The API server as somebody sees it who has the token of the agent on OWN, once the policies hold."""
    api = cluster.connect(f"{OWN.name}-token")
    until(lambda: "other" in refusal(api, f"/api/v1/nodes/{SLICED.name}", annotated("mgpu.io/a")))
    yield api
    api.close()


def annotated(*keys: str) -> dict[str, Any]:
    return {"metadata": {"annotations": dict.fromkeys(keys, "x")}}


def refusal(api: Api, path: str, patch: object) -> str:
    """Why the policy refuses a write; "" where it does not."""
    try:
        api.patch(path, patch, dryRun="All")
    except ApiError as error:
        if "ValidatingAdmissionPolicy" not in error.message:
            raise
        return error.message
    return ""


@pytest.mark.usefixtures("stolen")
def test_an_agent_does_all_its_work(bench: Bench) -> None:
    """Each of its writes: of pods, of its Node and its status, of the Device."""
    api = bench.cluster.api
    bench.create({**(p := asking("p", gpu_mem=1)), "spec": {**p["spec"], "nodeSelector": on(OWN.name)}})
    bench.exact("p")
    until(lambda: bench.pod("p").metadata.annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true")
    slice_ = {"name": "c", "image": "cuda", "resources": {"limits": {"nvidia.com/gpu-4gb": "1"}}}
    bench.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "s"}, "spec": {"containers": [slice_]}})
    bench.runs("s")
    for node in (OWN.name, SLICED.name):
        api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {MODEL_LABEL: "wrong"}}})
        api.patch(f"/api/v1/nodes/{node}/status", {"status": {"capacity": {"vke.volcengine.com/mgpu-memory": "1"}}})
        api.delete(f"{DEVICES}/{node}")
        until(lambda node=node: api.get(f"/api/v1/nodes/{node}")["metadata"]["labels"][MODEL_LABEL] != "wrong")  # type: ignore[misc]
        until(lambda node=node: node in {raw["metadata"]["name"] for raw in api.list(DEVICES)[0]})  # type: ignore[misc]
        agent = bench.cluster.processes[f"deviceplugin-{node}"]
        assert "ValidatingAdmissionPolicy" not in agent.tail(1000)


def on(node: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": node}


@pytest.mark.parametrize(
    ("path", "patch", "why"),
    [
        (f"/api/v1/nodes/{SLICED.name}/status", annotated("mgpu.io/a"), "and no other"),
        (f"/api/v1/nodes/{OWN.name}", {"spec": {"unschedulable": True}}, "no spec"),
        (f"/api/v1/nodes/{OWN.name}", {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}, "no spec"),
        (f"/api/v1/nodes/{OWN.name}", {"metadata": {"labels": {"node-role.kubernetes.io/x": ""}}}, "no labels"),
        (f"/api/v1/nodes/{OWN.name}/status", {"metadata": {"labels": {"kubernetes.io/os": None}}}, "no labels"),
        (f"/api/v1/nodes/{OWN.name}", annotated("flannel.alpha.coreos.com/public-ip"), "no annotations"),
        (f"/api/v1/nodes/{OWN.name}", {"metadata": {"finalizers": ["a.io/b"]}}, "finalizers"),
        (f"/api/v1/nodes/{OWN.name}/status", {"status": {"capacity": {"cpu": "1000"}}}, "no capacity"),
        (f"/api/v1/nodes/{OWN.name}/status", {"status": {"capacity": {"memory": None}}}, "no capacity"),
        (f"/api/v1/nodes/{OWN.name}/status", {"status": {"conditions": None}}, "no conditions"),
        (f"{DEVICES}/{SLICED.name}", {"spec": {"devices": []}}, "and no other"),
        (f"{SYSTEM}/pods/agent-{SLICED.name}", annotated("mgpu.io/a"), "and no others"),
        (f"{SYSTEM}/pods/agent-{OWN.name}", annotated("a.io/b"), "no annotations"),
        (f"{SYSTEM}/pods/agent-{OWN.name}", {"metadata": {"labels": {"app": "x"}}}, "but annotations"),
        (f"{SYSTEM}/pods/agent-{OWN.name}", {"spec": {"containers": [{"name": "c", "image": "x"}]}}, "but annotations"),
    ],
)
def test_a_stolen_token_changes_nothing_else(stolen: Api, path: str, patch: object, why: str) -> None:
    assert why in refusal(stolen, path, patch)


def test_a_stolen_token_makes_and_removes_no_device_of_another_node(stolen: Api) -> None:
    with pytest.raises(ApiError, match="and no other"):
        stolen.create(
            DEVICES,
            {"apiVersion": DEVICE_API, "kind": "Device", "metadata": {"name": "third"}, "spec": {"devices": []}},
        )
    with pytest.raises(ApiError, match="and no other"):
        stolen.delete(f"{DEVICES}/{SLICED.name}")
    stolen.delete(f"{DEVICES}/{OWN.name}", dryRun="All")


def test_a_token_that_names_no_node_writes_nothing(cluster: Cluster, stolen: Api) -> None:
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.api.create(f"{SYSTEM}/serviceaccounts/mgpu-deviceplugin/token", asked)["status"]["token"]
    path = cluster.kubeconfig_of("unbound")
    write_kubeconfig(path, cluster.url, (cluster.folder / "api" / "apiserver.crt").read_bytes(), token)
    api = cluster.connect("unbound")
    for of in (f"/api/v1/nodes/{OWN.name}", f"{SYSTEM}/pods/agent-{OWN.name}"):
        assert refusal(api, of, annotated("mgpu.io/a"))
        assert refusal(stolen, of, annotated("mgpu.io/a")) == ""
    api.close()


def test_others_are_not_asked(cluster: Cluster) -> None:
    labels = [{"op": "add", "path": "/metadata/labels/a", "value": "b"}]
    cluster.api.patch(f"/api/v1/nodes/{SLICED.name}", labels, JSON_PATCH, dryRun="All")
