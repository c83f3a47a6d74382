"""Whatever the agent of one node writes, the scheduler's costs are limited, and other nodes are not affected."""

import json
import time
import tracemalloc
from typing import Any

import pytest

from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.device_object import MAX_GPUS, write_device
from mgpu.model.pods import Node
from mgpu.settings import Settings, load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import ObjectWarning
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.filter import Filter
from scheduler.decisions.scores import Ranking
from scheduler.engine.arrays.node_table import WIDTH
from scheduler.engine.learning.node_board import NodeBoard
from scheduler.engine.learning.shapes import NodeClass
from scheduler.engine.node_assessment import assess, score
from tests import builders as b

NODES = 300
NAMES = [f"n{i}" for i in range(NODES)]
MIB = 1 << 20


def device(name: str, cards: int) -> dict[str, Any]:
    return write_device(Node(name), "", b.cards(cards, node=name))


def cluster_of(nodes: int, settings: Settings, *, cards: int = 8) -> ClusterCache:
    state = ClusterCache(settings)
    for i in range(nodes):
        state.node_changed(b.node(f"n{i}"))
        state.device_changed(device(f"n{i}", cards))
    state.refresh()
    return state


def waiting(state: ClusterCache, core: int) -> GpuPod:
    raw = b.pod("asked", b.container("c", core, 256))
    state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})
    known = state.gpu_pod("uid-asked")
    assert known is not None
    return known


def test_device_with_too_many_gpus_leaves_the_last_one_in_force() -> None:
    state = cluster_of(1, load_settings())
    for count in (MAX_GPUS + 1, 1024):
        state.device_changed(device("n0", count))
        assert len(state.node_snapshot("n0", "").cards) == 8
    state.device_changed(device("n0", MAX_GPUS))
    assert len(state.node_snapshot("n0", "").cards) == MAX_GPUS


def test_widest_node_does_not_widen_the_arrays() -> None:
    """With 5,000 nodes, 1,024 rows in one Device made 4 MiB of arrays 448."""
    state = cluster_of(NODES, load_settings())
    tracemalloc.start()
    try:
        state.device_changed(device("n7", MAX_GPUS))
        state.refresh()
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < MIB / 4, used
    assert peak < MIB, peak


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_filter_and_scores_of_a_wide_node_are_those_of_the_engine(policy: str) -> None:
    settings = load_settings(f"nodePolicy: {policy}")
    state = cluster_of(4, settings)
    state.device_changed(device("n1", WIDTH))
    state.device_changed(device("n2", WIDTH + 1))
    known = waiting(state, 40)
    names = [f"n{i}" for i in range(4)]
    filter_ = Filter(state, settings)
    assert filter_.filter(known, names).passed == names
    for name, extender_scores in zip(names, filter_.scores(known, names), strict=True):
        view = state.node_snapshot(name, "")
        assert known.request is not None
        assert view.node is not None
        found = assess(known.request, view.node, view.cards, settings)
        assert extender_scores == score(known.request, found, view.cards, settings)  # type: ignore[arg-type]
    state.device_changed(device("n2", 8))
    assert filter_.filter(known, names).passed == names


@pytest.mark.parametrize("policy", LEARNING_POLICIES)
def test_ranking_of_a_wide_node_does_not_widen_the_board(policy: str) -> None:
    settings = load_settings(f"nodePolicy: {policy}\ncardPolicy: {policy}")
    state = cluster_of(3, settings)
    state.device_changed(device("n1", MAX_GPUS))
    known = waiting(state, 40)
    state.forecast.refresh()
    ranking = Ranking(state, settings)
    ranking.refresh()
    extender_scores = ranking.points(known, ["n0", "n1", "n2"])
    assert extender_scores is not None
    assert min(extender_scores) >= 0
    assert max(extender_scores) == 10
    assert ranking._field.board._free.shape[1] <= 8
    assert ranking.points(known, ["n1"]) == [10]


def test_board_forgets_classes_without_nodes() -> None:
    board = NodeBoard()
    plain = NodeClass(1000, 1 << 30, 1, "A100", 1 << 30)
    board.put(0, plain, 1000, 1 << 30, [1000])
    for i in range(5_000):
        board.put(1, NodeClass(1000, 1 << 30, 1, f"model-{i}", 1 << 30), 1000, 1 << 30, [500])
    rows = board.rows([0, 1])
    assert len(rows.classes) < 200
    assert [rows.classes[kind] for kind in rows.class_index.tolist()] == [plain, plain._replace(model="model-4999")]


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"id": "G" * 1000}, "id"),
        ({"labels": {"node.koordinator.sh/gpu-model": "A" * 1000}}, "labels[node.koordinator.sh/gpu-model]"),
        ({"minor": 10**30}, "minor"),
    ],
)
def test_device_with_an_oversized_attribute_is_rejected(row: dict[str, Any], path: str) -> None:
    told: list[str] = []
    state = ClusterCache(load_settings())
    state.subscribe(ObjectWarning, lambda event: told.append(f"{event.reason} {event.message}"))
    state.node_changed(b.node("n0"))
    raw = device("n0", 1)
    raw["spec"]["devices"][0] |= row
    state.device_changed(raw)
    assert state.node_snapshot("n0", "").cards == ()
    assert told
    assert told[0].startswith(f"BadDevice Ignoring invalid Device n0: spec.devices[0].{path}: ")


def test_device_that_reports_too_many_pods_is_rejected_in_bounded_time() -> None:
    state = cluster_of(1, load_settings())
    row = {"containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ["0"]}
    raw = device("n0", 8)
    raw["metadata"]["annotations"] = {CHECKPOINTS: json.dumps([{**row, "podUID": f"u{i}"} for i in range(3_000)])}
    began = time.process_time()
    state.device_changed(raw)
    assert time.process_time() - began < 1
    assert state.holdings() == ()


def test_node_stores_no_foreign_annotations_and_too_many_labels_are_rejected() -> None:
    state = cluster_of(1, load_settings())
    raw = b.node("n0")
    raw["metadata"]["annotations"] = {"other.io/a": "x" * 100_000, "mgpu.io/a": "b"}
    state.node_changed(raw)
    (node,) = state.nodes(["n0"])
    assert node is not None
    assert node.annotations == {"mgpu.io/a": "b"}
    raw["metadata"]["labels"] = {f"a.io/{i}": "x" * 60 for i in range(6_000)}
    with pytest.raises(Exception, match=r"metadata\.labels: has \d+ characters"):
        state.node_changed(raw)


@pytest.mark.parametrize(
    ("cards", "slices", "why"),
    [(65, 1, "has 65 cards"), (1, 49, "has 49 slices, but a card"), (64, 48, "has 3072 slices, but a node")],
)
def test_node_with_too_many_slices_is_rejected(cards: int, slices: int, why: str) -> None:
    told: list[str] = []
    state = ClusterCache(load_settings())
    state.subscribe(ObjectWarning, lambda event: told.append(f"{event.reason} {event.message}"))
    raw = b.node("n0")
    raw["metadata"]["labels"] = {"gpu.partitioning": "mps"}
    rows = {str(i): [{"profile": "1gb", "start": start} for start in range(slices)] for i in range(cards)}
    raw["metadata"]["annotations"] = {"mgpu.io/slices": json.dumps({"cards": rows})}
    state.node_changed(raw)
    assert len(told) == 1
    assert told[0].startswith("BadSlices")
    assert why in told[0]
    counted = {f"status-gpu-{i}-1gb-free": slices for i in range(cards)}
    raw["metadata"]["annotations"] = {"dynamicgpuslice": json.dumps(counted)}
    state.node_changed(raw)
    assert len(told) == 2
