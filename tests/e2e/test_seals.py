"""Attacks with admission out of the way: the webhook is gone, and a tenant writes any annotation, status and node.

What is left are the amounts of the request and the seals. No pod sees or holds a card that was not decided for it.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.model.record_seals import SEAL
from playground.cluster import Cluster
from tests.e2e.bench import GPUSHARE, INDEX, KOORDINATOR, Bench, Json, asking, share
from tests.e2e.mtgpu_bench import mtgpupod
from tests.waiting import until

_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"


@pytest.fixture(scope="module", autouse=True)
def _without_the_webhook(cluster: Cluster) -> Iterator[None]:
    removed = {}
    for kind in ("mutating", "validating"):
        configurations = f"{_WEBHOOKS}/{kind}webhookconfigurations"
        removed[configurations] = cluster.api.get(f"{configurations}/mgpu-webhook")
        cluster.api.delete(f"{configurations}/mgpu-webhook")
    yield
    for configurations, found in removed.items():
        cluster.api.create(configurations, {**found, "metadata": {"name": "mgpu-webhook"}})


def written(pod: Json, record: dict[str, str], **spec: Any) -> Json:
    return {**pod, "metadata": {**pod["metadata"], "annotations": record}, "spec": {**pod["spec"], **spec}}


def of_card(minor: int, percent: int) -> str:
    amounts = {"koordinator.sh/gpu-core": str(percent), "koordinator.sh/gpu-memory-ratio": str(percent)}
    return json.dumps({"gpu": [{"minor": minor, "resources": amounts}]})


FORGED: dict[str, tuple[Json, dict[str, str]]] = {
    "koordinator": (asking("thief", core=1, ratio=1), {KOORDINATOR: of_card(0, 1)}),
    "mgpu": (share("thief", core=1, mib=256), {f"{INDEX}c": "0", "vke.volcengine.com/assumed": "true"}),
    "gpushare": (asking("thief", gpu_mem=1), {"ALIYUN_COM_GPU_MEM_IDX": "0", GPUSHARE: json.dumps({"c": {"0": 1}})}),
}
"""Records that are right in form and amount, of a card that another pod has as a whole."""


def decided(bench: Bench, name: str) -> None:
    """Check that the pod runs on a free card that the scheduler decided, with a seal for this pod's UID."""
    bench.exact(name)
    pod = bench.pod(name)
    assert f".{pod.metadata.uid}." in pod.metadata.annotations[SEAL]
    assert bench.within_capacity()


def test_a_record_without_a_seal_is_a_finding_and_decided_anew(bench: Bench) -> None:
    """There is a thief with a node and one without for each record."""
    bench.create(share("victim", core=300, mib=None, nodeName="node-1"))
    decided(bench, "victim")
    thieves = [(name, kind) for name in FORGED for kind in ("bound", "unbound")]
    for name, kind in thieves:
        pod, record = FORGED[name]
        node = {"nodeName": "node-1"} if kind == "bound" else {}
        bench.create(written({**pod, "metadata": {"name": f"{name}-{kind}"}}, record, **node))
    for name, kind in thieves:
        bench.exact(f"{name}-{kind}")  # Until all are decided, the records of some count on cards that they do not get.
    for name, kind in thieves:
        thief = f"{name}-{kind}"
        decided(bench, thief)
        assert bench.pod(thief).spec.node_name != "node-1" or bench.sees(thief) == {"c": [3]}
        if kind == "bound":
            (message,) = until(lambda thief=thief: bench.events(thief, "UnsealedRecord"))  # type: ignore[misc]
            assert "has no seal and is ignored" in message


def test_a_copied_record_with_its_seal_is_a_finding_and_decided_anew(bench: Bench) -> None:
    bench.create(share("victim", core=300, mib=None, nodeName="node-1"))
    decided(bench, "victim")
    copied = dict(bench.pod("victim").metadata.annotations)
    bench.create(written(share("copier", core=100, mib=None), {**copied, f"{INDEX}c": "0"}, nodeName="node-1"))
    decided(bench, "copier")
    assert bench.sees("copier") == {"c": [3]}
    assert until(lambda: bench.events("copier", "ForgedRecord"))


def test_a_pod_that_is_created_again_with_all_that_its_namesake_had_is_decided_anew(bench: Bench) -> None:
    bench.create(share("p", core=100, mib=None, nodeName="node-1"))
    decided(bench, "p")
    annotations = dict(bench.pod("p").metadata.annotations)
    bench.delete("p")
    bench.create(share("other", core=100, mib=None, nodeName="node-1"))
    decided(bench, "other")
    assert bench.cards("other")["c"] == [int(annotations[f"{INDEX}c"])], "the card went to another pod"
    bench.create(written(share("p", core=100, mib=None), annotations, nodeName="node-1"))
    decided(bench, "p")
    assert bench.cards("p") != bench.cards("other")


def test_a_record_that_is_changed_before_the_pod_starts_shows_nothing(bench: Bench) -> None:
    """All cards of the node are held, so the scheduler cannot decide the record again."""
    bench.create(share("victim", core=400, mib=None, nodeName="node-1"))
    decided(bench, "victim")
    bench.create(
        written(
            share("thief-of-all", core=100, mib=None), dict(bench.pod("victim").metadata.annotations), nodeName="node-1"
        )
    )
    until(lambda: bench.pod("thief-of-all").status.phase == "Failed")
    statuses = bench.pod("thief-of-all").status.container_statuses or ()
    assert not any(status.container_id for status in statuses)


def test_an_outage_of_the_scheduler_lets_a_binding_with_annotations_decide_nothing(bench: Bench) -> None:
    """`failurePolicy: Ignore` lets the Binding pass as it was written."""
    bench.create(share("victim", core=300, mib=None, nodeName="node-1"))
    decided(bench, "victim")
    bench.create(share("thief", core=100, mib=None, schedulerName="somebody-else"))
    cluster = bench.cluster
    cluster.processes["scheduler"].kill()
    try:
        target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
        meta = {"name": "thief", "annotations": dict(bench.pod("victim").metadata.annotations)}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
        cluster.api.create("/api/v1/namespaces/default/pods/thief/binding", binding)
        assert bench.pod("thief").metadata.annotations[SEAL]
    finally:
        cluster.restart("scheduler")
    decided(bench, "thief")
    assert bench.sees("thief") == {"c": [3]}


def test_a_pod_that_poses_as_an_mtgpupods_holds_nothing(bench: Bench) -> None:
    said = {"gpu_request": "1", "gpu_limit": "1", "gpu_mem": str(8 << 30), "GPUID": "abc"}
    owner = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": "m", "uid": "5d0fc0fb", "controller": True}
    own = {"name": "c", "image": "x", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-node-1-0"}]}
    meta = {
        "name": "poser",
        "annotations": {f"lsalab.nthu/{k}": v for k, v in said.items()},
        "ownerReferences": [owner],
    }
    bench.create({"metadata": meta, "spec": {"nodeName": "node-1", "containers": [own]}})
    assert until(lambda: bench.events("poser", "UnsealedRecord"))
    bench.create(share("p", core=400, mib=None, nodeName="node-1"))
    decided(bench, "p")


def test_a_pod_of_an_mtgpupod_whose_owner_is_taken_off_keeps_its_card_held(bench: Bench) -> None:
    """A tenant takes the owner off the Pod and the finalizer off the MtgpuPod; the Pod runs on."""
    api, path = bench.cluster.api, "/apis/lsalab.nthu/v1/namespaces/default/mtgpupods"
    pod = "/api/v1/namespaces/default/pods/m"
    for _ in range(5):  # the controller may add its finalizer again in between, and then deletes the Pod as it should
        api.create(path, mtgpupod("m", "abc", "0.5", "node-1"))
        until(lambda: "m" in bench.names())
        uid = bench.runs("m").metadata.uid
        api.patch(pod, {"metadata": {"ownerReferences": None}})
        api.patch(f"{path}/m", {"metadata": {"finalizers": None}})
        api.delete(f"{path}/m", {"propagationPolicy": "Background"})
        until(lambda: not api.list(path)[0])
        if "m" in bench.names() and "deletionTimestamp" not in bench.raw("m")["metadata"]:
            break
        until(lambda: "m" not in bench.names())
    bench.create(share("p", core=300, mib=None, nodeName="node-1"))
    decided(bench, "p")
    assert bench.pod("m").metadata.uid == uid, "it runs on"
    bench.create(share("victim", core=100, mib=None, nodeName="node-1"))
    until(lambda: bench.pod("victim").status.phase == "Failed")
    assert bench.environment("m", "c")["NVIDIA_VISIBLE_DEVICES"] not in bench.environment("p", "c").values()
