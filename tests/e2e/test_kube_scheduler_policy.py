"""manifests/components/second-scheduler on a real API server: what stolen tokens of its two identities can do."""

import os
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu.kube import Api, ApiError
from playground.apiserver import User
from playground.apiserver.hosting import write_kubeconfig
from playground.installation import MANIFESTS
from playground.realapi import real_api_server
from tests.waiting import until

_ADMISSION, _RBAC = "/apis/admissionregistration.k8s.io/v1", "/apis/rbac.authorization.k8s.io/v1"
_PATHS = {
    "ValidatingAdmissionPolicy": f"{_ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{_ADMISSION}/validatingadmissionpolicybindings",
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "Role": f"{_RBAC}/namespaces/{{namespace}}/roles",
    "RoleBinding": f"{_RBAC}/namespaces/{{namespace}}/rolebindings",
}
"""What decides about requests. No controller fills in a token Secret here: the tokens are the API server's own."""
_FILES = ("base/rbac.yaml", "base/scheduler-policy.yaml", "components/second-scheduler")
_ACCOUNT = "system:serviceaccount:mgpu-system:"
MGPU, KUBE_SCHEDULER = "mgpu-scheduler", "mgpu-kube-scheduler"
VOLUMES, CLAIMS = "/api/v1/persistentvolumes", "/api/v1/namespaces/default/persistentvolumeclaims"
PODS = "/api/v1/namespaces/default/pods"
DEVICE_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": "gone"}
pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBEBUILDER_ASSETS"),
    reason="KUBEBUILDER_ASSETS is not set: the playground's API server has no ValidatingAdmissionPolicies",
)


@pytest.fixture(scope="module")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Api]]:
    """The API server with the component, as an administrator and as each identity sees it."""
    folder = tmp_path_factory.mktemp("api")
    groups = ("system:serviceaccounts", "system:authenticated")
    users = {name: User(_ACCOUNT + name, groups) for name in (MGPU, KUBE_SCHEDULER)}
    users["admin"] = User("kubernetes-admin", ("system:masters",))
    tokens = {secrets.token_hex(16): user for user in users.values()}
    restricted = [_ACCOUNT + MGPU, _ACCOUNT + KUBE_SCHEDULER]
    with real_api_server(Path(os.environ["KUBEBUILDER_ASSETS"]), folder, tokens, restricted) as (url, ca):
        made = {}
        for name, token in zip(users, tokens, strict=True):
            path = folder / f"{name}.kubeconfig"
            write_kubeconfig(path, url, ca.read_bytes(), token)
            made[name] = Api.connect(str(path), timeout=30.0)
        _install(made)
        yield made
        for api in made.values():
            api.close()


def _install(connections: dict[str, Api]) -> None:
    """Create the roles, the policies and the objects of victims, and wait until all policies hold."""
    api = connections["admin"]
    api.create("/api/v1/namespaces", {"metadata": {"name": "mgpu-system"}})
    for document in _documents():
        namespace = document["metadata"].get("namespace", "")
        api.create(_PATHS[document["kind"]].format(namespace=namespace), document)
    for path, victim in _VICTIMS:
        try:
            api.create(path, victim)
        except ApiError as error:
            if (path, error.status) != (DEVICE_CLAIMS, 404):  # Kubernetes before 1.34
                raise
    api.patch(f"{VOLUMES}/bound/status", {"status": {"phase": "Bound"}})
    address = ("PATCH", f"{PODS}/low/status", {"status": {"podIP": "192.0.2.1"}})
    until(lambda: _refused(connections[MGPU], *address))
    # The API server takes policies in one after the other.
    for name in _ONE_OF_EACH_POLICY:
        verb, path, body, _ = REFUSED[name]
        until(partial(_refused, connections[KUBE_SCHEDULER], verb, path, body))


@pytest.fixture
def kube_scheduler(connections: dict[str, Api]) -> Api:
    return connections[KUBE_SCHEDULER]


def _documents() -> Iterator[Any]:
    for name in _FILES:
        path = MANIFESTS / name
        for file in [path] if path.is_file() else [path / "rbac.yaml", path / "policy.yaml"]:
            yield from (d for d in yaml.safe_load_all(file.read_text()) if d["kind"] in _PATHS)


def _refused(api: Api, verb: str, path: str, body: Any) -> str:
    """Why a request is refused, by a role or by a policy; "" for one that is accepted. Nothing is written."""
    try:
        if verb == "DELETE":
            api.delete(path, body, dryRun="All")
        elif verb == "POST":
            api.create(path, body, dryRun="All")
        elif verb == "PUT":
            now = api.get(path)
            meta = {**now["metadata"], **body.get("metadata", {})}
            api.replace(path, {**now, **body, "metadata": meta}, dryRun="All")
        else:
            api.patch(path, body, dryRun="All")
    except ApiError as error:
        if error.status == 403 or "ValidatingAdmissionPolicy" in error.message:
            return error.message
        raise
    return ""


def _volume(name: str, **spec: Any) -> tuple[str, Any]:
    return VOLUMES, {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "local",
            "hostPath": {"path": f"/tmp/{name}"},
            **spec,
        },
    }


def _claim(name: str, **spec: Any) -> tuple[str, Any]:
    resources = {"requests": {"storage": "1Gi"}}
    return CLAIMS, {
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "local", "resources": resources, **spec},
    }


def _pod(name: str, priority: int) -> tuple[str, Any]:
    classes = {0: "", 2_000_001_000: "system-node-critical", 2_000_000_000: "system-cluster-critical"}
    spec: dict[str, Any] = {"containers": [{"name": "c", "image": "i"}]}
    if priority:
        spec["priorityClassName"] = classes[priority]
    return PODS, {"metadata": {"name": name}, "spec": spec}


def _device_claim(name: str, **meta: Any) -> Any:
    request = {"name": "r", "exactly": {"deviceClassName": "toy"}}
    return {"metadata": {"name": name, **meta}, "spec": {"devices": {"requests": [request]}}}


CLAIM_OF_A_POD = {
    "annotations": {"resource.kubernetes.io/extended-resource-claim": "true"},
    "ownerReferences": [{**OWNER, "controller": True}],
}
TENANTS = {"namespace": "tenant", "name": "steal"}
VICTIMS = {"namespace": "victim", "name": "data"}
_VICTIMS = (
    _volume("bound", claimRef={**VICTIMS, "uid": "u"}),
    _volume("reserved", claimRef=VICTIMS),
    _volume("free"),
    _claim("bound", volumeName="bound"),
    _claim("waits"),
    _pod("low", 0),
    _pod("cluster", 2_000_000_000),
    _pod("node", 2_000_001_000),
    (DEVICE_CLAIMS, _device_claim("tenants")),
    (DEVICE_CLAIMS, _device_claim("pods", **CLAIM_OF_A_POD)),
    (LEASES.format("kube-system"), {"metadata": {"name": "kube-scheduler"}}),
    (LEASES.format("mgpu-system"), {"metadata": {"name": "mgpu-kube-scheduler"}}),
)
_RESULT = {"request": "r", "driver": "toy.example.com", "pool": "n1", "device": "a"}
ALLOCATION = {"devices": {"results": [_RESULT]}}
NODE = "volume.kubernetes.io/selected-node"
BINDING = {"target": {"kind": "Node", "name": "n1"}}
_LEASE = f"{LEASES.format('mgpu-system')}/mgpu-kube-scheduler"

ACCEPTED: dict[str, tuple[str, str, Any]] = {
    "a free volume for a claim": (
        "PATCH",
        f"{VOLUMES}/free",
        {
            "metadata": {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}},
            "spec": {"claimRef": {**TENANTS, "uid": "v"}},
        },
    ),
    "a reserved volume for its claim": (
        "PATCH",
        f"{VOLUMES}/reserved",
        {"spec": {"claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "uid": "v"}}},
    ),
    "the node of a claim": ("PATCH", f"{CLAIMS}/waits", {"metadata": {"annotations": {NODE: "n1"}}}),
    "devices": (
        "PATCH",
        f"{DEVICE_CLAIMS}/tenants/status",
        {
            "metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]},
            "status": {"allocation": ALLOCATION, "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]},
        },
    ),
    "the finalizer of devices": (
        "PATCH",
        f"{DEVICE_CLAIMS}/tenants",
        {"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}},
    ),
    "a claim of a pod's resources": ("POST", DEVICE_CLAIMS, _device_claim("new", **CLAIM_OF_A_POD)),
    "the end of a claim of a pod's resources": ("DELETE", f"{DEVICE_CLAIMS}/pods", None),
    "a victim of preemption": ("DELETE", f"{PODS}/low", None),
    "a victim of the highest priority": ("DELETE", f"{PODS}/cluster", None),
    "a nomination": ("PATCH", f"{PODS}/low/status", {"status": {"nominatedNodeName": "n1"}}),
    "a condition": (
        "PATCH",
        f"{PODS}/low/status",
        {"status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}},
    ),
    "a binding": ("POST", f"{PODS}/low/binding", {"metadata": {"name": "low"}, **BINDING}),
    "its Lease": ("PUT", _LEASE, {"spec": {"holderIdentity": "a"}}),
}
REFUSED: dict[str, tuple[str, str, Any, str]] = {
    "another claim for a volume": ("PATCH", f"{VOLUMES}/bound", {"spec": {"claimRef": TENANTS}}, "to no other"),
    "another claim of the same name": ("PATCH", f"{VOLUMES}/bound", {"spec": {"claimRef": {"uid": "v"}}}, "no other"),
    "no claim for a volume": ("PATCH", f"{VOLUMES}/bound", {"spec": {"claimRef": None}}, "to no other"),
    "another claim for a reserved volume": (
        "PATCH",
        f"{VOLUMES}/reserved",
        {"spec": {"claimRef": {**TENANTS, "uid": "v"}}},
        "to no other",
    ),
    "the annotation on a bound volume": (
        "PATCH",
        f"{VOLUMES}/bound",
        {"metadata": {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}},
        "no annotation of a PersistentVolume",
    ),
    "the end of a volume's data": (
        "PATCH",
        f"{VOLUMES}/bound",
        {"spec": {"persistentVolumeReclaimPolicy": "Delete"}},
        "no spec of a PersistentVolume",
    ),
    "the place of a volume": (
        "PATCH",
        f"{VOLUMES}/free",
        {
            "spec": {
                "nodeAffinity": {
                    "required": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}],
                    }
                }
            }
        },
        "no spec of a PersistentVolume",
    ),
    "the owner of a volume": (
        "PATCH",
        f"{VOLUMES}/bound",
        {"metadata": {"ownerReferences": [OWNER]}},
        "no metadata of a PersistentVolume",
    ),
    "the finalizer of a volume": (
        "PATCH",
        f"{VOLUMES}/bound",
        {"metadata": {"finalizers": ["a/b"]}},
        "no metadata of a PersistentVolume",
    ),
    "the owner of a claim": (
        "PATCH",
        f"{CLAIMS}/bound",
        {"metadata": {"ownerReferences": [OWNER]}},
        "no metadata of a PersistentVolumeClaim",
    ),
    "the volume of a claim": ("PATCH", f"{CLAIMS}/waits", {"spec": {"volumeName": "bound"}}, "nothing of a Persistent"),
    "the node of a bound claim": (
        "PATCH",
        f"{CLAIMS}/bound",
        {"metadata": {"annotations": {NODE: "n1"}}},
        "no annotation of a PersistentVolumeClaim",
    ),
    "another's annotation of a claim": (
        "PATCH",
        f"{CLAIMS}/waits",
        {"metadata": {"annotations": {"a": "b"}}},
        "no annotation of a PersistentVolumeClaim",
    ),
    "a claim for devices": ("POST", DEVICE_CLAIMS, _device_claim("new"), "creates and deletes no ResourceClaims"),
    "a claim for devices with a label": (
        "POST",
        DEVICE_CLAIMS,
        _device_claim("new", labels={"a": "b"}, **CLAIM_OF_A_POD),
        "creates ResourceClaims without labels",
    ),
    "the end of a tenant's claim for devices": (
        "DELETE",
        f"{DEVICE_CLAIMS}/tenants",
        None,
        "creates and deletes no ResourceClaims",
    ),
    "the owner of devices": (
        "PATCH",
        f"{DEVICE_CLAIMS}/tenants",
        {"metadata": {"ownerReferences": [OWNER]}},
        "no metadata of a ResourceClaim",
    ),
    "another's finalizer of devices": (
        "PATCH",
        f"{DEVICE_CLAIMS}/tenants",
        {"metadata": {"finalizers": ["a/b"]}},
        "no finalizers of a ResourceClaim",
    ),
    "a pod that nothing preempts": ("DELETE", f"{PODS}/node", None, "system-node-critical"),
    "a pod's address": ("PATCH", f"{PODS}/low/status", {"status": {"podIPs": [{"ip": "192.0.2.1"}]}}, "no status of"),
    "a pod's phase": ("PATCH", f"{PODS}/low/status", {"status": {"phase": "Failed"}}, "no status of a pod"),
    "a record": (
        "PATCH",
        f"{PODS}/low/status",
        {"metadata": {"annotations": {"mgpu.io/container-devices": "{}"}}},
        "no annotations of a pod",
    ),
    "a binding with a label": (
        "POST",
        f"{PODS}/low/binding",
        {"metadata": {"name": "low", "labels": {"app": "a"}}, **BINDING},
        "binds pods without labels",
    ),
    "a large Event": (
        "POST",
        "/api/v1/namespaces/default/events",
        {
            "metadata": {"generateName": "p.", "namespace": "default"},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p"},
            "message": "x" * 1025,
        },
        "writes Events",
    ),
    "the Lease of the cluster's scheduler": (
        "PUT",
        f"{LEASES.format('kube-system')}/kube-scheduler",
        {"spec": {"holderIdentity": "a"}},
        "the Lease of their own name",
    ),
    "a Lease of a node": (
        "POST",
        LEASES.format("default"),
        {"metadata": {"name": "n1"}},
        "the Lease of their own name",
    ),
    "a label of its Lease": ("PUT", _LEASE, {"metadata": {"labels": {"a": "b"}}}, "writes no labels"),
}

_ONE_OF_EACH_POLICY = (
    "no claim for a volume",
    "another's annotation of a claim",
    "the owner of devices",
    "a pod that nothing preempts",
    "a pod's address",
    "a binding with a label",
    "a large Event",
    "a Lease of a node",
)


def _rows(cases: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    since = pytest.mark.kubernetes(1, 34)
    return [
        pytest.param(*row, id=name, marks=since if row[1].startswith(DEVICE_CLAIMS) else ())
        for name, row in cases.items()
    ]


@pytest.mark.parametrize(("verb", "path", "body"), _rows(ACCEPTED))
def test_a_write_that_a_kube_scheduler_needs_is_accepted(kube_scheduler: Api, verb: str, path: str, body: Any) -> None:
    assert _refused(kube_scheduler, verb, path, body) == ""


@pytest.mark.parametrize(("verb", "path", "body", "why"), _rows(REFUSED))
def test_a_write_that_only_an_attacker_needs_is_refused(
    kube_scheduler: Api, verb: str, path: str, body: Any, why: str
) -> None:
    assert why in _refused(kube_scheduler, verb, path, body)


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("PATCH", f"{VOLUMES}/free", {"spec": {"claimRef": {**TENANTS, "uid": "v"}}}),
        ("PATCH", f"{VOLUMES}/bound", {"spec": {"claimRef": TENANTS}}),
        ("PATCH", f"{CLAIMS}/waits", {"metadata": {"annotations": {NODE: "n1"}}}),
        ("PATCH", f"{DEVICE_CLAIMS}/tenants/status", {"status": {"allocation": ALLOCATION}}),
        ("DELETE", f"{PODS}/low", None),
        ("PATCH", f"{PODS}/low/status", {"status": {"nominatedNodeName": "n1"}}),
        ("PUT", _LEASE, {"spec": {"holderIdentity": "a"}}),
        ("POST", LEASES.format("kube-system"), {"metadata": {"name": "n1"}}),
        ("POST", "/api/v1/namespaces/mgpu-system/serviceaccounts/mgpu-kube-scheduler/token", {}),
    ],
    ids=["free volume", "bound volume", "claim", "devices", "pod", "nomination", "Lease", "kube-system", "token"],
)
def test_the_token_of_mgpus_process_has_no_right_of_a_kube_scheduler(
    connections: dict[str, Api], verb: str, path: str, body: Any
) -> None:
    assert _refused(connections[MGPU], verb, path, body)


def test_mgpus_process_reads_the_lease_of_the_kube_schedulers(connections: dict[str, Api]) -> None:
    assert connections[MGPU].get(_LEASE)["metadata"]["name"] == KUBE_SCHEDULER


def test_the_token_of_mgpus_process_reads_no_token_of_the_kube_scheduler(connections: dict[str, Api]) -> None:
    with pytest.raises(ApiError, match="forbidden"):
        connections[MGPU].get("/api/v1/namespaces/mgpu-system/secrets/mgpu-kube-scheduler-token")
