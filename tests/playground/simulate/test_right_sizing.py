"""`mgpu simulate right-sizing`: the share that each workload needs, and what would fit then."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mgpu import dialects
from mgpu.cli.main import main
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, whole_cards
from mgpu.model.pods import read_pod
from mgpu.settings import load_settings
from playground.simulate.documents import Document
from playground.simulate.pipeline import Simulation
from playground.simulate.right_sizing.recorded_use import RecordedUse, Series
from playground.simulate.right_sizing.workloads import Amounts, Owner, Workload, needs_of, owner_of, resized
from playground.simulate.world import read_world
from tests import builders as b
from tests.playground.simulate.simulation import served

GIB = 1 << 30
Raw = dict[str, Any]
HASH = "7d9f8c6b5"
CARD = b.card(0)
SETTINGS = load_settings()


def owned(raw: Raw, kind: str = "ReplicaSet", name: str = f"web-{HASH}", hash_: str = HASH) -> Raw:
    raw["metadata"]["ownerReferences"] = [
        {"kind": "Node", "name": "n1"},
        {"kind": kind, "name": name, "controller": True},
    ]
    raw["metadata"]["labels"] = {"pod-template-hash": hash_} if hash_ else {}
    return raw


def runs(name: str, core: int = 50, gib: int = 40, card: int = 0, **more: Any) -> Raw:
    annotations = {"vke.volcengine.com/gpu-index-container-c": str(card), "vke.volcengine.com/assumed": "true"}
    return b.share(name, core, gib * 1024, node="n1", annotations=annotations, phase="Running", **more)


def matrix(values: dict[str, Sequence[float | str]], container: str = "c") -> bytes:
    """An answer of Prometheus with these values of the pods."""
    result = [
        {
            "metric": {"namespace": "default", "pod": pod, "container": container, "uuid": "GPU-0"},
            "values": [[1700000000 + i, str(value)] for i, value in enumerate(row)],
        }
        for pod, row in values.items()
    ]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


def run(folder: Path, objects: Sequence[Raw], *options: str, **files: bytes) -> Result:
    arguments = [*options]
    for name, text in files.items():
        (folder / f"{name}.json").write_bytes(text)
        arguments += [f"--{name}", str(folder / f"{name}.json")]
    return CliRunner().invoke(main, ["simulate", "right-sizing", "-", *arguments], input=yaml.safe_dump_all(objects))


def report(folder: Path, objects: Sequence[Raw], *options: str, **files: bytes) -> Any:
    result = run(folder, objects, "-o", "json", *options, **files)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def cluster() -> list[Raw]:
    """Two nodes of two cards. On n1 four pods of the Deployment `web` hold half a card each."""
    pods = [owned(runs(f"web-{HASH}-bbbb{i}", card=int(i) // 4)) for i in "2467"]
    return [served("n1"), served("n2"), *pods]


def test_pods_are_placed_again_with_the_shares_that_they_need(tmp_path: Path) -> None:
    memory = matrix({f"web-{HASH}-bbbb2": [10 * GIB, *[3 * GIB] * 150], f"web-{HASH}-bbbb4": ["NaN", *[2 * GIB] * 100]})
    sm = matrix({f"web-{HASH}-bbbb2": [0.05] * 99 + [0.9]})
    found = report(tmp_path, cluster(), "--margin", "20", memory=memory, sm=sm)
    (row,) = found["workloads"]
    assert (row["namespace"], row["kind"], row["name"], row["pods"]) == ("default", "Deployment", "web", 4)
    assert row["memory"] == {"requested": 40 * GIB, "p50": 3 * GIB, "p99": 3 * GIB, "max": 10 * GIB, "needed": 12 * GIB}
    assert row["core"] == {"requested": 50, "p50": 5, "p99": 90, "max": 90, "needed": 100}
    found = report(tmp_path, cluster(), "--margin", "20", memory=memory, sm=matrix({f"web-{HASH}-bbbb2": [0.05] * 300}))
    (row,) = found["workloads"]
    assert row["core"] == {"requested": 50, "p50": 5, "p99": 5, "max": 5, "needed": 6}
    assert row["further"] == {"requested": 4, "needed": 20}, "six of 12 GiB fit on a card, and four run"
    assert found["packings"] == {
        "running": {"freeNodes": 1, "freeCards": 2, "unplaced": []},
        "requested": {"freeNodes": 1, "freeCards": 2, "unplaced": []},
        "needed": {"freeNodes": 1, "freeCards": 3, "unplaced": []},
    }


def test_the_text_has_the_same_figures(tmp_path: Path) -> None:
    other = owned(runs("job-bbbbb", 10, 8, 0), "Job", "job", "")
    other["spec"]["nodeName"] = "n2"
    result = run(tmp_path, [*cluster(), other], memory=matrix({f"web-{HASH}-bbbb2": [10 * GIB]}))
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "default/Deployment/web 4 40.0 GiB 10.0 GiB 10.0 GiB 10.0 GiB 12.0 GiB" in lines
    assert "Without recorded use, with their own shares: default/Job/job" in lines
    assert "as it runs 0 1" in lines
    assert "placed again as needed, plus 20% 0 1 0" in lines
    assert "default/Deployment/web 3 3" in lines


def test_pods_that_no_longer_exist_count_for_their_workload(tmp_path: Path) -> None:
    names = {
        f"web-{HASH}-bbbb2": 1,
        "web-55c6b9d4f7-xxxxx": 7,
        "web-other-55c6b9d4f7-xxxxx": 9,
        "web-0": 11,
        "websites-xxxxx": 13,
    }
    found = report(tmp_path, cluster(), memory=matrix({pod: [gib * GIB] for pod, gib in names.items()}))
    assert found["workloads"][0]["memory"]["max"] == 7 * GIB


@pytest.mark.parametrize(
    ("raw", "owner"),
    [
        (b.share("p"), "default/Pod/p"),
        (owned(b.share("p")), "default/Deployment/web"),
        (owned(b.share("p"), name="web", hash_=""), "default/ReplicaSet/web"),
        (owned(b.share("p"), "Job", "night-28391234", ""), "default/CronJob/night"),
        (owned(b.share("p"), "Job", "train-1", ""), "default/Job/train-1"),
        (owned(b.share("p"), "StatefulSet", "db", ""), "default/StatefulSet/db"),
    ],
)
def test_the_owner_is_what_a_user_has_written(raw: Raw, owner: str) -> None:
    assert str(owner_of(raw)) == owner


def need_and_request(request: ContainerRequest, gib: float | None, sm: float | None) -> ContainerRequest:
    """Return what a container gets that has used these amounts."""
    workload = Workload(Owner("default", "Pod", "p"), b.share("p"), GpuRequest("mgpu", (request,)))
    key = Series("default", "p", "c")
    use = RecordedUse({} if gib is None else {key: (gib * GIB,)}, {} if sm is None else {key: (sm,)})
    needs = needs_of([workload], use, 0, CARD)
    return resized(workload, {(need.owner, need.container): need for need in needs}).containers[0]


@pytest.mark.parametrize(
    ("request_", "gib", "sm", "core", "amount"),
    [
        (ContainerRequest("c", core=500, memory=40 * GIB), 10, 0.101, 110, 10 * GIB),
        (ContainerRequest("c", core=500, memory=40 * GIB), None, None, 500, 40 * GIB),
        (ContainerRequest("c", core=500, memory=40 * GIB), 60, 0.0, 10, 60 * GIB),
        (ContainerRequest("c", core=500, memory=40 * GIB), 99, 1.0, 1000, 80 * GIB),
        (ContainerRequest("c", core=0, memory=40 * GIB), 0, 0.5, 0, 1 << 20),
        (ContainerRequest("c", core=500, memory=0), 10, 0.2, 200, 0),
        (ContainerRequest("c", core=500, ratio=50), 10, None, 500, 10 * GIB),
        (ContainerRequest("c", core=500, ratio=50), None, 0.2, 200, 40 * GIB),
        (whole_cards("c", 1), 10, 0.2, 200, 10 * GIB),
        (whole_cards("c", 1), None, 0.2, 200, 80 * GIB),
        (whole_cards("c", 1), 10, None, 1000, 10 * GIB),
    ],
)
def test_what_was_not_recorded_or_is_not_held_stays(
    request_: ContainerRequest, gib: float | None, sm: float | None, core: int, amount: int
) -> None:
    resized_ = need_and_request(request_, gib, sm)
    found = resized_.amount_on(CARD)
    assert (found.core, found.memory) == (core, amount)
    # The percentages of a card must not exceed 100 together, so that of the share is the new one.
    assert found.ratio == (0 if resized_.ratio is None else -(-100 * amount // CARD.memory))
    assert (resized_.ratio is None) == (request_.ratio is None and not request_.whole)


def test_the_containers_of_a_pod_are_sized_one_by_one() -> None:
    requests = tuple(ContainerRequest(name, core=300, memory=20 * GIB) for name in ("a", "b"))
    workload = Workload(Owner("default", "Pod", "p"), b.share("p"), GpuRequest("mgpu", requests))
    needs = needs_of([workload], RecordedUse({Series("default", "p", "b"): (GIB,)}, {}), 100, CARD)
    assert [(need.container, need.used_memory) for need in needs] == [("a", None), ("b", Amounts(GIB, GIB, GIB))]
    found = resized(workload, {(need.owner, need.container): need for need in needs})
    assert [one.memory for one in found.containers] == [20 * GIB, 2 * GIB]


def test_what_has_no_share_stays_where_it_is(tmp_path: Path) -> None:
    plain = b.pod("plain", {"name": "c", "image": "x", "resources": {"requests": {"cpu": "6"}}}, node="n2")
    objects = [*cluster(), plain]
    for raw in objects[:2]:
        raw["status"] = {"allocatable": {"cpu": "8"}}
    for raw in objects[2:6]:
        raw["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    found = report(tmp_path, objects, memory=matrix({f"web-{HASH}-bbbb2": [GIB]}))
    assert found["packings"]["needed"]["unplaced"] == []
    assert found["workloads"][0]["further"] == {"requested": 1, "needed": 1}, "n2 has cpu for one more"


@pytest.mark.parametrize(("core", "gib", "cpu"), [(30, 10, 1), (50, 30, 1), (10, 25, 3), (70, 10, 1), (100, 0, 2)])
def test_the_number_of_further_pods_is_that_of_placing_them_one_by_one(core: int, gib: int, cpu: int) -> None:
    nodes = [served("n1"), served("n2"), served("n3", labels={"vke.node.gpu.schedule": "other"})]
    for raw in nodes:
        raw["status"] = {"allocatable": {"cpu": "8"}}
    world = read_world([Document(raw["metadata"]["name"], raw) for raw in nodes], print, SETTINGS)
    pod = b.pod("p", b.container("c", core, gib * 1024 or None))
    pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = str(cpu)
    request = dialects.read_request(read_pod(pod), SETTINGS)
    assert request is not None
    simulation = Simulation(world, SETTINGS, print)
    simulation.take_in(world)
    assert simulation.place({**pod, "metadata": {**pod["metadata"], "uid": "first"}}, request)
    further = simulation.count_further(pod, request)
    assert simulation.count_further(pod, request) == further, "nothing stays placed"
    placed = 0
    while simulation.place({**pod, "metadata": {**pod["metadata"], "uid": f"further-{placed}"}}, request):
        placed += 1
    assert further == placed > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "must be an answer of Prometheus with a matrix"),
        (b'{"data": {"resultType": "vector", "result": []}}', "must be an answer of Prometheus with a matrix"),
        (b'{"data": {"resultType": "matrix", "result": [{}]}}', "data.result[0].metric: must have the labels"),
        (matrix({"p": []}).replace(b"[]", b"{}"), "data.result[0].values: must be a list"),
        (matrix({"p": ["many"]}), "data.result[0].values[0]: must be [time, value]"),
    ],
)
def test_a_file_that_is_no_answer_of_prometheus_is_an_input_error(tmp_path: Path, text: bytes, message: str) -> None:
    result = run(tmp_path, cluster(), memory=text)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_input_without_use_or_without_cards_is_an_input_error(tmp_path: Path) -> None:
    assert run(tmp_path, cluster()).exit_code == 2
    assert run(tmp_path, [b.node("n1")], memory=matrix({"p": [1]})).exit_code == 2
    (tmp_path / "gone").mkdir()
    result = CliRunner().invoke(main, ["simulate", "right-sizing", "-", "--sm", str(tmp_path / "gone")], input="")
    assert (result.exit_code, "cannot be read" in result.output) == (2, True)
