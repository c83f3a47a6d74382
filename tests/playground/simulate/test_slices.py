"""`mgpu simulate` with partitioned nodes, where partition plans take effect at once."""

import json
from typing import Any

import pytest

from mgpu.model import node_slices
from mgpu.model.slice_names import Slice
from tests.builders import node, pod, share
from tests.playground.simulate.simulation import run, simulated

A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory": "80Gi"}
GIB = 1 << 30


def cut(mode: str = "mig", name: str = "n1", cards: int = 1, said: dict[str, str] | None = None) -> dict[str, Any]:
    raw = node(name, labels={node_slices.LABEL: mode}, **(said or {}))
    raw["metadata"]["annotations"]["mgpu.io/cards"] = json.dumps([{**A100, "count": cards}])
    return raw


def asking(name: str, node: str = "", /, **amounts: int) -> dict[str, Any]:
    """`asking("p", mig_2g_20gb=1)`"""
    limits = {"nvidia.com/" + key.replace("_", "-", 1).replace("_", "."): str(n) for key, n in amounts.items()}
    return pod(name, {"name": "c", "image": "x", "resources": {"limits": limits}}, node=node)


def placed(found: Any) -> dict[str, Any]:
    """Return pod → its node, or the rejections of a waiting pod."""
    return {row["name"]: row["node"] or row["rejections"] for row in found["pods"]}


def held(found: Any, name: str = "n1", card: int = 0) -> dict[Any, Any]:
    """Return profile and start → holder of the slices in use."""
    slices = found["nodes"][name]["cards"][card]["slices"]
    return {(row["profile"], row.get("start")): row["holder"] for row in slices if row["holder"]}


def test_card_is_partitioned_for_the_pod_that_needs_a_slice() -> None:
    found = simulated(cut(), asking("p", mig_2g_20gb=1))
    (row,), card = found["pods"], found["nodes"]["n1"]["cards"][0]
    assert (row["node"], row["dialect"], row["rejections"]) == ("n1", "slices", {})
    (((profile, start), holder),) = held(found).items()
    assert (profile, holder) == ("2g.20gb", "default/p/c")
    given = row["containers"]["c"]
    uuid = f"MIG-GPU-n1-0-2g.20gb-{start}"
    assert {key: given[key] for key in ("profile", "cards", "core", "memory")} == {
        "profile": "2g.20gb",
        "cards": [0],
        "core": [28.5],
        "memory": [20 * GIB],
    }
    assert given["env"]["NVIDIA_VISIBLE_DEVICES"] == uuid
    assert json.loads(row["annotations"]["mgpu.io/slices-given"]) == {"c": {"mig-2g.20gb": [f"0:{start}"]}}
    assert (card["core"]["used"], card["memory"]["used"], card["holders"]) == (28.5, 20 * GIB, ["default/p/c"])


def test_annotations_are_those_of_scheduler_and_agent() -> None:
    found = simulated(cut(), asking("p", mig_3g_40gb=1))
    said = found["nodes"]["n1"]["annotations"]
    assert set(said) == {"dynamicgpuslice", "mgpu.io/slices", "mgpu.io/slices-planned"}
    counts = json.loads(said["dynamicgpuslice"])
    assert (counts["spec-partitioning-plan"], counts["status-partitioning-plan"]) == (1, 1)
    assert counts["status-gpu-0-3g.40gb-used"] == 1
    assert counts["spec-gpu-0-3g.40gb"] == counts.get("status-gpu-0-3g.40gb-free", 0) + 1
    (uid,) = {row["pod"] for row in json.loads(said["mgpu.io/slices"])["cards"]["0"] if "pod" in row}
    assert uid == "uid-p"


def test_used_slices_stay_and_free_slices_are_replaced() -> None:
    found = simulated(cut(), asking("a", mig_1g_10gb=1), asking("b", mig_4g_40gb=1), asking("c", mig_7g_80gb=1))
    assert placed(found)["a"] == placed(found)["b"] == "n1"
    assert ("4g.40gb", 0) in held(found)
    (reason,) = placed(found)["c"].values()
    assert reason.startswith("insufficient slices (1 card: ")
    assert json.loads(found["nodes"]["n1"]["annotations"]["dynamicgpuslice"])["spec-partitioning-plan"] == 2


def test_pod_with_unknown_profile_waits_with_its_name() -> None:
    found = simulated(cut(), asking("p", mig_2g_10gb=1))
    assert "2g.10gb" in placed(found)["p"]["n1"]


def test_mps_share_gets_its_limits() -> None:
    found = simulated(cut("mps", cards=2), asking("p", gpu_4gb=1), asking("q", gpu_4gb=1), share("whole"))
    first, second = found["nodes"]["n1"]["cards"]
    assert {"profile": "4gb", "holder": "default/p/c"} in first["slices"]
    assert (second["slices"], second["holders"]) == ([], ["default/whole/c"])
    given = found["pods"][0]["containers"]["c"]
    assert (given["profile"], given["cards"], given["memory"]) == ("4gb", [0], [4 * GIB])
    expected = {
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "5",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mgpu/mps/GPU-n1-0/pipe",
    }
    assert {key: given["env"].get(key) for key in expected} == expected


def test_partitioned_cards_are_not_given_to_other_vocabularies() -> None:
    gpu = pod("gpu", {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}})
    found = simulated(cut(), cut("", "whole", cards=2), share("p"), gpu, asking("s", mig_1g_10gb=1))
    assert placed(found) == {"p": "whole", "gpu": "whole", "s": "n1"}
    assert "partitioned into slices" in found["pods"][0]["rejections"]["n1"]
    assert found["pods"][2]["rejections"] == {"whole": "node label gpu.partitioning is not set, not mig"}


def test_existing_slices_are_used_before_partitioning() -> None:
    made = [Slice(0, 0, "3g.40gb", "MIG-x"), Slice(0, 4, "1g.10gb", "MIG-y", "uid-old")]
    said = {node_slices.ANNOTATION: node_slices.with_status(None, made, 7)}
    said[node_slices.EXISTING] = node_slices.write_existing(made, [0], None)
    there = cut(said=said)
    old = asking("old", "n1", mig_1g_10gb=1)
    old["metadata"]["annotations"] = {"mgpu.io/slices-given": '{"c":{"mig-1g.10gb":["0:4"]}}'}
    found = simulated(cut(name="n0"), there, old, asking("p", mig_3g_40gb=1))
    assert placed(found) == {"p": "n1"}
    assert held(found) == {("3g.40gb", 0): "default/p/c", ("1g.10gb", 4): "default/old/c"}
    assert found["pods"][0]["containers"]["c"]["env"]["NVIDIA_VISIBLE_DEVICES"] == "MIG-x"
    assert found["nodes"]["n0"]["cards"][0]["slices"] == []


def test_slices_that_are_only_counted_are_placed() -> None:
    counts = {"spec-gpu-0-2g.20gb": 3, "spec-partitioning-plan": 9, "status-gpu-0-2g.20gb-used": 1}
    said = {node_slices.ANNOTATION: json.dumps({**counts, "status-partitioning-plan": 9, "theirs": "kept"})}
    found = simulated(cut(said=said), asking("p", mig_2g_20gb=2), asking("q", mig_2g_20gb=1))
    slices = found["nodes"]["n1"]["cards"][0]["slices"]
    assert [(row["profile"], row["start"]) for row in slices] == [("2g.20gb", start) for start in (0, 2, 4)]
    assert sorted(row["holder"] or "" for row in slices) == ["?", "default/p/c", "default/p/c"]
    assert found["pods"][1]["node"] is None
    assert json.loads(found["nodes"]["n1"]["annotations"]["dynamicgpuslice"])["theirs"] == "kept"


def test_plan_under_way_is_carried_out_first() -> None:
    planned = [Slice(0, 0, "4g.40gb"), Slice(0, 4, "3g.40gb")]
    said = {node_slices.ANNOTATION: node_slices.with_spec(None, {0: {"4g.40gb": 1, "3g.40gb": 1}}, 5)}
    for written in ({node_slices.PLANNED: node_slices.write_planned(planned, 5)}, {}):
        found = simulated(cut(said={**said, **written}), asking("p", mig_4g_40gb=1))
        assert [row["start"] for row in found["nodes"]["n1"]["cards"][0]["slices"]] == [0, 4]
        counts = json.loads(found["nodes"]["n1"]["annotations"]["dynamicgpuslice"])
        assert (counts["spec-partitioning-plan"], counts["status-partitioning-plan"]) == (5, 5)


def test_missing_slices_of_running_pods_are_made_again() -> None:
    old = asking("old", "n1", mig_1g_10gb=1)
    old["metadata"]["annotations"] = {"mgpu.io/slices-given": '{"c":{"mig-1g.10gb":["0:4"]}}'}
    result = run("-", "-o", "json", objects=[cut(), old, asking("p", mig_3g_40gb=1)])
    assert result.stderr == ""
    assert held(json.loads(result.stdout)) == {("1g.10gb", 4): "default/old/c", ("3g.40gb", 0): "default/p/c"}


def test_running_pod_without_record_gets_its_slice_late() -> None:
    found = simulated(cut(), asking("late", "n1", mig_2g_20gb=1))
    assert list(held(found).values()) == ["default/late/c"]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (cut("both"), "node n1: its slices are ignored: metadata.labels[gpu.partitioning]: must be"),
        (
            cut(said={"dynamicgpuslice": "{"}),
            "node n1: its slices are ignored: metadata.annotations[dynamicgpuslice]: is not JSON",
        ),
    ],
)
def test_malformed_annotations_are_reported_and_stop_partitioning(raw: Any, line: str) -> None:
    result = run("-", "-o", "json", objects=[raw, asking("p", mig_1g_10gb=1)])
    assert result.exit_code == 0
    assert result.stderr.startswith(line)
    assert json.loads(result.stdout)["pods"][0]["node"] is None


def test_schedule_policy_of_slices_chooses_the_node(tmp_path: Any) -> None:
    config = tmp_path / "mgpu.yaml"
    first = asking("first", mig_1g_10gb=1)
    for policy, node_name in (("binpack", "n2"), ("spread", "n1")):
        config.write_text(f"dialects: {{slices: {{schedulePolicy: {policy}, weight.cpu: 0, weight.memory: 0}}}}")
        objects = [cut(name="n1", cards=2), cut(name="n2", cards=1), first]
        found = simulated(*objects, options=("--config", str(config)))
        assert placed(found) == {"first": node_name}


def test_same_input_gives_the_same_output() -> None:
    pods = [asking(f"p{i}", **{("mig_1g_10gb", "mig_2g_20gb", "mig_3g_40gb")[i % 3]: 1}) for i in range(9)]
    assert simulated(cut(cards=2), *pods) == simulated(cut(cards=2), *pods)
