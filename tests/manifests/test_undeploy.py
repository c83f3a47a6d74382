"""`make undeploy` removes everything, with a scheduler that removes finalizers and without one."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError
from mgpu.kube.client import MERGE_PATCH
from mgpu.model.resource_claims import CLASSES, DRIVER, SLICES
from tests.claim_objects import CLASS, claim
from tests.e2e.mtgpu_bench import MTGPUPODS, mtgpupod
from tests.manifests.conftest import Run
from tests.manifests.rendered import MANIFESTS, as_stream, named, rendered, served
from tests.waiting import until

_SCRIPT = MANIFESTS / "undeploy.sh"
_DEVICES = "devices.scheduling.koordinator.sh"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_ALL_MTGPUPODS, _OCCUPYING = "/apis/lsalab.nthu/v1/mtgpupods", "/api/v1/namespaces/kube-system/pods"
PLAYGROUND = pytest.mark.parametrize("kubeconfig", ["playground"], indirect=True)
"""A real API server alone never deletes a namespace, because kube-controller-manager does that."""


def there(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


def deployed(run: Run) -> None:
    documents = served(rendered(MANIFESTS / "base"))
    done = run("kubectl", "apply", "--server-side", "-f", "-", given=as_stream(documents))
    assert done.returncode == 0, done.stderr


def nothing_is_left(api: Api) -> None:
    for document in served(rendered(MANIFESTS / "base")):
        kind, meta = document["kind"], document["metadata"]
        if kind == "Namespace":
            assert not there(api, f"/api/v1/namespaces/{meta['name']}")
        elif not meta.get("namespace"):
            group, plural = document["apiVersion"], f"{kind.lower()}s".replace("classs", "classes")
            assert not there(api, f"/apis/{group}/{plural.replace('policys', 'policies')}/{meta['name']}"), meta["name"]
    roles = api.get("/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles")["items"]
    assert not [r for r in roles if r["metadata"]["name"].startswith("mgpu")]
    assert not there(api, _ALL_MTGPUPODS)


@PLAYGROUND
def test_without_a_scheduler_process_finalizers_are_taken_off_by_hand(run: Run, api: Api) -> None:
    deployed(run)
    # No process answers for the webhooks; while they are configured, no MtgpuPod can be created.
    for kind in ("mutating", "validating"):
        api.delete(f"{_ADMISSION}/{kind}webhookconfigurations/mgpu-webhook")
    stuck = mtgpupod("stuck", "zxcvb", "0.2")
    stuck["metadata"]["finalizers"] = [mtgpu.FINALIZER]
    other = mtgpupod("kept", "zxcvb", "0.2")
    other["metadata"]["finalizers"] = ["somebody/else", mtgpu.FINALIZER]
    for found in (stuck, other):
        api.create(MTGPUPODS, found)
    occupy = {"metadata": {"name": "occupy", "labels": {mtgpu.OCCUPY_LABEL: "zxcvb"}}}
    api.create(_OCCUPYING, occupy | {"spec": {"containers": [{"name": "c", "image": "mgpu"}]}})

    done = run(_SCRIPT, env={"WAIT": "1"})
    assert done.returncode == 0, done.stderr
    assert "finalizer of default/stuck taken off by hand\n" in done.stdout
    assert 'default/kept taken off by hand; what waits for these is not ours: "somebody/else"\n' in done.stdout
    nothing_is_left(api)
    assert api.get(_OCCUPYING)["items"] == []


@PLAYGROUND
def test_nodes_are_cleaned_where_that_is_asked_for_and_koordinators_crd_stays(run: Run, api: Api) -> None:
    annotations = {"mgpu.io/status-resources": "aliyun.com/gpu-mem,b.c/d", "mgpu.io/cards-changed": "1", "a": "b"}
    node = {"metadata": {"name": "n1", "annotations": annotations, "labels": {"mgpu.io/whole-cards": "mgpu"}}}
    api.create("/api/v1/nodes", node)
    amounts = {"cpu": "1", "aliyun.com/gpu-mem": "80", "b.c/d": "1"}
    api.patch("/api/v1/nodes/n1/status", {"status": {"capacity": amounts}}, MERGE_PATCH)
    koordinators = named(rendered(MANIFESTS / "base"), "CustomResourceDefinition", _DEVICES)
    koordinators = {**koordinators, "metadata": {"name": _DEVICES}}
    assert run("kubectl", "create", "-f", "-", given=json.dumps(koordinators)).returncode == 0
    done = run(_SCRIPT, env={"CLEAN_NODES": "yes"})  # mgpu itself was removed before
    assert done.returncode == 0, done.stderr
    assert there(api, f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{_DEVICES}")
    api.delete(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{_DEVICES}")
    found = api.get("/api/v1/nodes/n1")
    assert found["status"]["capacity"] == {"cpu": "1"}
    assert found["metadata"]["annotations"] == {"a": "b"}
    assert "mgpu.io/whole-cards" not in found["metadata"].get("labels", {})


@PLAYGROUND
def test_claims_with_cards_are_named_and_classes_and_slices_deleted(run: Run, api: Api) -> None:
    api.create("/api/v1/namespaces", {"metadata": {"name": "ml"}})
    ours = {**CLASS, "metadata": {"name": "mgpu", "labels": {"app.kubernetes.io/part-of": "mgpu"}}}
    api.create(CLASSES, ours)
    api.create(CLASSES, {**CLASS, "metadata": {"name": "nics"}})
    for driver in (DRIVER, "nics.example.com"):
        pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": driver, "nodeName": "n1", "pool": pool, "devices": [{"name": "card-0"}]}
        api.create(SLICES, {"metadata": {"name": f"n1-{driver}"}, "spec": spec})
    path = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims"
    for raw in (claim("held", 0), claim("open"), claim("nic", 0, driver="nics.example.com")):
        made = api.create(path, {**raw, "status": {}})
        if raw["status"]:
            api.replace(f"{path}/{raw['metadata']['name']}/status", {**made, "status": raw["status"]})
    done = run(_SCRIPT)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ResourceClaim")] == ["ml/held"]
    assert [raw["metadata"]["name"] for raw in api.list(CLASSES)[0]] == ["nics"]
    assert [raw["spec"]["driver"] for raw in api.list(SLICES)[0]] == ["nics.example.com"]


@PLAYGROUND
def test_with_a_scheduler_process_mtgpupods_end_before_it_does(run: Run, api: Api) -> None:
    """A thread stands in for the scheduler process; how that ends an MtgpuPod is tested in tests/e2e."""
    base = rendered(MANIFESTS / "base")
    crd = named(base, "CustomResourceDefinition", "mtgpupods.lsalab.nthu")
    parts = [named(base, "Namespace", "mgpu-system"), crd, named(base, "Deployment", "mgpu-scheduler")]
    assert run("kubectl", "apply", "--server-side", "-f", "-", given=as_stream(parts)).returncode == 0
    found = mtgpupod("one", "zxcvb", "0.2")
    found["metadata"]["finalizers"] = [mtgpu.FINALIZER]
    api.create(MTGPUPODS, found)
    with ThreadPoolExecutor(1) as pool:
        scheduler = pool.submit(_end, api, f"{MTGPUPODS}/one")
        done = run(_SCRIPT, env={"WAIT": "60"})
        assert scheduler.result()
    assert done.returncode == 0, done.stderr
    assert "by hand" not in done.stdout
    gone = [done.stdout.index(f'"{name}" deleted') for name in ("one", "mtgpupods.lsalab.nthu", "mgpu-scheduler")]
    assert gone == sorted(gone)
    nothing_is_left(api)


def _end(api: Api, path: str) -> bool:
    """End an MtgpuPod half a second after its deletion, as a scheduler process would. Return whether that is there."""
    until(lambda: api.get(path)["metadata"].get("deletionTimestamp"))
    time.sleep(0.5)
    runs = there(api, "/apis/apps/v1/namespaces/mgpu-system/deployments/mgpu-scheduler")
    api.patch(path, {"metadata": {"finalizers": []}}, MERGE_PATCH)
    return runs
