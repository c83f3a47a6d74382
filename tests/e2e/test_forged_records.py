"""Attacks with forged records: a tenant who may create and change pods in a namespace gets no card by writing of it.

Each pod here is written by somebody who is none of the suite's identities, as a tenant with the role `edit` is.
"""

import json
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from playground.cluster import Cluster
from tests.e2e.bench import CORE, GPUSHARE, INDEX, KOORDINATOR, MEMORY, PER_CONTAINER, Bench, Json, asking, share

_EMPTY = json.dumps({"gpu": [{"minor": i, "resources": {}} for i in range(4)]})
FORGED: dict[str, tuple[Json, dict[str, str], list[str]]] = {
    "koordinator": (asking("thief", gpu=1), {KOORDINATOR: _EMPTY}, ["koordinator.sh/gpu"]),
    "koordinator-by-container": (
        asking("thief", gpu=1),
        {KOORDINATOR: _EMPTY, PER_CONTAINER: json.dumps({"c": {"gpu": [0, 1]}})},
        ["koordinator.sh/gpu"],
    ),
    "mgpu": (share("thief", core=1, mib=256), {f"{INDEX}c": "0", "vke.volcengine.com/assumed": "true"}, [CORE, MEMORY]),
    "gpushare": (
        asking("thief", gpu_mem=1),
        {
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "ALIYUN_COM_GPU_MEM_POD": "1",
            "ALIYUN_COM_GPU_MEM_UNIT": "MiB",
            GPUSHARE: json.dumps({"c": {"0": 1}}),
        },
        ["aliyun.com/gpu-mem"],
    ),
}


def forged(name: str, pod_name: str = "thief", **spec: Any) -> Json:
    """The pod with its record, and with a status by which it asks for nothing (the API server resets it too late)."""
    pod, record, resources = FORGED[name]
    rows = [{"containerName": "c", "requestName": f"r{i}", "resourceName": r} for i, r in enumerate(resources)]
    claimed = {"resourceClaimName": "x", "requestMappings": rows}
    meta = {"name": pod_name, "annotations": {**record, "mgpu.io/seal": "v1.x.y.z", "team": "a"}}
    status = {"phase": "Running", "extendedResourceClaimStatus": claimed}
    return {**pod, "metadata": meta, "spec": {**pod["spec"], **spec}, "status": status}


def test_a_forged_record_on_a_new_pod_shows_no_card_of_another_pod(bench: Bench) -> None:
    """The victim has cards 0 to 2 of node-1; each thief asks for a hundredth of a card and records several of them.

    There is a thief with a node and one without for each record.
    """
    bench.create(share("victim", core=300, mib=None, nodeName="node-1"))
    bench.exact("victim")
    taken = bench.cards("victim")["c"]
    thieves = [f"{name}-{kind}" for name in FORGED for kind in ("bound", "unbound")]
    for thief in thieves:
        name, _, kind = thief.rpartition("-")
        bench.create(forged(name, thief, **({"nodeName": "node-1"} if kind == "bound" else {})))
    for thief in thieves:
        bench.exact(thief)
        pod, seen = bench.pod(thief), bench.sees(thief)["c"]
        assert len(seen) == 1, thief
        assert pod.spec.node_name == "node-2" or not {*seen} & {*taken}, thief
        assert pod.metadata.annotations["team"] == "a"
        assert pod.metadata.annotations.get("mgpu.io/seal") != "v1.x.y.z", thief
    assert bench.within_capacity()
    bench.clear()
    assert all(state.idle for states in bench.samples.states().values() for state in states)


def test_a_generated_name_and_a_dry_run_lose_the_record_as_well(bench: Bench) -> None:
    raw = forged("koordinator", nodeName="node-1")
    raw["metadata"] = {**raw["metadata"], "name": None, "generateName": "thief-"}
    made: Any = bench.core.create_namespaced_pod("default", raw, dry_run="All")  # type: ignore[arg-type]
    assert made.metadata.annotations == {"team": "a"}


@pytest.mark.parametrize("requests", [True, False], ids=["gpu", "plain"])
def test_no_record_is_added_to_a_pod_whether_it_asks_for_gpu_or_not(bench: Bench, *, requests: bool) -> None:
    plain = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}}
    bench.create(share("p") if requests else plain)
    bench.runs("p")
    before = bench.pod("p").metadata.annotations
    for subresource in ("", "/status"):
        for key in (KOORDINATOR, PER_CONTAINER, f"{INDEX}c", GPUSHARE, "mgpu.io/seal", "lsalab.nthu/GPUID"):
            patch = {"metadata": {"annotations": {key: "x"}}}
            with pytest.raises(Exception, match=r"records a placement|copied from an MtgpuPod"):
                bench.cluster.api.patch(f"/api/v1/namespaces/default/pods/p{subresource}", patch)
    assert bench.pod("p").metadata.annotations == before


SAID = {f"lsalab.nthu/{key}": text for key, text in (("gpu_request", "0"), ("gpu_limit", "1"), ("gpu_mem", "1"))}
OWNER = {"apiVersion": "lsalab.nthu/v1", "kind": "MtgpuPod", "name": "m", "uid": "5d0fc0fb", "controller": True}


@pytest.mark.parametrize("marks", [{"annotations": SAID}, {"ownerReferences": [OWNER]}], ids=["said", "owned"])
def test_a_pod_that_poses_as_an_mtgpupods_is_refused(bench: Bench, marks: Json) -> None:
    own = {"name": "c", "image": "cuda", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-node-1-0"}]}
    with pytest.raises(ApiException, match="mgpu creates"):
        bench.create({"metadata": {"name": "thief", **marks}, "spec": {"nodeName": "node-1", "containers": [own]}})


def test_a_pod_cannot_be_adopted_by_an_mtgpupod_afterwards(bench: Bench, cluster: Cluster) -> None:
    bench.create({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})
    with pytest.raises(Exception, match="cannot be added or changed afterwards"):
        cluster.api.patch("/api/v1/namespaces/default/pods/p", {"metadata": {"ownerReferences": [OWNER]}})
