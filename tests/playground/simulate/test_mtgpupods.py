"""MtgpuPods in `mgpu simulate` (docs/design/simulate.md; docs/design/mtgpu.md, "Meaning of a GPUID")."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GIB, container, mtgpupod, occupy_pod, owned, pod, share
from tests.examples import examples
from tests.playground.simulate import simulation
from tests.playground.simulate.simulation import run, simulated

Raw = dict[str, Any]
STOCK = {"mgpu.io/whole-cards": "nvidia"}


def served(name: str = "n1", count: int = 2, labels: dict[str, str] | None = None) -> Raw:
    return simulation.served(name, [{"model": "T4", "memory": "16Gi", "count": count}], labels)


def cards(found: Any, node: str = "n1") -> list[tuple[str | None, float]]:
    return [(card["gpuid"], card["core"]["used"]) for card in found["nodes"][node]["cards"]]


def told(found: Any) -> list[tuple[str | None, str | None, str | None]]:
    return [(row["node"], row["phase"], row["reason"]) for row in found["pods"] if row.get("kind") == "MtgpuPod"]


WAITS = (None, "Pending", "ResourceExceeded")
RUNS = ("n1", "Running", "Bound")


def test_output_has_every_key_for_running_waiting_and_denied_mtgpupods() -> None:
    found = simulated(
        served(count=1), mtgpupod("a", memory=3 * GIB), mtgpupod("b", "other"), mtgpupod("c", request="x")
    )
    runs, waits, denied = found["pods"]
    keys = ["kind", "phase", "reason", "namespace", "name", "admitted", "denied", "patch", "dialect", "node"]
    keys += ["rejections", "scores", "annotations", "containers"]
    assert list(runs) == list(waits) == list(denied) == keys
    assert {row["kind"] for row in found["pods"]} == {"MtgpuPod"}
    assert {row["dialect"] for row in found["pods"]} == {"mtgpu"}
    env = {
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-0",
        "MGPU_CARDS": "0",
        "MGPU_CORE_PERCENT": "20",
        "MGPU_MEMORY_BYTES": str(3 * GIB),
    }
    assert runs["containers"] == {"c": {"cards": [0], "core": [20], "memory": [3 * GIB], "env": env}}
    assert (runs["rejections"], runs["scores"], runs["annotations"], runs["patch"]) == ({}, {}, {}, [])
    assert (waits["node"], waits["containers"], list(waits["rejections"])) == (None, {}, ["n1"])
    assert (denied["admitted"], denied["phase"], denied["reason"], denied["node"]) == (False, None, None, None)
    assert [problem["field"] for problem in denied["denied"]] == ["metadata.annotations[lsalab.nthu/gpu_request]"]
    assert found["nodes"]["n1"]["cards"][0]["holders"] == ["default/a/c"]


def test_decimal_sums_are_exact() -> None:
    shares = [mtgpupod(f"m{i}", request=text) for i, text in enumerate(["0.2", "0.4", "0.3", "0.1", "0.001"])]
    found = simulated(served(count=1), *shares)
    assert told(found) == [RUNS] * 4 + [WAITS]
    assert cards(found) == [("zxcvb", 100)]


def test_mtgpupods_are_placed_in_file_order_within_a_gpuid() -> None:
    late = mtgpupod("a", request="0.9")
    late["metadata"]["creationTimestamp"] = "2030-01-01T00:00:00Z"
    early = mtgpupod("z", request="0.2")
    early["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    found = simulated(served(), late, early, mtgpupod("small", request="0.1"), mtgpupod("other", "other"))
    assert told(found) == [RUNS, WAITS, WAITS, RUNS]


def test_shares_and_mtgpupods_do_not_share_cards() -> None:
    found = simulated(served(), share("before"), mtgpupod("m"), share("after"), mtgpupod("n", "other"))
    assert [row["node"] for row in found["pods"]] == ["n1", "n1", "n1", None]
    assert cards(found) == [(None, 100), ("zxcvb", 20)]
    assert found["nodes"]["n1"]["cards"][0]["holders"] == ["default/after/c", "default/before/c"]


def test_whole_card_pod_gets_a_card_without_gpuid() -> None:
    whole = [pod(f"w{i}", {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}) for i in (0, 1)]
    found = simulated(served(), mtgpupod(), *whole)
    assert [row["node"] for row in found["pods"]] == ["n1", "n1", None]
    assert cards(found) == [("zxcvb", 20), (None, 100)]


def test_mtgpupod_with_bound_device_id_runs_and_is_not_listed() -> None:
    bound = [mtgpupod("a", bound="GPU-n1-1"), mtgpupod("done", "old", bound="GPU-n1-0", phase="Succeeded")]
    found = simulated(served(), *bound, mtgpupod("joins", request="0.3"))
    assert [row["name"] for row in found["pods"]] == ["joins"]
    assert cards(found) == [(None, 0), ("zxcvb", 50)]
    assert found["pods"][0]["containers"]["c"]["cards"] == [1]


def test_running_occupy_pod_is_recognised_with_and_without_record() -> None:
    bound, other = mtgpupod("a", bound="GPU-n1-1"), mtgpupod("b", "new")
    for occupy in (occupy_pod(card=1, phase="Running"), occupy_pod()):
        found = simulated(served(), occupy, bound, other)
        assert cards(found) == [("new", 20), ("zxcvb", 20)]
        assert found["nodes"]["n1"]["cards"][1]["holders"] == ["default/a/c"]


def test_occupy_pod_on_another_card_than_its_users_degrades_the_gpuid() -> None:
    found = simulated(served(), occupy_pod(card=0), mtgpupod("a", bound="GPU-n1-1"), mtgpupod("b"))
    assert cards(found) == [(None, 100), ("zxcvb", 20)]
    assert told(found) == [(None, "Pending", "Degraded")]


def test_occupy_pod_gives_its_card_to_its_mtgpupod_and_is_left_out_without_one() -> None:
    found = simulated(served(), occupy_pod(card=1), mtgpupod("a"))
    assert cards(found) == [(None, 0), ("zxcvb", 20)]
    result = run(
        "-", "-o", "json", objects=[served(), occupy_pod("gone", card=1), mtgpupod("a"), mtgpupod("b", "other")]
    )
    assert cards(json.loads(result.stdout)) == [("zxcvb", 20), ("other", 20)]
    assert "mtgpupod-occupypod-n1-gone" in result.stderr


def test_mtgpupod_whose_pod_names_are_taken_waits_with_a_conflict() -> None:
    name_of_pod, name_of_occupy_pod = share("m", core=10), pod("mtgpupod-occupypod-n1-zxcvb", container(), node="n1")
    name_of_occupy_pod["metadata"]["namespace"] = "kube-system"
    assert told(simulated(served(), name_of_pod, mtgpupod())) == [(None, "Pending", "NameConflict")]
    found = simulated(served(), name_of_occupy_pod, mtgpupod("a"), mtgpupod("b", "other"))
    assert told(found) == [(None, "Pending", "OccupyNameConflict"), RUNS]


def test_pod_with_the_name_of_an_mtgpupods_own_pod_is_denied() -> None:
    found = simulated(served(), mtgpupod("m"), share("m"))
    assert found["pods"][1]["denied"][0]["field"] == "metadata.name"


def test_mtgpupod_reserves_cpu_once_and_fails_where_its_pod_does_not_fit() -> None:
    small = served()
    small["status"]["allocatable"]["cpu"] = "3"

    def busy(name: str, **more: Any) -> Raw:
        raw = mtgpupod(name, **more)
        raw["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2"}}
        return raw

    found = simulated(small, busy("a"), busy("b"), mtgpupod("c"))
    assert told(found) == [RUNS, (None, "Failed", "OutOfcpu"), RUNS]
    assert found["pods"][1]["rejections"] == {"n1": "its kubelet does not start the Pod: Insufficient cpu"}
    bound = busy("a", bound="GPU-n1-0")
    own = {**busy("a"), "kind": "Pod"}
    own["metadata"] |= {"uid": "own", "ownerReferences": [owned("a")]}
    plain = pod("plain", {"name": "c", "resources": {"requests": {"cpu": "1"}}})
    for running in ([bound], [bound, own]):
        assert [row["node"] for row in simulated(small, *running, plain, busy("b"))["pods"]] == ["n1", None]


def test_mtgpupod_without_status_keeps_the_card_of_its_pod() -> None:
    own = {**mtgpupod("m", uid="own", phase="Running"), "kind": "Pod"}
    own["metadata"]["ownerReferences"] = [owned()]
    own["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-n1-1"}]
    found = simulated(served(), own, mtgpupod("other", "other"), mtgpupod("m"))
    assert cards(found) == [("other", 20), ("zxcvb", 20)]
    assert told(found) == [RUNS, RUNS]
    assert cards(simulated(served(), own)) == [(None, 0), ("zxcvb", 20)]


def test_nvidia_plugin_node_gives_a_whole_card_to_the_occupy_pod() -> None:
    stock = served("n2", 3, STOCK)
    whole = pod("whole", {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}})
    later = {**whole, "metadata": {"name": "later"}}
    users = [mtgpupod(name, request="0.5", node="n2") for name in ("a", "b")]
    found = simulated(stock, whole, *users, later, mtgpupod("c", "other", node="n2"))
    assert [row["node"] for row in found["pods"]] == ["n2", "n2", "n2", "n2", None]
    assert cards(found, "n2") == [(None, 100), ("zxcvb", 100), (None, 100)]


def test_nvidia_plugin_node_with_a_share_takes_no_new_gpuid() -> None:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    stock = served(labels=STOCK)
    assert told(simulated(stock, share("s", node="n1", annotations=record), mtgpupod())) == [WAITS]


def test_cordoned_node_takes_no_mtgpupod() -> None:
    cordoned = {**served(), "spec": {"unschedulable": True}}
    assert told(simulated(cordoned, mtgpupod())) == [(None, "Pending", "NodeUnschedulable")]


def test_mtgpupods_disabled_in_the_settings_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_DIALECTS__MTGPU__ENABLED", "false")
    found = simulated(served(), mtgpupod())
    assert told(found) == [(None, "Pending", None)]
    assert found["pods"][0]["rejections"] == {"n1": "MtgpuPods are not enabled in the settings"}


def test_mtgpupods_exit_codes_follow_input_and_pending() -> None:
    twice = run("-", objects=[served(), mtgpupod(), mtgpupod()])
    assert (twice.exit_code, twice.stderr.count("\n")) == (2, 1)
    assert "an MtgpuPod named default/m exists already" in twice.stderr
    away = run("-", objects=[served(), mtgpupod(node="n9")])
    assert (away.exit_code, "no node is named 'n9'" in away.stderr) == (2, True)
    waits = (served(count=1), mtgpupod("a"), mtgpupod("b", "other"))
    assert run("-", objects=waits).exit_code == 0
    assert run("-", "--fail-on-pending", objects=waits).exit_code == 1
    assert simulated(served(), mtgpupod(node=""))["pods"][0]["denied"][0]["field"] == "spec.nodeName"


def test_table_shows_mtgpupods_with_kind_and_reason() -> None:
    text = run("-", objects=[served(count=1), mtgpupod("a"), mtgpupod("b", "other")])
    assert "MtgpuPod default/a   n1   c on card 0" in text.stdout
    assert "n1: ResourceExceeded: " in text.stdout
    assert "A default/a · MtgpuPod · 20% 1 GiB on 0" in text.stdout


@st.composite
def submissions(draw: st.DrawFn) -> list[Raw]:
    """Generate pods of several vocabularies and MtgpuPods of three GPUIDs, in any order, for one node."""
    pods = []
    for i in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["named", "named", "named", "share", "whole"]))
        if kind == "share":
            pods.append(share(f"p{i}", core=draw(st.integers(1, 10)) * 10))
        elif kind == "whole":
            pods.append(pod(f"p{i}", {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}))
        else:
            request, gib = draw(st.integers(0, 1000)), draw(st.integers(1, 17))
            gpuid = draw(st.sampled_from(["one", "two", "three"]))
            pods.append(mtgpupod(f"p{i}", gpuid, f"{request / 1000:.3f}", memory=gib * GIB))
    return pods


@given(submissions(), st.booleans())
@examples(30)
def test_cards_have_one_gpuid_stay_within_capacity_and_are_not_left_idle(
    pods: list[Raw],
    nvidia: bool,
) -> None:
    found = simulated(served(count=2, labels=STOCK if nvidia else None), *pods)
    names = {row["metadata"]["name"]: row["metadata"]["annotations"].get("lsalab.nthu/GPUID") for row in pods}
    states = found["nodes"]["n1"]["cards"]
    for card in states:
        assert {names[holder.split("/")[1]] for holder in card["holders"]} <= {card["gpuid"]}
        assert card["core"]["used"] <= 100
        assert card["memory"]["used"] <= card["memory"]["total"]
    used = [card["gpuid"] for card in states if card["gpuid"]]
    assert len(used) == len(set(used))
    waiting = {row["name"] for row in found["pods"] if not row["node"]} if not nvidia else set()
    large = {row["metadata"]["name"] for row in pods if _memory(row) <= 16 * GIB}
    idle = any(not card["holders"] for card in states)
    assert not idle or all(names[name] in used for name in waiting & large)


def _memory(raw: Raw) -> int:
    return int(raw["metadata"]["annotations"].get("lsalab.nthu/gpu_mem", 17 * GIB))


def test_gpuids_beyond_the_bound_of_a_namespace_wait_on_every_node(tmp_path: Path) -> None:
    config = tmp_path / "mgpu.yaml"
    config.write_text("dialects: {mtgpu: {maxGPUIDsPerNamespace: 1}}")
    pods = [
        mtgpupod("a", "x"),
        mtgpupod("b", "y", node="n2"),
        mtgpupod("c", "x"),
        mtgpupod("d", "y", namespace="other"),
    ]
    found = simulated(served("n1"), served("n2"), *pods, options=("--config", str(config)))
    assert told(found) == [RUNS, (None, "Pending", "TooManyGPUIDs"), RUNS, RUNS]
