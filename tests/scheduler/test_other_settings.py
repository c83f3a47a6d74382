"""Pods that got their cards under other settings than those of now keep them, in every vocabulary."""

from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import read_gpu_pod
from mgpu.kube import ApiError
from mgpu.settings import Settings, load_settings
from tests import builders as b
from tests.scheduler.fake import Replica, admitted, cluster

Raw = dict[str, Any]


def asking(**amounts: str) -> Raw:
    named = {name.replace("__", ".", 1).replace("__", "/").replace("_", "-"): text for name, text in amounts.items()}
    return b.pod("p", {"name": "c", "resources": {"requests": named, "limits": dict(named)}})


PODS = {
    "mgpu": b.share("p", 50, 1024),
    "gpushare": asking(aliyun__com__gpu_mem="8"),
    "koordinator": asking(koordinator__sh__gpu_core="50", koordinator__sh__gpu_memory_ratio="50"),
}


def placed(raw: Raw, settings: Settings) -> Raw:
    """The pod as it is once it runs, its cards decided under `settings`."""
    api = cluster(("n1", 2))
    replica = Replica(api, settings=settings)
    api.admit = admitted(replica)
    api.put("pods", {**raw, "metadata": {**raw["metadata"], "annotations": {}}})
    api.bind("p", "n1")
    return {**api.pod("p"), "status": {"phase": "Running"}}


def free(raw: Raw, settings: Settings) -> list[tuple[int, int]]:
    api = cluster(("n1", 2))
    api.put("pods", raw)
    return [(s.core_free, s.memory_free) for s in Replica(api, settings=settings).state.node_snapshot("n1", "").cards]


@pytest.mark.parametrize("dialect", PODS)
def test_a_dialect_that_was_switched_off_takes_no_cards_away(dialect: str) -> None:
    running = placed(PODS[dialect], load_settings())
    off = load_settings(f"dialects: {{{dialect}: {{enabled: false}}}}")
    assert free(running, off) == free(running, load_settings()) != [(1000, 80 * b.GIB)] * 2
    agents = read_gpu_pod(running, off)
    assert agents is not None
    assert agents.shares


@pytest.mark.parametrize("dialect", PODS)
def test_a_pod_without_a_record_is_none_of_a_dialect_that_is_off(dialect: str) -> None:
    off = load_settings(f"dialects: {{{dialect}: {{enabled: false}}}}")
    assert free({**PODS[dialect], "status": {"phase": "Running"}}, off) == [(1000, 80 * b.GIB)] * 2


@pytest.mark.parametrize(
    ("raw", "then", "now"),
    [
        (asking(koordinator__sh__gpu_memory="8", mgpu__io__share="1"), "koordinator: {minGPUMemory: 0}", ""),
        (PODS["koordinator"], "", "koordinator: {minGPUMemoryRatio: 60}"),
        (PODS["gpushare"], "", "gpushare: {minGPUMemory: 65536}"),
    ],
    ids=["eight bytes, from before the upgrade", "percent", "gpushare"],
)
def test_running_pod_below_the_least_amount_of_now_keeps_its_cards(raw: Raw, then: str, now: str) -> None:
    """It goes on to count, and its containers start again: the agent reads its shares."""
    running = placed(raw, load_settings(f"dialects: {{{then}}}"))
    settings = load_settings(f"dialects: {{{now}}}")
    assert free(running, settings) == free(running, load_settings(f"dialects: {{{then}}}")) != [(1000, 80 * b.GIB)] * 2
    agents = read_gpu_pod(running, settings)
    assert agents is not None
    assert agents.shares


@pytest.mark.parametrize("units", [("GiB", "MiB"), ("MiB", "GiB")])
def test_a_record_keeps_its_unit(units: tuple[str, str]) -> None:
    then, now = (load_settings(f"dialects: {{gpushare: {{memoryUnit: {unit}}}}}") for unit in units)
    running = placed(asking(aliyun__com__gpu_mem="8", mgpu__io__share="1"), then)
    held = 8 * (b.GIB if units[0] == "GiB" else b.GIB >> 10)
    assert free(running, now) == free(running, then) == [(1000, 80 * b.GIB - held), (1000, 80 * b.GIB)]


@pytest.mark.parametrize(
    ("raw", "settings"),
    [(asking(aliyun__com__gpu_mem="8"), "memoryUnit: MiB"), (asking(koordinator__sh__gpu="50"), "")],
)
def test_a_pod_that_admission_did_not_complete_gets_no_cards(raw: Raw, settings: str) -> None:
    """The node agent would not be asked for its containers: they would run, and see every card."""
    api = cluster(("n1", 2))
    replica = Replica(api, settings=load_settings(f"dialects: {{gpushare: {{{settings}}}}}"))
    api.admit = admitted(replica)
    api.put("pods", raw)
    with pytest.raises(ApiError, match="create the pod again"):
        api.bind("p", "n1")


def test_a_unit_that_a_pending_pod_brings_along_means_nothing() -> None:
    raw = asking(aliyun__com__gpu_mem="8")
    raw["metadata"]["annotations"] = {"ALIYUN_COM_GPU_MEM_UNIT": "MiB"}
    replica = Replica(cluster(("n1", 1)))
    replica.state.pod_changed(raw)
    known = replica.state.gpu_pod("uid-p")
    assert known is not None
    assert known.request is not None
    assert known.request.containers[0].memory == 8 * b.GIB
