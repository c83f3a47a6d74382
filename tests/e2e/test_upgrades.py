"""All processes are started again with other settings, and with the former ones: who has cards keeps exactly those."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.cluster import Cluster
from playground.nodes import make_nodes
from tests.e2e.bench import Bench, asking, share
from tests.e2e.clusters import patient
from tests.waiting import until

BEFORE = "cardPolicy: binpack"
AFTER = "{cardPolicy: spread, dialects: {gpushare: {memoryUnit: MiB}, koordinator: {enabled: false}}}"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "mgpu.yaml"
    file.write_text(BEFORE)
    return file


@pytest.fixture(scope="module")
def cluster(settings: Path) -> Iterator[Cluster]:
    with patient(make_nodes(1, 4), config=settings) as made:
        yield made


def restart(cluster: Cluster) -> None:
    """As a rollout does it, without its surge."""
    for process in cluster.processes.values():
        process.terminate()
    for process in cluster.processes.values():
        process.stop()
        process.start()
    for name in cluster.processes:
        cluster.wait_ready(name)


def used(bench: Bench) -> list[tuple[int, int]]:
    """(core, memory) held of each card."""
    return [(state.core_used, state.memory_used) for state in bench.samples.states()["node-1"]]


def environments(bench: Bench, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [bench.environment(name, "c") for name in names]


def test_other_settings_and_the_former_ones_leave_who_has_cards_alone(bench: Bench, settings: Path) -> None:
    names = ("mgpu", "gpushare", "koordinator")
    for pod in (share("mgpu"), asking("gpushare", gpu_mem=16), asking("koordinator", gpu=25)):
        bench.create(pod)
        bench.exact(pod["metadata"]["name"])
    before, held = environments(bench, names), used(bench)
    assert sum(core for core, _ in held) == 550
    settings.write_text(AFTER)
    restart(bench.cluster)
    assert used(bench) == held
    for name in names:
        bench.cluster.kubelets["node-1"].restart_container("default", name, "c")
        bench.exact(name)
    assert environments(bench, names) == before
    in_use = [i for i, (core, _) in enumerate(used(bench)) if core]
    bench.create(share("spread"))
    bench.exact("spread")
    assert bench.cards("spread")["c"][0] not in in_use
    bench.create(asking("unserved", gpu=25))
    why = "no koordinator.sh/gpu, which mgpu does not serve: dialects.koordinator.enabled is false"
    assert why in bench.waits("unserved")
    settings.write_text(BEFORE)
    restart(bench.cluster)
    until(lambda: "create the pod again" in bench.waits("unserved"))
    bench.delete("unserved")
    bench.create(asking("unserved", gpu=25))
    bench.exact("unserved")
    for name in (*names, "spread"):
        bench.exact(name)
    assert environments(bench, names) == before
    in_use = [i for i, (core, _) in enumerate(used(bench)) if core]
    bench.create(share("binpack"))
    bench.exact("binpack")
    assert bench.cards("binpack")["c"][0] in in_use
    bench.create(asking("again", gpu_mem=16))
    assert "Insufficient aliyun.com/gpu-mem" in bench.waits("again")  # until what was counted in MiB is drained
    bench.delete("gpushare")
    bench.exact("again")
    assert bench.environment("again", "c")["ALIYUN_COM_GPU_MEM_CONTAINER"] == "16"
    assert bench.within_capacity()
