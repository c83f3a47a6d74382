"""manifests/base/agent-policy.yaml on a real API server: an agent can do its work, and what a stolen token cannot."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deviceplugin.inventory.node_objects import DEVICES
from mgpu.kube import Api, ApiError
from mgpu.kube.client import JSON_PATCH
from mgpu.model.device_object import DEVICE_API, MODEL_LABEL
from mgpu.model.slice_names import MPS
from playground.apiserver import write_kubeconfig
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from playground.nodes import MGPU, NodeSpec
from tests.agent_writes import OTHER, REFUSED, REFUSED_EVENTS, Write, annotated, event
from tests.agent_writes import OWN as OWN_NODE
from tests.e2e.bench import Bench, asking
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import A100
from tests.waiting import until

OWN = NodeSpec(OWN_NODE, [A100], dict(MGPU))
SLICED = NodeSpec(OTHER, [A100], dict(MGPU), partitioning=MPS)
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
    until(lambda: "other" in refusal(api, f"/api/v1/nodes/{SLICED.name}", annotated("mgpu.io/agent")))
    yield api
    api.close()


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


def path_of(write: Write) -> str:
    if write.target == "pod":
        return f"{SYSTEM}/pods/agent-{write.on}"
    if write.target == "device":
        return f"{DEVICES}/{write.on}"
    kind, _, subresource = write.target.partition("/")
    return f"/api/v1/{kind}s/{write.on}" + (f"/{subresource}" if subresource else "")


@pytest.mark.parametrize("write", REFUSED, ids=str)
def test_write_of_a_stolen_token_beyond_the_whitelist_is_refused(stolen: Api, write: Write) -> None:
    assert write.why in refusal(stolen, path_of(write), write.patch)


@pytest.mark.parametrize(("raw", "why"), REFUSED_EVENTS)
def test_event_that_another_component_or_node_would_write_is_refused(
    stolen: Api, raw: dict[str, Any], why: str
) -> None:
    with pytest.raises(ApiError, match=why):
        stolen.create("/api/v1/namespaces/default/events", raw, dryRun="All")


def test_own_event_is_accepted(stolen: Api) -> None:
    stolen.create("/api/v1/namespaces/default/events", event(), dryRun="All")


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
        assert refusal(api, of, {})
        assert refusal(stolen, of, {}) == ""
    api.close()


def test_others_are_not_asked(cluster: Cluster) -> None:
    labels = [{"op": "add", "path": "/metadata/labels/a", "value": "b"}]
    cluster.api.patch(f"/api/v1/nodes/{SLICED.name}", labels, JSON_PATCH, dryRun="All")
