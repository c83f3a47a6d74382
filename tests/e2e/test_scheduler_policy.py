"""manifests/base/scheduler-policy.yaml on a real API server: the scheduler works, and a stolen token does no more."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mgpu.kube import Api, ApiError
from mgpu.model.slices import MPS
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from playground.nodes import MGPU, NodeSpec
from tests.e2e.bench import Bench, share
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import A100, Named
from tests.e2e.test_agent_policy import refusal
from tests.waiting import until

NODES = [NodeSpec("n1", [A100, A100], dict(MGPU)), NodeSpec("mps-1", [A100], dict(MGPU), partitioning=MPS)]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PODS, SYSTEM = "/api/v1/namespaces/kube-system/pods", "/api/v1/namespaces/mgpu-system/pods"
pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBEBUILDER_ASSETS"),
    reason="KUBEBUILDER_ASSETS is not set: ours has no ValidatingAdmissionPolicies",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient(NODES) as made:
        for policy in yaml.safe_load_all((MANIFESTS / "base/scheduler-policy.yaml").read_text()):
            plural = "policies" if policy["kind"].endswith("Policy") else "policybindings"
            made.api.create(f"{ADMISSION}/validatingadmission{plural}", policy)
        for path in (PODS, SYSTEM):
            own = {"containers": [{"name": "c", "image": "mgpu"}], "nodeSelector": {"a": "nowhere"}}
            made.api.create(path, {"metadata": {"name": "victim", "labels": {"app": "a"}}, "spec": own})
        yield made


@pytest.fixture(scope="module")
def stolen(cluster: Cluster) -> Iterator[Api]:
    """The API server as somebody with the scheduler's token sees it, once the policies hold."""
    api = cluster.connect("scheduler")
    until(lambda: refusal(api, "/api/v1/nodes/n1", {"spec": {"unschedulable": True}}))
    until(lambda: refusal(api, f"{PODS}/victim", {"metadata": {"labels": {"app": "b"}}}))
    yield api
    api.close()


@pytest.mark.usefixtures("stolen")
def test_the_scheduler_does_all_its_work(bench: Bench) -> None:
    """Late decisions, a pod that fails, plans of slices, announcements that cards came free."""
    bench.create(share("late", nodeName="n1"))
    bench.exact("late")
    bench.create(share("large", mib=100 << 10, nodeName="n1"))  # more than a card, less than both
    until(lambda: bench.pod("large").status.phase == "Failed")
    slice_ = {"name": "c", "image": "cuda", "resources": {"limits": {"nvidia.com/gpu-4gb": "1"}}}
    bench.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "s"}, "spec": {"containers": [slice_]}})
    bench.runs("s")
    bench.delete("late")
    api = bench.cluster.api
    until(lambda: "mgpu.io/cards-changed" in api.get("/api/v1/nodes/n1")["metadata"]["annotations"])
    assert "ValidatingAdmissionPolicy" not in bench.cluster.processes["scheduler"].tail(1000)


ACCEPTED: dict[str, tuple[str, Any]] = {
    "the label of the leader": (f"{SYSTEM}/victim", {"metadata": {"labels": {"mgpu.io/leads": "true"}}}),
    "a record": (f"{PODS}/victim", {"metadata": {"annotations": {"mgpu.io/container-devices": "{}"}}}),
    "a condition": (f"{PODS}/victim/status", {"status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}}),
    "a nomination": (f"{PODS}/victim/status", {"status": {"nominatedNodeName": "n1"}}),
}
REFUSED: dict[str, tuple[str, Any, str]] = {
    "another image": (
        f"{PODS}/victim",
        {"spec": {"containers": [{"name": "c", "image": "attackers"}]}},
        "no spec of a pod",
    ),
    "a deadline": (f"{PODS}/victim", {"spec": {"activeDeadlineSeconds": 1}}, "no spec of a pod"),
    "a label": (f"{PODS}/victim", {"metadata": {"labels": {"app": "b"}}}, "no labels of a pod"),
    "the leader's label elsewhere": (
        f"{PODS}/victim",
        {"metadata": {"labels": {"mgpu.io/leads": "true"}}},
        "no labels of a pod",
    ),
    "another's annotation": (f"{PODS}/victim", {"metadata": {"annotations": {"a": "b"}}}, "no annotations of a pod"),
    "an owner": (
        f"{PODS}/victim",
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u"}]}},
        "no metadata of a pod",
    ),
    "a finalizer": (f"{PODS}/victim", {"metadata": {"finalizers": ["a/b"]}}, "no metadata of a pod"),
    "an address": (f"{PODS}/victim/status", {"status": {"podIPs": [{"ip": "192.0.2.1"}]}}, "no status of a pod"),
    "a phase": (f"{PODS}/victim/status", {"status": {"phase": "Succeeded"}}, "no phase but Failed"),
    "a taint": (
        "/api/v1/nodes/n1",
        {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}},
        "nothing of a Node but annotations",
    ),
    "a label of a node": ("/api/v1/nodes/n1", {"metadata": {"labels": {"a": "b"}}}, "metadata but annotations"),
    "another's annotation of a node": (
        "/api/v1/nodes/n1",
        {"metadata": {"annotations": {"mgpu.io/agent": "{}"}}},
        "no annotations of a Node",
    ),
}


@pytest.mark.parametrize(("path", "patch"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_write_that_schedulers_need_is_accepted(stolen: Api, path: str, patch: Any) -> None:
    assert refusal(stolen, path, patch) == ""


@pytest.mark.parametrize(("path", "patch", "why"), REFUSED.values(), ids=REFUSED)
def test_a_write_that_only_an_attacker_needs_is_refused(stolen: Api, path: str, patch: Any, why: str) -> None:
    assert why in refusal(stolen, path, patch)


def new_pod(name: str = "mtgpupod-occupypod-n1-abc", owners: Any = (), **spec: Any) -> Any:
    own = {"containers": [{"name": "c", "image": "attackers"}], "automountServiceAccountToken": False, **spec}
    return {"metadata": {"name": name, "ownerReferences": list(owners)}, "spec": own}


MTGPUPOD = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": "m", "uid": "u", "controller": True}
CREATED: dict[str, tuple[str, Any, str]] = {
    "an administrator's pod": (PODS, new_pod("root"), "no pods in kube-system but occupy pods"),
    "an occupy pod with a token": (PODS, new_pod(automountServiceAccountToken=True), "but occupy pods"),
    "an occupy pod with a token in a volume": (
        PODS,
        new_pod(
            serviceAccountName="admin",
            volumes=[{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}],
        ),
        "but occupy pods",
    ),
    "an occupy pod of the node": (PODS, new_pod(hostNetwork=True), "but occupy pods"),
    "a pod of mgpu-system": (SYSTEM, new_pod("m", [MTGPUPOD]), "no pods in mgpu-system"),
    "a pod of nobody": ("/api/v1/namespaces/default/pods", new_pod("m"), "but those of MtgpuPods"),
    "a pod of another name": ("/api/v1/namespaces/default/pods", new_pod("x", [MTGPUPOD]), "but those of MtgpuPods"),
}


@pytest.mark.parametrize(("path", "pod", "why"), CREATED.values(), ids=CREATED)
def test_a_pod_that_would_run_as_another_service_account_is_refused(stolen: Api, path: str, pod: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        stolen.create(f"{path}?dryRun=All", pod)


@pytest.mark.parametrize("meta", [{"labels": {"app": "a"}}, {"annotations": {"a": "b"}}], ids=["label", "annotation"])
def test_a_binding_that_writes_what_is_not_mgpus_is_refused(stolen: Api, meta: Any) -> None:
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "victim", **meta}, "target": {"name": "n1"}}
    with pytest.raises(ApiError, match="mgpu-scheduler binds pods without"):
        stolen.create(f"{PODS}/victim/binding?dryRun=All", binding)


@pytest.mark.usefixtures("stolen")
def test_the_scheduler_runs_mtgpupods(bench: Bench) -> None:
    named = Named(bench)
    named.create("m", "abc", "0.5", "n1")
    named.runs("m")
    named.delete("m")
    until(lambda: [*named.occupying()] == ["victim"])
    assert "ValidatingAdmissionPolicy" not in bench.cluster.processes["scheduler"].tail(1000)
