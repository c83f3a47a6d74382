"""Tests slices end to end: the plan, the partitioning of the card and the pod on the slice."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client import ApiException
from rich.console import Console

from mgpu.model import node_slices
from mgpu.model.node_slices import NodeSlices, read_slices
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MIG, MPS
from mgpu.settings import load_settings
from playground import container_runtime, nvml_state
from playground.cluster import Cluster
from playground.demo import Demo
from playground.nodes import MGPU, NodeSpec
from playground.samples import example
from tests.e2e.bench import Bench, Json, asking, share
from tests.e2e.clusters import patient
from tests.waiting import until

A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory": "80Gi"}
NODES = [
    NodeSpec("mig-1", [{**A100, "count": 2}], dict(MGPU), partitioning=MIG),
    NodeSpec("mps-1", [{**A100, "count": 2}], dict(MGPU), partitioning=MPS),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient(NODES) as made:
        yield made


@pytest.fixture
def sliced(bench: Bench) -> Iterator["Sliced"]:
    """The slices of a cluster without pods, whose cards are not partitioned."""
    made = Sliced(bench)
    for node in NODES:
        made.uncut(node.name)
    yield made
    bench.clear()
    until(lambda: not any(s.pod for node in NODES for s in made.said(node.name).existing))


class Sliced:
    """Creates and reads pods with slices, through a `Bench`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def create(self, name: str, slice_: str, count: int = 1) -> None:
        limits = {f"nvidia.com/{slice_}": str(count)}
        own = {"name": "c", "image": "cuda", "resources": {"limits": limits}}
        self.bench.create(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [own]}}
        )

    def runs(self, name: str, slice_: str, count: int = 1) -> list[str]:
        """Return the places, `card:start`, of a pod with these slices as soon as it runs; create it if necessary."""
        if name not in self.bench.names():
            self.create(name, slice_, count)
        self.bench.runs(name)
        return self.exact(name)

    def exact(self, name: str) -> list[str]:
        pod, env = self.bench.pod(name), self.bench.environment(name, "c")
        ((_, given),) = json.loads(pod.metadata.annotations["mgpu.io/slices-given"]).items()
        places = sorted(place for of in given.values() for place in of)
        there = self.devices(pod.spec.node_name)
        assert sorted(env["NVIDIA_VISIBLE_DEVICES"].split(",")) == sorted({there[place] for place in places})
        return places

    def devices(self, node: str) -> dict[str, str]:
        """Return place → the UUID that a container sees, from NVML; on an MPS node the UUID of the card."""
        if node.startswith("mps"):
            return {f"{s.card}:{s.start}": f"GPU-{node}-{s.card}" for s in self.said(node).existing}
        modes = nvml_state.read_state(self.bench.cluster.nvml_state(node)).cards
        return {
            f"{card.rpartition('-')[2]}:{gpu.start}": gpu.compute[0].uuid
            for card, mode in modes.items()
            for gpu in mode.instances
        }

    def said(self, node: str) -> NodeSlices:
        return read_slices(read_node(self.node(node)))

    def node(self, node: str) -> Json:
        return self.bench.cluster.api.get(f"/api/v1/nodes/{node}")

    def settled(self, node: str) -> NodeSlices:
        """Return the slices that the node reports, as soon as no plan is pending."""
        return until(lambda: None if (said := self.said(node)).has_pending_plan else said)

    def uncut(self, node: str) -> None:
        """Remove all slices with a manual plan, as an administrator does."""
        said = self.settled(node)
        if said.existing:
            plan = (said.partitioning.plan or 0) + 1
            text = node_slices.with_spec(self.node(node)["metadata"]["annotations"][node_slices.ANNOTATION], {}, plan)
            self.bench.cluster.api.patch(
                f"/api/v1/nodes/{node}", {"metadata": {"annotations": {node_slices.ANNOTATION: text}}}
            )
            assert self.settled(node).existing == ()


def test_an_uncut_a100_is_cut_for_the_pod_that_asks_for_a_slice(sliced: Sliced) -> None:
    (place,) = sliced.runs("first", "mig-2g.20gb")
    found = until(lambda: [s for s in sliced.settled("mig-1").existing if s.pod])
    assert [(f"{s.card}:{s.start}", s.name) for s in found] == [(place, "2g.20gb")]
    env = sliced.bench.environment("first", "c")
    assert (env["MGPU_SLICES"], env["MGPU_MEMORY_BYTES"]) == ("2g.20gb", str(20 << 30))
    counts = json.loads(sliced.node("mig-1")["metadata"]["annotations"][node_slices.ANNOTATION])
    assert counts["spec-partitioning-plan"] == counts["status-partitioning-plan"]
    assert counts["status-gpu-0-2g.20gb-used"] == 1


def test_free_slices_are_cut_anew_and_what_is_used_stays_untouched(sliced: Sliced) -> None:
    (first,) = sliced.runs("first", "mig-2g.20gb")
    before = sliced.devices("mig-1")[first]
    for name, slice_ in (("second", "mig-3g.40gb"), ("third", "mig-3g.40gb"), ("fourth", "mig-2g.20gb")):
        sliced.runs(name, slice_)
    assert sliced.devices("mig-1")[first] == before
    assert sliced.exact("first") == [first]
    until(lambda: sum(bool(s.pod) for s in sliced.settled("mig-1").existing) == 4)


def test_several_slices_of_one_container(sliced: Sliced) -> None:
    places = sliced.runs("several", "mig-1g.10gb", 3)
    assert len({*places}) == 3
    assert sliced.bench.environment("several", "c")["MGPU_SLICES"] == "1g.10gb,1g.10gb,1g.10gb"


def test_what_never_fits_waits_and_says_why_and_nothing_is_cut_for_it(sliced: Sliced) -> None:
    sliced.runs("half", "mig-4g.40gb")
    sliced.runs("other", "mig-4g.40gb")
    plan = sliced.settled("mig-1").partitioning.plan
    sliced.create("whole", "mig-7g.80gb")
    why = sliced.bench.waits("whole")
    assert "4g.40gb in use at 0: no room for 7g.80gb" in why
    assert "node label gpu.partitioning is mps, not mig" in why
    assert sliced.said("mig-1").partitioning.plan == plan
    sliced.bench.delete("half")
    sliced.bench.delete("other")
    sliced.runs("whole", "mig-7g.80gb")


def test_a_share_under_mps_has_its_limits_and_its_daemon(sliced: Sliced) -> None:
    bench = sliced.bench
    (place,) = sliced.runs("client", "gpu-4gb")
    env = bench.environment("client", "c")
    text = bench.core.read_namespaced_pod_log("client", "default", container="c")
    folder = bench.cluster.folder / "mps-1" / "mps"
    pipe = folder / f"GPU-mps-1-{place[0]}" / "pipe"
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(pipe)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4G"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "5"
    assert f"{pipe} → {pipe}" in text
    assert f"{folder / 'shm'} → /dev/shm" in text
    assert (pipe / "control").exists()
    config = bench.cluster.api.get("/api/v1/namespaces/mgpu-system/configmaps/mps-configmap")["data"]["mps-1"]
    assert "rename: gpu-4gb" in config


def test_other_pods_get_no_divided_card(sliced: Sliced) -> None:
    bench = sliced.bench
    (place,) = sliced.runs("client", "gpu-4gb")
    whole = int(place[0]) ^ 1
    bench.create(share("share"))
    bench.exact("share")
    assert bench.cards("share") == {"c": [whole]}
    bench.create(asking("gpu", nvidia=1))
    why = bench.waits("gpu")
    assert "1 in use, but a whole card is requested" in why
    sliced.create("more", "gpu-80gb")
    assert "in use by pods that request no slice" in bench.waits("more")


@pytest.mark.parametrize("name", ["mig", "mps"])
def test_the_demo_shows_plan_slice_and_limits(sliced: Sliced, name: str) -> None:
    output = io.StringIO()
    demo = Demo(sliced.bench.cluster, Console(file=output, width=200), load_settings())
    demo.show_placed(example(name))
    assert demo.problems == []
    told = output.getvalue()
    if name == "mig":
        assert "card 0, not partitioned before, into 5 × 1g.10gb and 2g.20gb" in told
        assert "train: NVIDIA_VISIBLE_DEVICES=MIG-" in told
    else:
        assert "serve on 4gb of card 0" in told
        assert "NVIDIA_VISIBLE_DEVICES=GPU-mps-1-0, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4G" in told


def test_the_demo_notices_a_wrong_slice(sliced: Sliced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "playground.container_runtime.resolve", lambda *_: container_runtime.Edits({"NVIDIA_VISIBLE_DEVICES": "GPU-x"})
    )
    demo = Demo(sliced.bench.cluster, Console(file=io.StringIO()), load_settings())
    demo.show_placed(example("mig"))
    assert any("container train must see NVIDIA_VISIBLE_DEVICES=MIG-" in problem for problem in demo.problems)


@pytest.mark.parametrize("process", ["deviceplugin-mig-1", "scheduler"])
def test_whoever_is_killed_in_the_middle_of_a_plan_goes_on_with_it(sliced: Sliced, process: str) -> None:
    (before,) = sliced.runs("before", "mig-1g.10gb")
    uuid = sliced.devices("mig-1")[before]
    plan = sliced.settled("mig-1").partitioning.plan
    sliced.create("p", "mig-3g.40gb", 2)
    until(lambda: sliced.said("mig-1").partitioning.plan != plan)
    sliced.bench.cluster.processes[process].kill()
    sliced.bench.cluster.restart(process)
    sliced.runs("p", "mig-3g.40gb")
    assert sliced.devices("mig-1")[before] == uuid
    assert sliced.exact("before") == [before]


def test_a_pod_with_a_node_is_decided_late(sliced: Sliced) -> None:
    own: Any = {"name": "c", "image": "cuda", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    spec = {"containers": [own], "nodeName": "mig-1"}
    sliced.runs("there", "mig-1g.10gb")
    sliced.bench.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "late"}, "spec": spec})
    sliced.runs("late", "mig-1g.10gb")


def test_more_than_one_share_is_denied_with_the_field(sliced: Sliced) -> None:
    with pytest.raises(ApiException) as refused:
        sliced.create("two", "gpu-4gb", 2)
    status = json.loads(refused.value.body or "")
    assert status["details"]["causes"][0]["field"] == "spec.containers[0].resources.requests[nvidia.com/gpu-4gb]"
