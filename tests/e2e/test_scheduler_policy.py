"""manifests/base/scheduler-policy.yaml on a real API server: the scheduler works, and a stolen token does no more."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mgpu.kube import Api, ApiError
from mgpu.kube.leader import Leader
from mgpu.model.pods import SUGGESTED_NODE
from mgpu.model.slice_names import MPS
from mgpu.settings import load_settings
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from playground.nodes import MGPU, NodeSpec
from scheduler.mtgpupods import occupy_pods
from tests.e2e.bench import Bench, share
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import A100, MTGPUPODS, Named, mtgpupod
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
    "a suggested node": (
        f"{PODS}/victim/status",
        {"metadata": {"annotations": {SUGGESTED_NODE: "n1"}}, "status": {"nominatedNodeName": "n1"}},
    ),
    "no suggested node": (
        f"{PODS}/victim/status",
        {"metadata": {"annotations": {SUGGESTED_NODE: None}}, "status": {"nominatedNodeName": None}},
    ),
    "a pod that fails": (f"{PODS}/victim/status", {"status": {"phase": "Failed", "reason": "a", "message": "b"}}),
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
    "a condition": (
        f"{PODS}/victim/status",
        {"status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}},
        "no status of a pod",
    ),
    "a nomination": (f"{PODS}/victim/status", {"status": {"nominatedNodeName": "n1"}}, "that it suggests"),
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


OCCUPY = occupy_pods.manifest("n1", "abc", load_settings())
CONTAINER = OCCUPY["spec"]["containers"][0]


def an_occupy_pod(meta: Any = None, container: Any = None, **spec: Any) -> Any:
    """An occupy pod as the scheduler creates it, but for these fields of its metadata, container and spec."""
    own = {**OCCUPY["spec"], "containers": [{**CONTAINER, **(container or {})}], **spec}
    return {"metadata": {**OCCUPY["metadata"], **(meta or {})}, "spec": own}


def new_pod(name: str, owners: Any = ()) -> Any:
    own = {"containers": [{"name": "c", "image": "attackers"}]}
    return {"metadata": {"name": name, "ownerReferences": list(owners)}, "spec": own}


def secret(name: str) -> Any:
    return {"secretKeyRef": {"name": name, "key": "k"}}


MTGPUPOD = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": "m", "uid": "u", "controller": True}
OTHER = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "v"}
DEFAULT = "/api/v1/namespaces/default/pods"
TOKEN = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
ROOT = {**CONTAINER["securityContext"], "runAsNonRoot": False, "runAsUser": 0}
CREATED: dict[str, tuple[str, Any, str]] = {
    "an administrator's pod": (PODS, new_pod("root"), "no pods in kube-system but occupy pods"),
    "an occupy pod with a token": (PODS, an_occupy_pod(automountServiceAccountToken=True), "without a token"),
    "an occupy pod with a token in a volume": (
        PODS,
        an_occupy_pod(serviceAccountName="admin", volumes=[TOKEN]),
        "without a token",
    ),
    "an occupy pod of another account": (PODS, an_occupy_pod(serviceAccountName="admin"), "without a token"),
    "an occupy pod with another's image secrets": (
        PODS,
        an_occupy_pod(imagePullSecrets=[{"name": "s"}]),
        "without a token",
    ),
    "an occupy pod of the node": (PODS, an_occupy_pod(hostNetwork=True), "without a token"),
    "an occupy pod on a node": (PODS, an_occupy_pod(nodeName="n1"), "without a token"),
    "an occupy pod with a kernel's setting": (
        PODS,
        an_occupy_pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
        "without a token",
    ),
    "an occupy pod that keeps others away": (
        PODS,
        an_occupy_pod(
            affinity={
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"labelSelector": {}, "namespaceSelector": {}, "topologyKey": "kubernetes.io/hostname"}
                    ]
                }
            }
        ),
        "without a token",
    ),
    "an occupy pod that evicts others": (
        PODS,
        an_occupy_pod(priorityClassName="system-node-critical"),
        "without a token",
    ),
    "an occupy pod that reads a Secret": (
        PODS,
        an_occupy_pod(container={"env": [{"name": "A", "valueFrom": secret("s")}]}),
        "only container",
    ),
    "an occupy pod that reads all of a Secret": (
        PODS,
        an_occupy_pod(container={"envFrom": [{"secretRef": {"name": "s"}}]}),
        "only container",
    ),
    "an occupy pod with a command": (PODS, an_occupy_pod(container={"command": ["sh"]}), "only container"),
    "an occupy pod with arguments": (PODS, an_occupy_pod(container={"args": ["1"]}), "only container"),
    "an occupy pod as root": (PODS, an_occupy_pod(container={"securityContext": ROOT}), "only container"),
    "an occupy pod with a port of the node": (
        PODS,
        an_occupy_pod(container={"ports": [{"containerPort": 1, "hostPort": 1}]}),
        "only container",
    ),
    "an occupy pod with two containers": (
        PODS,
        an_occupy_pod(containers=[CONTAINER, {**CONTAINER, "name": "d"}]),
        "only container",
    ),
    "an occupy pod that answers DNS": (
        PODS,
        an_occupy_pod({"labels": {**OCCUPY["metadata"]["labels"], "k8s-app": "kube-dns"}}),
        "no labels and annotations of others",
    ),
    "an occupy pod with an owner": (PODS, an_occupy_pod({"ownerReferences": [OTHER]}), "of others"),
    "an occupy pod with a finalizer": (PODS, an_occupy_pod({"finalizers": ["a/b"]}), "of others"),
    "a pod of mgpu-system": (SYSTEM, new_pod("m", [MTGPUPOD]), "no pods in mgpu-system"),
    "a pod of nobody": (DEFAULT, new_pod("m"), "but those of MtgpuPods"),
}


@pytest.mark.parametrize(("path", "pod", "why"), CREATED.values(), ids=CREATED)
def test_a_pod_that_would_run_as_another_service_account_is_refused(stolen: Api, path: str, pod: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        stolen.create(f"{path}?dryRun=All", pod)


def test_an_occupy_pod_as_the_scheduler_makes_it_is_accepted(stolen: Api) -> None:
    stolen.create(f"{PODS}?dryRun=All", an_occupy_pod())


@pytest.mark.parametrize(
    ("name", "owners"),
    [("x", [MTGPUPOD]), ("m", [MTGPUPOD, OTHER]), ("m", [{**MTGPUPOD, "controller": False}])],
    ids=["another name", "a second owner", "no controller"],
)
@pytest.mark.usefixtures("bare")
def test_a_pod_that_an_mtgpupod_does_not_control_alone_is_refused(stolen: Api, name: str, owners: Any) -> None:
    with pytest.raises(ApiError, match="but those of MtgpuPods"):
        stolen.create(f"{DEFAULT}?dryRun=All", new_pod(name, owners))


@pytest.fixture
def bare(cluster: Cluster) -> Iterator[None]:
    """Without the webhooks of the suite: the policies hold by themselves."""
    found = {}
    for kind, name in (("mutating", "0-mgpu-webhook"), ("mutating", "mgpu-webhook"), ("validating", "mgpu-webhook")):
        path = f"{ADMISSION}/{kind}webhookconfigurations"
        found[path, name] = cluster.api.get(f"{path}/{name}")
        cluster.api.delete(f"{path}/{name}")
    until(lambda: not asked(cluster.api))
    yield
    for (path, _), raw in found.items():
        meta = {"name": raw["metadata"]["name"], "labels": raw["metadata"].get("labels") or {}}
        cluster.api.create(path, {**raw, "metadata": meta})
    until(lambda: asked(cluster.api))


def asked(api: Api) -> bool:
    """Whether any of the webhooks is asked about new pods: a seal is taken off, or denied."""
    meta = {"name": "p", "annotations": {"mgpu.io/seal": "none"}}
    try:
        made = api.create(f"{DEFAULT}?dryRun=All", {**new_pod("p"), "metadata": meta})
    except ApiError as error:
        if "admission webhook" not in error.message:
            raise
        return True
    return "mgpu.io/seal" not in (made["metadata"].get("annotations") or {})


@pytest.mark.parametrize("path", [f"{PODS}/victim", f"{SYSTEM}/victim", f"{DEFAULT}/tenants"])
def test_a_pod_that_the_suite_did_not_create_is_not_deleted(stolen: Api, cluster: Cluster, path: str) -> None:
    if path.endswith("tenants"):
        labels = {"mgpu.io/occupies": "abc"}
        pod = {"metadata": {"name": "tenants", "labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        cluster.api.create(DEFAULT, pod)
    with pytest.raises(ApiError, match="deletes no pods but") as refused:
        stolen.delete(path)
    assert refused.value.status in (403, 422)


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ({"spec": {"serviceAccountName": "admin"}}, "no spec of an MtgpuPod"),
        ({"metadata": {"labels": {"app": "a"}}}, "no metadata of an MtgpuPod"),
        ({"metadata": {"annotations": {"a": "b"}}}, "no metadata of an MtgpuPod"),
        ({"metadata": {"finalizers": []}}, "no finalizers of an MtgpuPod"),
    ],
    ids=["spec", "label", "annotation", "another's finalizer"],
)
@pytest.mark.usefixtures("bare")
def test_an_mtgpupod_is_changed_in_its_finalizer_alone(cluster: Cluster, stolen: Api, patch: Any, why: str) -> None:
    wanted = mtgpupod("held", "abc", "0.1", "nowhere")
    wanted["metadata"]["finalizers"] = ["example.com/a"]
    cluster.api.create(MTGPUPODS, wanted)
    try:
        assert why in refusal(stolen, f"{MTGPUPODS}/held", patch)
        ours = {"metadata": {"finalizers": ["example.com/a", "mgpu.io/mtgpupod"]}}
        assert refusal(stolen, f"{MTGPUPODS}/held", ours) == ""
    finally:
        cluster.api.patch(f"{MTGPUPODS}/held", {"metadata": {"finalizers": None}})
        cluster.api.delete(f"{MTGPUPODS}/held")


@pytest.mark.parametrize("card", ["GPU-n1-1", "", None], ids=["another", "empty", "none"])
@pytest.mark.usefixtures("stolen")
def test_the_card_of_an_mtgpupod_is_neither_changed_nor_removed(bench: Bench, stolen: Api, card: str | None) -> None:
    named = Named(bench)
    named.create("m", "abc", "0.5", "n1")
    had = named.runs("m")
    other = "GPU-n1-0" if card == had else card
    path = f"{MTGPUPODS}/m/status"
    assert "does not change or remove the card" in refusal(stolen, path, {"status": {"BoundDeviceID": other}})
    assert refusal(stolen, path, {"status": {"BoundDeviceID": had, "phase": "Pending"}}) == ""
    named.delete("m")
    until(lambda: [*named.occupying()] == ["victim"])


@pytest.mark.parametrize("meta", [{"labels": {"app": "a"}}, {"annotations": {"a": "b"}}], ids=["label", "annotation"])
def test_a_binding_that_writes_what_is_not_mgpus_is_refused(stolen: Api, meta: Any) -> None:
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "victim", **meta}, "target": {"name": "n1"}}
    with pytest.raises(ApiError, match="mgpu-scheduler binds pods without"):
        stolen.create(f"{PODS}/victim/binding?dryRun=All", binding)


LEASES = "/apis/coordination.k8s.io/v1/namespaces/mgpu-system/leases"
STRANGE = {
    "an owner": {"ownerReferences": [OTHER]},
    "a finalizer": {"finalizers": ["example.com/a"]},
    "an annotation": {"annotations": {"a": "b"}},
    "a label": {"labels": {"app": "a"}},
}


@pytest.mark.parametrize("meta", STRANGE.values(), ids=STRANGE)
def test_a_lease_or_a_configmap_gets_no_metadata_of_an_attacker(stolen: Api, cluster: Cluster, meta: Any) -> None:
    with pytest.raises(ApiError, match="writes no labels, annotations, owners and finalizers"):
        stolen.create(LEASES, {"metadata": {"name": "strange", **meta}, "spec": {}}, dryRun="All")
    maps = "/api/v1/namespaces/mgpu-system/configmaps"
    if "mps-configmap" not in {raw["metadata"]["name"] for raw in cluster.api.list(maps)[0]}:
        cluster.api.create(maps, {"metadata": {"name": "mps-configmap", "labels": {"own": "label"}}})
    assert "writes no labels" in refusal(stolen, f"{maps}/mps-configmap", {"metadata": meta})
    assert "writes no labels" in refusal(stolen, f"{maps}/mps-configmap", {"metadata": {"labels": None}})
    assert refusal(stolen, f"{maps}/mps-configmap", {"data": {"n1": "a"}}) == ""


@pytest.mark.parametrize(
    "name", [{"name": "another"}, {"generateName": "mgpu-scheduler"}], ids=lambda name: next(iter(name))
)
def test_a_lease_of_another_name_is_refused(stolen: Api, name: Any) -> None:
    with pytest.raises(ApiError, match=r"mgpu-scheduler-own-objects.* denied"):
        stolen.create(LEASES, {"metadata": name, "spec": {}}, dryRun="All")


@pytest.mark.parametrize(
    "field", [{"immutable": True}, {"binaryData": {"n1": "YQ=="}}], ids=["immutable", "binaryData"]
)
def test_a_configmap_gets_nothing_but_data(stolen: Api, cluster: Cluster, field: Any) -> None:
    maps = "/api/v1/namespaces/mgpu-system/configmaps"
    if "mps-configmap" not in {raw["metadata"]["name"] for raw in cluster.api.list(maps)[0]}:
        cluster.api.create(maps, {"metadata": {"name": "mps-configmap"}})
    assert "nothing but the data" in refusal(stolen, f"{maps}/mps-configmap", field)


@pytest.mark.parametrize(
    "spec", [{"leaseDurationSeconds": 61}, {"leaseTransitions": 2}], ids=lambda spec: next(iter(spec))
)
def test_lease_that_would_keep_everybody_from_leading_is_refused(stolen: Api, spec: Any) -> None:
    with pytest.raises(ApiError, match="counts their transitions one by one"):
        stolen.create(LEASES, {"metadata": {"name": "mgpu-scheduler"}, "spec": spec}, dryRun="All")


def test_a_leader_writes_its_lease_under_the_policy(stolen: Api) -> None:
    leader = Leader(stolen, "mgpu-system", "mgpu-scheduler", "one")
    leader.round()
    leader.round()
    assert leader.leading
    leader.release()


def event(**fields: Any) -> Any:
    """An Event as the scheduler writes it, with these fields instead."""
    return {
        "metadata": {"generateName": "p.", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "p", "uid": "u"},
        "reason": "MgpuNoCards",
        "message": "no card",
        "type": "Warning",
        "source": {"component": "mgpu-scheduler"},
        "reportingComponent": "mgpu-scheduler",
        **fields,
    }


LONG = "x" * 254
FIELDS: dict[str, Any] = {f"f:{'k' * 50}{i}": {} for i in range(5_000)}


@pytest.mark.parametrize(
    "fields",
    [
        {"message": "x" * 1025},
        *({key: LONG} for key in ("reason", "action", "reportingInstance", "reportingComponent")),
        {"source": {"component": "a", "host": LONG}},
        {"involvedObject": {"kind": "Pod", "namespace": "default", "name": "p", "fieldPath": LONG}},
        {"related": {"kind": "Pod", "namespace": "default", "name": "p", "resourceVersion": LONG}},
        {"metadata": {"generateName": "p.", "namespace": "default", "annotations": {"a": LONG}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_event_larger_than_the_scheduler_writes_is_refused(stolen: Api, fields: Any) -> None:
    with pytest.raises(ApiError, match="mgpu-scheduler writes Events"):
        stolen.create("/api/v1/namespaces/default/events", event(**fields), dryRun="All")


@pytest.mark.parametrize("managed", [FIELDS, {"f:labels": FIELDS}], ids=["wide", "deep"])
def test_an_event_that_says_that_it_manages_many_fields_is_refused(stolen: Api, managed: Any) -> None:
    """Also under the name of the manager that the API server enters for the request."""
    row = {"operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": managed}}
    meta = {"generateName": "p.", "namespace": "default", "managedFields": [{**row, "manager": "a"}]}
    with pytest.raises(ApiError, match="manage no fields but those of Events"):
        stolen.create("/api/v1/namespaces/default/events", event(metadata=meta), dryRun="All", fieldManager="a")


def test_an_event_as_schedulers_write_it_is_accepted(stolen: Api) -> None:
    related = {"kind": "Pod", "namespace": "default", "name": "q", "uid": "v"}
    made = event(related=related, action="Preempting", reportingInstance="mgpu-scheduler-0")
    stolen.create("/api/v1/namespaces/default/events", made, dryRun="All")


@pytest.mark.usefixtures("stolen")
def test_the_scheduler_runs_mtgpupods(bench: Bench) -> None:
    named = Named(bench)
    named.create("m", "abc", "0.5", "n1")
    named.runs("m")
    named.delete("m")
    until(lambda: [*named.occupying()] == ["victim"])
    assert "ValidatingAdmissionPolicy" not in bench.cluster.processes["scheduler"].tail(1000)


def test_pods_of_tenants_are_denied_the_class_of_occupy_pods(cluster: Cluster) -> None:
    """With it a pod comes before all others in kube-scheduler's queue, and is never preempted."""
    own = {"containers": [{"name": "c", "image": "mgpu"}], "priorityClassName": "mgpu-occupy"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "first"}, "spec": own}
    path = "/api/v1/namespaces/default/pods"

    def denied() -> str:
        try:
            cluster.api.create(path, pod, dryRun="All")
        except ApiError as error:
            return error.message
        return ""

    assert "name another class" in until(denied)
    cluster.api.create(PODS, pod, dryRun="All")
