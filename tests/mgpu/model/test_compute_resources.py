"""What a pod reserves of its node: KEP-753 (sidecars), KEP-2837 (pod-level resources), overhead, limits as defaults."""

from typing import Any

import pytest

from mgpu.model.compute_resources import MAX_PER_POD, NO_CPU_MEMORY, UNBOUNDED, CpuMemory, requests_of
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_node, read_pod
from mgpu.model.quantities import MAX_QUANTITY, QuantityError
from tests.builders import node


def a_pod(*requests: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **spec: Any) -> dict[str, Any]:
    rows = [{"name": f"c{i}", "resources": {"requests": r}} for i, r in enumerate(requests)]
    return {"metadata": {"name": "p"}, "spec": {"containers": rows, "initContainers": list(init), **spec}}


def starting(name: str, cpu: str, *, sidecar: bool = False) -> dict[str, Any]:
    more = {"restartPolicy": "Always"} if sidecar else {}
    return {"name": name, "resources": {"requests": {"cpu": cpu}}, **more}


@pytest.mark.parametrize(
    ("pod", "cpu"),
    [
        pytest.param(a_pod({"cpu": "500m"}, {"cpu": "1"}), 1500, id="app containers add up"),
        pytest.param(a_pod({"cpu": "1"}, init=(starting("i", "3"),)), 3000, id="an init container runs alone"),
        pytest.param(
            a_pod({"cpu": "1"}, init=(starting("i", "3"), starting("j", "2"))), 3000, id="init containers take turns"
        ),
        pytest.param(
            a_pod({"cpu": "1"}, init=(starting("s", "1", sidecar=True), starting("i", "3"))),
            4000,
            id="an init container runs beside the sidecars before it",
        ),
        pytest.param(
            a_pod({"cpu": "1"}, init=(starting("i", "3"), starting("s", "2", sidecar=True))),
            3000,
            id="a sidecar runs beside the app containers",
        ),
        pytest.param(
            a_pod({"cpu": "1"}, init=(starting("s", "2", sidecar=True), starting("t", "3", sidecar=True))),
            6000,
            id="all sidecars run beside the app containers",
        ),
        pytest.param(a_pod({"cpu": "1"}, overhead={"cpu": "250m"}), 1250, id="overhead comes on top"),
        pytest.param(a_pod({"cpu": "1"}, resources={"requests": {"cpu": "5"}}), 5000, id="pod-level requests win"),
        pytest.param(
            a_pod({"cpu": "4"}, resources={"requests": {"cpu": "2"}}), 2000, id="pod-level requests win when smaller"
        ),
        pytest.param(
            a_pod({"cpu": "4"}, resources={"requests": {"cpu": "2"}}, overhead={"cpu": "1"}),
            3000,
            id="overhead on top of pod-level requests",
        ),
        pytest.param(
            a_pod({"cpu": "1"}, resources={"limits": {"cpu": "5"}}), 1000, id="a pod-level limit is no request"
        ),
        pytest.param(a_pod({}, resources={"limits": {"cpu": "5"}}), 5000, id="but where no container requests any"),
        pytest.param({"spec": {"containers": [{"resources": {"limits": {"cpu": "2"}}}]}}, 2000, id="limits default"),
        pytest.param(a_pod({"cpu": "100u"}), 1, id="rounded up"),
    ],
)
def test_requests_of(pod: dict[str, Any], cpu: int) -> None:
    assert requests_of(pod)["cpu"] == cpu
    assert read_pod(pod).cpu_memory.cpu == cpu


def test_pods_count_and_other_resources_too() -> None:
    raw = a_pod({"memory": "1Gi", "x/y": 2})
    assert requests_of(raw) == {"memory": 1 << 30, "x/y": 2, "pods": 1}
    assert read_pod(raw).cpu_memory == CpuMemory(0, 1 << 30)


def test_the_room_of_a_node() -> None:
    raw = node()
    raw["status"]["allocatable"] |= {"cpu": "63500m"}
    assert read_node(raw).allocatable == CpuMemory(63_500, 256 << 30)
    del raw["status"]["allocatable"]
    assert read_node(raw).allocatable == CpuMemory(64_000, 256 << 30)
    assert read_node({"metadata": {"name": "n"}}).allocatable == UNBOUNDED


def test_what_is_left_of_a_room() -> None:
    assert CpuMemory(1000, 10).minus(CpuMemory(300, 20)) == CpuMemory(700, 0)
    assert CpuMemory(1000, MAX_QUANTITY).minus(CpuMemory(300, 20)) == CpuMemory(700, MAX_QUANTITY)


def test_an_amount_that_is_none_is_the_api_servers_to_refuse() -> None:
    raw = a_pod({"cpu": "much"})
    assert read_pod(raw).cpu_memory == NO_CPU_MEMORY
    with pytest.raises(QuantityError, match="cpu: 'much'"):
        requests_of(raw)
    assert read_node({"status": {"allocatable": {"cpu": "much"}}}).allocatable == UNBOUNDED


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"overhead": {"cpu": []}}, "spec.overhead[cpu]"),
        ({"resources": {"requests": []}}, "spec.resources.requests"),
    ],
)
def test_what_is_of_a_wrong_type_is_named(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(BadObject) as error:
        read_pod({"metadata": {"name": "p"}, "spec": spec})
    assert [problem.field for problem in error.value.problems] == [path]


def test_pod_that_asks_for_more_than_any_node_has_needs_a_bounded_amount() -> None:
    """An API server stores 9E of cpu, which is 9e21 milli, for each container."""
    raw = a_pod({"cpu": "9E", "memory": "9E"}, {"cpu": "9E", "memory": "9E"}, overhead={"cpu": "9E"})
    assert read_pod(raw).cpu_memory == CpuMemory(MAX_PER_POD, MAX_PER_POD)


def test_node_that_reports_more_cpu_than_64_bits_hold_has_no_bound_of_it() -> None:
    raw = node()
    raw["status"]["allocatable"]["cpu"] = "9E"
    assert read_node(raw).allocatable.cpu == MAX_QUANTITY
