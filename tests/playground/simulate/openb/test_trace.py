"""The trace's CSV files, right and wrong."""

from pathlib import Path

import pytest

from mgpu.model.errors import BadObject
from playground.simulate.openb.trace import Trace, demand, read_trace
from scheduler.engine.learning.shapes import NodeClass, Shape
from tests.playground.simulate.openb.traces import NODES, PODS, written

MIB = 1 << 20


def test_read_trace_returns_nodes_and_pods(trace: Trace) -> None:
    assert trace.nodes[0] == NodeClass(16000, 65536 * MIB, 2, "T4")
    assert trace.nodes[3] == NodeClass(8000, 32768 * MIB, 0)
    assert trace.capacity == 10_000
    assert trace.pods[0] == Shape(1000, 1024 * MIB, 1, 300)
    assert trace.pods[4] == Shape(4000, 4096 * MIB, 2, 1000, models=("G2", "V100M16"))
    assert trace.pods[5] == Shape(3000, 1024 * MIB)
    assert [demand(pod) for pod in trace.pods] == [300, 700, 1000, 500, 2000, 0]


def test_read_trace_ignores_column_order_and_blank_lines(tmp_path: Path, trace: Trace) -> None:
    shuffled = ["\ufeff" + "qos,gpu_spec , gpu_milli,num_gpu,memory_mib,cpu_milli"]
    for line in PODS.splitlines()[1:]:
        _, cpu, memory, cards, milli, spec, qos = line.split(",")
        shuffled += ["", f'"{qos}",{spec}, {milli} ,{cards},{memory},{cpu}']
    assert read_trace(*written(tmp_path, NODES, "\r\n".join(shuffled))) == trace


def test_read_trace_without_models_binds_no_pod(tmp_path: Path, trace: Trace) -> None:
    pods = "\n".join(",".join(line.split(",")[:5]) for line in PODS.splitlines())
    free = read_trace(*written(tmp_path, NODES, pods)).pods
    assert free == tuple(pod._replace(models=()) for pod in trace.pods)


def test_read_trace_ignores_models_of_pods_without_cards(tmp_path: Path) -> None:
    assert read_trace(*written(tmp_path, NODES, PODS + "p7,1,1,0,0,T4,BE\n")).pods[-1] == Shape(1, MIB)


POD = "p7,1000,1024,1,500,,LS"


@pytest.mark.parametrize(
    ("nodes", "pods", "said"),
    [
        ("", PODS, "nodes.csv: line 1: row: is missing"),
        (NODES, PODS.splitlines()[0], "pods.csv: line 2: row: is missing"),
        (NODES.replace("gpu,", "gpus,"), PODS, "nodes.csv: line 1: gpu: is missing in the header"),
        (NODES.replace("sn", "gpu"), PODS, "nodes.csv: line 1: gpu: is in the header more than once"),
        (NODES.replace(",2,T4", ",2000,T4"), PODS, "nodes.csv: line 2: gpu: must be a whole number from 0 to 256"),
        (NODES.replace("T4", "T4|G2"), PODS, "nodes.csv: line 2: model: must be one model"),
        (NODES.replace(",2,", ",0,").replace(",4,", ",0,"), PODS, "nodes.csv: gpu: no node has a GPU"),
        (NODES, PODS + POD.replace("1000", "-1"), "pods.csv: line 8: cpu_milli: must be a whole number"),
        (NODES, PODS + POD.replace("1000", "NaN"), "pods.csv: line 8: cpu_milli: must be a whole number"),
        (NODES, PODS + POD.replace("1000", "1e3"), "pods.csv: line 8: cpu_milli: must be a whole number"),
        (NODES, PODS + POD.replace("1000", "1" * 5000), "pods.csv: line 8: cpu_milli: must be a whole number"),
        (NODES, PODS + POD.replace("1000", "١"), "pods.csv: line 8: cpu_milli: must be a whole number"),
        (NODES, PODS + POD.replace("1024", ""), "pods.csv: line 8: memory_mib: must be a whole number"),
        (NODES, PODS + POD.replace("500", "1001"), "gpu_milli: must be a whole number from 1 to 1000, not '1001'"),
        (NODES, PODS + POD.replace("500", "0"), "gpu_milli: must be a whole number from 1 to 1000, not '0'"),
        (NODES, PODS + POD.replace("1,500", "0,500"), "gpu_milli: must be a whole number from 0 to 0, not '500'"),
        (NODES, PODS + "p7,1000", "pods.csv: line 8: num_gpu: must be a whole number"),
        (NODES, PODS + POD + ",more", "pods.csv: line 8: row: has 8 cells where the header has 7"),
        (NODES, PODS + '"p7', "pods.csv: line 8: row: is not CSV"),
        (NODES, PODS.splitlines()[0] + "\np6,3000,1024,0,0,,BE\n", "pods.csv: num_gpu: no pod requests a GPU"),
    ],
)
def test_read_trace_error_names_file_line_and_column(tmp_path: Path, nodes: str, pods: str, said: str) -> None:
    with pytest.raises(BadObject) as error:
        read_trace(*written(tmp_path, nodes, pods))
    assert said in str(error.value)
    assert len(str(error.value)) < 250


def test_read_trace_of_unreadable_file_is_refused(tmp_path: Path) -> None:
    nodes, pods = written(tmp_path)
    with pytest.raises(BadObject, match=r"none\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "none.csv", pods)
    nodes.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadObject, match=r"nodes\.csv: is not text in UTF-8"):
        read_trace(nodes, pods)
