"""An API server accepts every object of every overlay, and the pods of its workloads (dry runs)."""

import json
from pathlib import Path

import pytest

from mgpu.kube import Api
from tests.manifests.conftest import Run
from tests.manifests.rendered import (
    FOLDERS,
    MANIFESTS,
    OWN_CERTIFICATES,
    WITHOUT_POLICIES,
    WITHOUT_RECORD_KEY,
    Json,
    as_stream,
    kustomization,
    named,
    rendered,
    with_settings,
    workloads,
)

APPS = "/apis/apps/v1/namespaces/mgpu-system"
_DEFINED_ELSEWHERE = "cert-manager.io/v1"
REAL = pytest.mark.parametrize("kubeconfig", ["real"], indirect=True)
"""For the playground's API server, test_rendered.py tests the same in less time."""
EVERY_OVERLAY = pytest.mark.parametrize(
    "folder",
    [pytest.param(f, marks=pytest.mark.kubernetes(1, 34) if f.name == "dra" else ()) for f in FOLDERS],
    ids=[folder.name for folder in FOLDERS],
)


def apply(run: Run, documents: list[Json], *flags: str) -> str:
    command = ["kubectl", "apply", "--server-side", "--validate=strict", *flags, "-f", "-"]
    done = run(*command, given=as_stream(documents))
    assert done.returncode == 0, done.stderr
    return done.stdout


@REAL
@EVERY_OVERLAY
def test_every_overlay_passes_a_server_side_dry_run(run: Run, folder: Path) -> None:
    documents = [d for d in rendered(folder) if d["apiVersion"] != _DEFINED_ELSEWHERE]
    apply(
        run, [named(rendered(folder), "Namespace", "mgpu-system")]
    )  # a dry run does not create it for the other objects
    said = apply(run, documents, "--dry-run=server").splitlines()
    assert len(said) == len(documents)
    assert all(line.endswith("(server dry run)") for line in said)


@REAL
@EVERY_OVERLAY
def test_pods_of_every_overlay_pass_a_server_side_dry_run(run: Run, folder: Path) -> None:
    """An API server accepts a Deployment whose template makes no valid pod."""
    pods = []
    for workload in workloads(rendered(folder)):
        template = json.loads(json.dumps(workload["spec"]["template"]))
        meta = {**template["metadata"], "name": workload["metadata"]["name"], "namespace": "mgpu-system"}
        template["spec"].pop("runtimeClassName", None)  # NVIDIA's operator creates it
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
    apply(run, [named(rendered(folder), "Namespace", "mgpu-system")])
    assert len(apply(run, pods, "--dry-run=server").splitlines()) == len(pods) == 3


def test_a_kustomization_with_another_image_is_applied_whole(run: Run, api: Api, tmp_path: Path) -> None:
    """With the key of records. Without the policies, which Kubernetes before 1.30 and the playground do not serve."""
    own = kustomization(
        tmp_path, MANIFESTS / "overlays/second-scheduler", patches=[WITHOUT_POLICIES, with_settings(OWN_CERTIFICATES)]
    )
    environment = {"IMAGE": "images.example:5000/team/mgpu:9", "WAIT": "0", "API_SERVERS": "192.0.2.1"}
    done = run(MANIFESTS / "deploy.sh", own, env=environment)
    assert done.returncode == 0, done.stderr
    found = [row for plural in ("deployments", "daemonsets") for row in api.list(f"{APPS}/{plural}")[0]]
    images = {c["image"] for w in found for c in _containers(w)}
    assert images == {"images.example:5000/team/mgpu:9", "kube-scheduler:v1.36.2"}
    (scheduler,) = (w for w in found if w["metadata"]["name"] == "mgpu-scheduler")
    (sidecar,) = scheduler["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "MGPU_DIALECTS__MTGPU__OCCUPYIMAGE", "value": "images.example:5000/team/mgpu:9"} in sidecar["env"]
    assert api.get("/api/v1/namespaces/mgpu-system/secrets/mgpu-record-key")["data"].keys() == {"signing.pem"}


def _containers(workload: Json) -> list[Json]:
    spec = workload["spec"]["template"]["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def test_deployment_overwrites_changes_on_the_cluster_and_keeps_koordinators_crd(
    run: Run, api: Api, tmp_path: Path
) -> None:
    """`kubectl rollout undo` makes another manager own the image. Only the real API server has field managers."""
    crd, webhook = "devices.scheduling.koordinator.sh", "mgpu-webhook"
    documents = rendered(MANIFESTS / "base")
    undone = json.loads(json.dumps(named(documents, "Deployment", webhook)))
    undone["spec"]["template"]["spec"]["containers"][0]["image"] = "images.example/mgpu:undone"
    koordinators = {"name": crd, "labels": {"app.kubernetes.io/part-of": "koordinator"}}
    theirs = {**named(documents, "CustomResourceDefinition", crd), "metadata": koordinators}
    there = [named(documents, "Namespace", "mgpu-system"), undone, theirs]
    apply(run, there, "--force-conflicts", "--field-manager=somebody")

    patches = [WITHOUT_POLICIES, WITHOUT_RECORD_KEY, with_settings(OWN_CERTIFICATES)]
    own = kustomization(tmp_path, MANIFESTS / "base", patches=patches)
    done = run(
        MANIFESTS / "deploy.sh", own, env={"IMAGE": "images.example/mgpu:2", "WAIT": "0", "API_SERVERS": "192.0.2.1"}
    )
    assert done.returncode == 0, done.stderr
    assert f"the CRD {crd} is there already and is not mgpu's" in done.stdout
    labels = api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd}")["metadata"]["labels"]
    assert labels["app.kubernetes.io/part-of"] == "koordinator"
    found = api.get(f"{APPS}/deployments/{webhook}")
    assert [c["image"] for c in _containers(found)] == ["images.example/mgpu:2"]


def test_image_that_replaces_none_is_refused(run: Run, tmp_path: Path) -> None:
    images = [{"name": "mgpu", "newName": "images.example/gpus", "newTag": "1"}]
    own = kustomization(tmp_path, MANIFESTS / "base", images=images)
    done = run(MANIFESTS / "deploy.sh", own, env={"IMAGE": "images.example/mgpu:9", "WAIT": "0"})
    assert done.returncode == 2
    assert "IMAGE is not put in" in done.stderr


def test_deployment_that_does_not_become_ready_fails_with_the_command_that_shows_why(run: Run) -> None:
    """No controller creates pods for the Deployments of this API server."""
    done = run(MANIFESTS / "deploy.sh", MANIFESTS / "crds", env={"WAIT": "1"})
    assert done.returncode == 1
    assert "mgpu does not answer after 1 s: kubectl -n mgpu-system describe pods says why\n" in done.stderr


def test_an_image_without_a_tag_is_refused(run: Run) -> None:
    done = run(MANIFESTS / "deploy.sh", MANIFESTS / "crds", env={"IMAGE": "images.example:5000/mgpu", "WAIT": "0"})
    assert (done.returncode, done.stderr) == (2, "IMAGE has no tag: images.example:5000/mgpu\n")
