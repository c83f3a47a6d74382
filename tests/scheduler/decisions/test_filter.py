"""The filter answers for all nodes at once as the engine does for each, and follows changes of the cache."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.device_object import write_device
from mgpu.model.gpu_requests import Placement, RejectionKind
from mgpu.model.pods import Node, read_node
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.decisions.filter import Filter
from scheduler.engine.node_assessment import assess, score
from tests import builders as b
from tests.examples import examples

SAME, SPREAD, MODELS = "mgpu.io/same-card-group", "mgpu.io/spread-group", "mgpu.io/card-models"
EXCLUDED, UUIDS = "mgpu.io/exclude-card-models", "mgpu.io/card-uuids"
PACKED, SPREAD_OUT = load_settings(), load_settings("nodePolicy: spread")
MODEL_NAMES = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100", "Tesla T4"]

grouped = st.fixed_dictionaries({}, optional={SAME: st.just("pair"), SPREAD: st.just("web")})
held = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([10, 40, 90]), grouped), max_size=3)
nodes = st.lists(
    st.tuples(st.lists(st.tuples(st.sampled_from(MODEL_NAMES), st.booleans()), max_size=3), held),
    min_size=1,
    max_size=4,
)
constraints = st.fixed_dictionaries(
    {},
    optional={
        SAME: st.just("pair"),
        SPREAD: st.just("web"),
        MODELS: st.sampled_from(["A100", "H100, T4", "L40S"]),
        EXCLUDED: st.sampled_from(["Tesla", "A100-SXM4,L4"]),
        UUIDS: st.sampled_from(["GPU-n0-0", "GPU-n1-1,GPU-n0-2", "GPU-x"]),
    },
)
cores = st.sampled_from([[20], [60], [100], [30, 50], [60, 60]])
Nodes = list[tuple[list[tuple[str, bool]], list[tuple[int, int, dict[str, str]]]]]


def put(state: ClusterCache, raw: dict[str, Any]) -> None:
    state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})


def filled(made: Nodes, settings: Any) -> ClusterCache:
    state = ClusterCache(settings)
    for i, (listed, pods) in enumerate(made):
        name = f"n{i}"
        cards = [replace(b.card(j, healthy=ok, node=name), model=model) for j, (model, ok) in enumerate(listed)]
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", cards))
        for k, (card, core, groups) in enumerate(pods):
            record = {"vke.volcengine.com/gpu-index-container-c": str(card)}
            put(state, b.share(f"{name}-{k}", core, annotations={**groups, **record}, node=name))
    return state


def request_pod(listed: list[int], annotations: dict[str, str]) -> GpuPod:
    containers = [b.container(f"c{i}", core, None if core >= 100 else 1024) for i, core in enumerate(listed)]
    known = read_gpu_pod(b.pod("p", *containers, annotations=annotations), PACKED)
    assert known is not None
    return known


@pytest.mark.parametrize("settings", [PACKED, SPREAD_OUT], ids=["binpack", "spread"])
@given(made=nodes, listed=cores, wished=constraints)
@examples(12)
def test_property_filter_with_constraints_equals_engine(
    settings: Any, made: Nodes, listed: list[int], wished: dict[str, str]
) -> None:
    state, known = filled(made, settings), request_pod(listed, wished)
    assert known.request is not None
    names = [f"n{i}" for i in range(len(made))]
    filter_ = Filter(state, settings)
    found, points = filter_.filter(known, [*names, "other"]), filter_.scores(known, [*names, "other"])
    assert points.pop() == 0
    assert "other" in found.hopeless
    by_name = dict(zip(names, points, strict=True))
    assert filter_.scores_of_passed(known, found) == [by_name[name] for name in found.passed]
    for name, point in zip(names, points, strict=True):
        cards = state.node_snapshot(name, "").cards
        said = assess(
            known.request, read_node(b.node(name)), cards, settings, group_cards=state.group_cards(known.request, "")
        )
        if isinstance(said, Placement):
            assert name in found.passed
            assert point == score(known.request, said, cards, settings)
        else:
            assert str(said) in (found.hopeless if said.hopeless else found.failed)[name]
            assert point == 0


def test_node_with_unused_card_for_spread_group_scores_best() -> None:
    a100 = [("NVIDIA A100-SXM4-80GB", True)] * 2
    crowded: list[tuple[int, int, dict[str, str]]] = [(i, 40, {SPREAD: "web"}) for i in range(2)]
    state = filled([(a100, crowded), (a100, crowded[:1]), (a100, [])], PACKED)
    filter_, known = Filter(state, PACKED), request_pod([20], {SPREAD: "web"})
    names = ["n0", "n1", "n2"]
    assert filter_.filter(known, names).passed == names
    first, second, third = filter_.scores(known, names)
    assert first < min(second, third)


def test_filter_follows_changes_of_card_models() -> None:
    state = filled([([("Tesla T4", True)], [])], PACKED)
    known = request_pod([20], {MODELS: "H100"})
    filter_ = Filter(state, PACKED)
    assert "model Tesla T4 not among card-models" in filter_.filter(known, ["n0"]).hopeless["n0"]
    state.device_changed(write_device(Node("n0"), "", [replace(b.card(0, node="n0"), model="NVIDIA H100")]))
    assert filter_.filter(known, ["n0"]).passed == ["n0"]
    state.node_gone(b.node("n0"))
    assert filter_.filter(known, ["n0"]).passed == []


def test_filter_of_empty_cluster_rejects_all_names() -> None:
    filter_, known = Filter(ClusterCache(PACKED), PACKED), request_pod([20], {MODELS: "H100", SPREAD: "web"})
    assert list(filter_.filter(known, ["n0"]).hopeless) == ["n0"]
    assert filter_.filter(known, []).passed == []
    assert filter_.scores(known, ["n0"]) == [0]


def test_malformed_constraint_passes_no_node() -> None:
    state, raw = filled([([("Tesla T4", True)], [])], PACKED), b.share(annotations={MODELS: ""})
    known = read_gpu_pod(raw, PACKED)
    assert known is not None
    assert "mgpu.io/card-models" in Filter(state, PACKED).filter(known, ["n0"]).hopeless["n0"]


def test_filter_for_failed_pod_rejects_all_nodes() -> None:
    """The kubelet's eviction or a user can set its phase while kube-scheduler still has the old pod."""
    state = filled([([("Tesla T4", True)], [])], PACKED)
    raw = b.share("p", 10)
    raw["status"] = {**raw.get("status", {}), "phase": "Failed"}
    put(state, raw)
    known = state.gpu_pod("uid-p")
    assert known is not None
    filter_ = Filter(state, PACKED)
    found = filter_.filter(known, ["n0"])
    assert found.hopeless == {"n0": "the pod has failed"}
    assert found.kinds["the pod has failed"] is RejectionKind.BOUND_ALREADY
    assert filter_.scores(known, ["n0"]) == [0]


def test_filter_follows_changes_of_labels_and_nodes() -> None:
    state = filled([([("Tesla T4", True)], [])] * 2, PACKED)
    known = request_pod([20], {})
    filter_ = Filter(state, PACKED)
    assert filter_.filter(known, ["n0", "n1"]).passed == ["n0", "n1"]
    state.node_changed(b.node("n0", labels={"vke.node.gpu.schedule": "none"}))
    found = filter_.filter(known, ["n0", "n1"])
    assert found.passed == ["n1"]
    assert "is none" in found.hopeless["n0"]
    state.node_gone(b.node("n1"))
    assert filter_.filter(known, ["n0", "n1"]).passed == []
    state.node_changed(b.node("n2"))  # takes the row of n1
    state.device_changed(write_device(Node("n2"), "", b.cards(1, node="n2")))
    assert filter_.filter(known, ["n2", "n1"]).passed == ["n2"]


@pytest.mark.parametrize("count", [0, 1, 70])
def test_filter_accepts_any_number_of_nodes(count: int) -> None:
    state = filled([([("Tesla T4", True)], [])] * count, PACKED)
    names = [f"n{i}" for i in range(count)]
    found = Filter(state, PACKED).filter(request_pod([20], {}), [*names, "other"])
    assert found.passed == names
    assert list(found.hopeless) == ["other"]
