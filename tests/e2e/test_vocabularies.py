"""Tests gpushare and Koordinator pods and whole cards, as their users write them, together with mGPU pods."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu.model.device_object import DEVICE_API
from playground.cluster import Cluster
from playground.nodes import make_nodes
from tests.e2e.bench import Bench, Json, asking, share
from tests.e2e.clusters import patient
from tests.waiting import until

DEVICES = f"/apis/{DEVICE_API}/devices"


def on(node: str, pod: Json) -> Json:
    return {**pod, "spec": {**pod["spec"], "nodeSelector": {"kubernetes.io/hostname": node}}}


def inspect(cluster: Cluster, *command: str) -> str:
    environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "COLUMNS": "160"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def gpushare_table(cluster: Cluster) -> list[list[str]]:
    """Return the words of `kubectl inspect gpushare -d`, from the plugin itself if kubectl is not installed."""
    plugin = Path(sys.executable).with_name("kubectl-inspect-gpushare")
    command = [str(plugin)]
    if shutil.which("kubectl"):
        command = ["env", f"PATH={plugin.parent}:{os.environ['PATH']}", "kubectl", "inspect", "gpushare"]
    return [line.split() for line in inspect(cluster, *command, "-d").splitlines() if line.strip()]


def test_three_vocabularies_and_a_whole_card_on_one_node(bench: Bench) -> None:
    pods = [
        share("mgpu", core=30, mib=4096),
        asking("gpushare", gpu_mem=16),
        asking("koordinator", gpu=25, requests=True),
    ]
    for pod in (*pods, asking("whole", nvidia=1)):
        bench.create(on("node-1", pod))
        bench.exact(pod["metadata"]["name"])
    assert {tuple(bench.sees(pod["metadata"]["name"])["c"]) for pod in pods} == {(0,)}
    assert bench.sees("whole")["c"] != [0]
    state = bench.samples.states()["node-1"][0]
    assert (state.core_used, state.memory_used, state.shares) == (550, 40 << 30, 3)
    bench.create(on("node-1", asking("three", nvidia=3)))
    assert "container 'c' needs 3 cards, but only 2 can take it" in bench.waits("three")
    assert bench.within_capacity()


def test_the_gpushare_seeds_pod_sees_its_card_and_the_tool_prints_the_seeds_table(bench: Bench) -> None:
    pod = on("node-1", asking("binpack-1-767bddd4b5-gzqk7", gpu_mem=1))
    pod["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    bench.create(pod)
    bench.exact("binpack-1-767bddd4b5-gzqk7")
    environment = bench.environment("binpack-1-767bddd4b5-gzqk7", "c")
    assert {key: value for key, value in environment.items() if key.startswith("ALIYUN")} == {
        "ALIYUN_COM_GPU_MEM_IDX": "0",
        "ALIYUN_COM_GPU_MEM_POD": "1",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "1",
        "ALIYUN_COM_GPU_MEM_DEV": "80",
    }
    assigned = "ALIYUN_COM_GPU_MEM_ASSIGNED"
    until(lambda: bench.pod("binpack-1-767bddd4b5-gzqk7").metadata.annotations[assigned] == "true")
    rows = gpushare_table(bench.cluster)
    assert ["NAME:", "node-1"] in rows
    assert ["IPADDRESS:", "127.0.0.1"] in rows
    header = next(row for row in rows if row[:2] == ["NAME", "NAMESPACE"])
    assert header[2:] == [f"GPU{i}(Allocated)" for i in range(4)]
    assert ["binpack-1-767bddd4b5-gzqk7", "default", "1", "0", "0", "0"] in rows
    assert ["Allocated", ":", "1", "(0%)"] in rows
    assert ["Total", ":", "320"] in rows
    assert rows[-1][-2:] == ["1/496", "(0%)"]


@pytest.fixture
def rdma(bench: Bench) -> Iterator[None]:
    """A device of another type on node-1 that another component reports. The agent must not change it."""
    row = {"type": "rdma", "id": "mlx5_0", "minor": 0, "health": True, "resources": {"koordinator.sh/rdma": "100"}}
    bench.cluster.api.patch(f"{DEVICES}/node-1", {"spec": {"devices": [*devices(bench), row]}})
    until(lambda: allocatable(bench, "node-1").get("koordinator.sh/rdma") == "100")
    yield
    gpus = [device for device in devices(bench) if device["type"] == "gpu"]
    bench.cluster.api.patch(f"{DEVICES}/node-1", {"spec": {"devices": gpus}})


def devices(bench: Bench) -> list[Json]:
    rows: list[Json] = bench.cluster.api.get(f"{DEVICES}/node-1")["spec"]["devices"]
    return rows


def allocatable(bench: Bench, node: str) -> dict[str, str]:
    found: Any = bench.core.read_node(node)
    return dict(found.status.allocatable or {})


@pytest.mark.usefixtures("rdma")
def test_the_five_examples_of_the_koordinator_seed_run_as_they_are_written(bench: Bench) -> None:
    asks: dict[str, tuple[str, Json]] = {
        "nvidia": ("node-1", {"nvidia": 2}),
        "half": ("node-1", {"gpu": 50}),
        "ratio": ("node-1", {"core": 50, "ratio": 60}),
        "memory": ("node-2", {"core": 60, "memory": "4Gi"}),
        "rdma": ("node-1", {"rdma": 100}),
    }
    for name, (node, amounts) in asks.items():
        bench.create(on(node, asking(name, requests=True, cpu=4, ram="8Gi", **amounts)))
        bench.runs(name)
    for name in ("nvidia", "half", "ratio", "memory"):
        bench.exact(name)
    # Which of the equal cards a pod gets may depend on how soon the scheduler sees the end of the pods of other tests.
    seen = {name: bench.sees(name)["c"] for name in ("nvidia", "half", "ratio", "memory")}
    assert [len(cards) for cards in seen.values()] == [2, 1, 1, 1]
    assert sorted(seen["nvidia"] + seen["half"] + seen["ratio"]) == [0, 1, 2, 3]
    assert bench.cards("rdma") == {}
    (first,) = [node for node in bench.samples.overview().nodes if node.name == "node-1"]
    assert [(card.state.card.type, card.holders) for card in first.others] == [("rdma", ["default/rdma/c"])]
    assert bench.within_capacity()


def test_memory_alone_has_something_that_the_kubelet_can_give_out(bench: Bench) -> None:
    bench.create(asking("p", memory="5Gi"))
    bench.exact("p")
    limits = bench.pod("p").spec.containers[0].resources.limits
    assert limits["mgpu.io/share"] == "1"
    assert bench.environment("p", "c")["MGPU_MEMORY_BYTES"] == str(5 << 30)


def test_a_pod_that_mixes_vocabularies_is_denied(bench: Bench) -> None:
    mixed = asking("p", gpu_mem=1)
    mixed["spec"]["containers"][0]["resources"]["limits"]["koordinator.sh/gpu"] = "50"
    with pytest.raises(Exception, match="a pod uses one vocabulary"):
        bench.create(mixed)


def test_an_init_container_alone_brings_a_pod_to_the_webhook(bench: Bench) -> None:
    pod = asking("p", gpu_mem=0)
    pod["spec"] = {"initContainers": pod["spec"]["containers"], "containers": [{"name": "d", "image": "busybox"}]}
    with pytest.raises(Exception, match="must be greater than 0"):
        bench.create(pod)


def test_equal_and_unequal_pods_of_all_vocabularies_at_once(bench: Bench) -> None:
    """The kubelet does not say for which pod it calls Allocate."""
    asks: list[Json] = [{"gpu_mem": 7}, {"gpu": 10}, {"memory": "6Gi"}, {"core": 10, "memory": "6Gi"}]
    pods = [asking(f"p{i}", **asks[i % 4]) for i in range(8)] + [share(f"m{i}", core=10, mib=6000) for i in range(3)]
    for pod in pods:
        bench.create(pod)
    for pod in pods:
        bench.exact(pod["metadata"]["name"])
    assert bench.within_capacity()


def test_gpushare_counted_in_mib_works_as_in_gib(tmp_path: Path) -> None:
    """The node offers 655,360 MiB, more than the kubelet accepts as device ids."""
    config = tmp_path / "mgpu.yaml"
    config.write_text("dialects: {gpushare: {memoryUnit: MiB}}")
    with patient(make_nodes(1, 8), config=config) as cluster:
        bench = Bench(cluster)
        for name, mib in (("small", 1), ("seed", 8138), ("most", 81920)):
            bench.create(asking(name, gpu_mem=mib))
            bench.exact(name)
            assert bench.environment(name, "c")["ALIYUN_COM_GPU_MEM_CONTAINER"] == str(mib)
        assert allocatable(bench, "node-1")["aliyun.com/gpu-mem"] == str(8 * 81920)
        assert (bench.sees("small"), bench.sees("seed")) == ({"c": [0]}, {"c": [0]})
        bench.create(asking("larger", gpu_mem=81921))
        assert "8 cards: " in bench.waits("larger")
        bench.close()
