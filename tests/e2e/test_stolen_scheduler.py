"""What the scheduler's token creates: Pods of MtgpuPods, as their tenants wrote them, and no other program.

The scheduler may create Pods in every namespace. Without these rules that right is one to run any program as any
service account.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mgpu.kube import Api, ApiError
from playground.cluster import Cluster
from tests.e2e.bench import Bench, Json
from tests.e2e.mtgpu_bench import MTGPUPODS, PODS, Named, gone, mtgpupod
from tests.waiting import until

NODE = "/api/v1/nodes/node-1"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def cluster(attacked: Cluster) -> Cluster:
    return attacked


@pytest.fixture(scope="module")
def stolen(cluster: Cluster) -> Iterator[Api]:
    api = cluster.connect("scheduler")
    yield api
    api.close()


@pytest.fixture(scope="module")
def victim(module_bench: Bench, stolen: Api) -> Iterator[Json]:
    """An MtgpuPod that has its card and no Pod: its node is cordoned, so that the controller makes none again."""
    named = Named(module_bench)
    labels = {"app": "tenant"}
    wanted = mtgpupod("m", "abc", "0.5", "node-1", serviceAccountName="tenant")
    named.api.create(MTGPUPODS, {**wanted, "metadata": {**wanted["metadata"], "labels": labels}})
    named.runs("m")
    named.api.patch(NODE, {"spec": {"unschedulable": True}})
    until(lambda: named.condition("m", "Bound"))
    stolen.delete(f"{PODS}/m", {"gracePeriodSeconds": 0})
    until(lambda: gone(named, f"{PODS}/m") and named.condition("m", "PodCreated").get("reason") == "NodeUnschedulable")
    yield named.get("m")
    named.api.patch(NODE, {"spec": {"unschedulable": None}})
    named.clear()


def attack(of: Json, card: str | None = None, **spec: Any) -> Json:
    """A Pod that names an MtgpuPod as its controller and runs the attacker's program as an administrator."""
    meta = of["metadata"]
    owner = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": meta["name"], "uid": meta["uid"]}
    env = [{"name": VISIBLE, "value": card or of.get("status", {}).get("BoundDeviceID", "GPU-x")}]
    container = {"name": "c", "image": "attackers", "env": [*env, {"name": "MGPU_CARDS", "value": "0"}]}
    volume = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
    own = {"serviceAccountName": "administrator", "hostNetwork": True, "containers": [container], "volumes": [volume]}
    said = {key: text for key, text in meta["annotations"].items() if key.startswith("lsalab.nthu/")}
    return {
        "metadata": {
            "name": meta["name"],
            "ownerReferences": [{**owner, "controller": True}],
            "labels": {"app": "victims-service"},
            "annotations": {**said, "example.com/network": "attackers", "mgpu.io/seal": "none"},
            "finalizers": ["example.com/stays"],
        },
        "spec": {"nodeName": "node-1", **own, **spec},
    }


def test_a_pod_that_a_stolen_token_creates_runs_what_the_tenant_wrote(victim: Json, stolen: Api) -> None:
    made = stolen.create(f"{PODS}?dryRun=All", attack(victim))
    spec, meta = made["spec"], made["metadata"]
    (container,) = spec["containers"]
    assert (container["image"], spec["serviceAccountName"]) == ("cuda", "tenant")
    assert not spec.get("hostNetwork")
    assert [volume["name"] for volume in spec.get("volumes") or ()] == []
    assert [row["name"] for row in container["env"]] == [
        *(VISIBLE, "MGPU_CARDS", "MGPU_CORE_PERCENT", "MGPU_MEMORY_BYTES")
    ]
    assert (meta["labels"], "example.com/network" in meta["annotations"]) == ({"app": "tenant"}, False)
    assert not meta.get("finalizers")


def test_a_pod_of_a_stolen_token_gets_the_defaults_of_the_api_server(victim: Json, stolen: Api) -> None:
    """They are set before admission, on what is sent, and again on what admission makes of it."""
    spec = stolen.create(f"{PODS}?dryRun=All", attack(victim))["spec"]
    tolerated = {row["key"] for row in spec["tolerations"]}
    assert tolerated == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert (spec["priority"], spec["preemptionPolicy"]) == (0, "PreemptLowerPriority")
    assert (spec["dnsPolicy"], spec["containers"][0]["terminationMessagePath"]) == (
        "ClusterFirst",
        "/dev/termination-log",
    )


@pytest.mark.parametrize("card", ["all", "GPU-node-1-1", "GPU-node-1-0,GPU-node-1-1", "0"])
def test_a_stolen_token_shows_a_pod_no_card_but_that_of_its_mtgpupod(victim: Json, stolen: Api, card: str) -> None:
    if victim["status"]["BoundDeviceID"] == card:
        card = "GPU-node-1-0"
    with pytest.raises(ApiError, match="NVIDIA_VISIBLE_DEVICES") as refused:
        stolen.create(f"{PODS}?dryRun=All", attack(victim, card))
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"uid": "00000000-0000-4000-8000-000000000000"}, "another uid"), ({"name": "another"}, "does not exist")],
    ids=["another uid", "no such MtgpuPod"],
)
def test_a_stolen_token_creates_no_pod_of_an_mtgpupod_that_is_not_there(
    victim: Json, stolen: Api, changed: Json, why: str
) -> None:
    other = {**victim, "metadata": {**victim["metadata"], **changed}}
    with pytest.raises(ApiError, match=why):
        stolen.create(f"{PODS}?dryRun=All", attack(other))


def test_a_stolen_token_creates_no_pod_of_an_mtgpupod_without_a_card(
    victim: Json, stolen: Api, cluster: Cluster
) -> None:
    """The tenants of a full node have such MtgpuPods."""
    waiting = cluster.api.create(MTGPUPODS, mtgpupod("w", "other", "0.5", "node-1"))
    with pytest.raises(ApiError, match="names no card"):
        stolen.create(f"{PODS}?dryRun=All", attack(waiting, victim["status"]["BoundDeviceID"]))


def test_a_stolen_token_neither_creates_an_mtgpupod_nor_changes_its_spec(victim: Json, stolen: Api) -> None:
    wanted = {**mtgpupod("n", "abc", "0.1"), "apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod"}
    applied = {"fieldManager": "a", "force": "true"}
    calls: tuple[Callable[[], Json], ...] = (
        lambda: stolen.create(MTGPUPODS, wanted),
        lambda: stolen.patch(f"{MTGPUPODS}/n", wanted, "application/apply-patch+yaml", **applied),
        lambda: stolen.replace(f"{MTGPUPODS}/m", victim),
        lambda: stolen.patch(f"{MTGPUPODS}/m", {"spec": {"serviceAccountName": "administrator"}}),
    )
    for call in calls:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.status in (403, 422), refused.value
