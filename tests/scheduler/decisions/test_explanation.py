"""The explainer gives the reasons of the filter and the engine."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mgpu.model import node_slices
from mgpu.model.device_object import write_device
from mgpu.model.gpu_requests import Rejection
from mgpu.model.pods import Node, read_node
from mgpu.model.slice_names import Slice
from mgpu.presentation.explanations import Explanation
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.explanation import Explainer
from scheduler.decisions.filter import Filter
from scheduler.engine.node_assessment import assess
from tests.builders import cards, container, mtgpupod, node, occupy_pod, owned, pod, share
from tests.examples import examples

Raw = dict[str, Any]
SETTINGS = load_settings()
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}


def state(nodes: Sequence[Raw], *pods: Raw, named: Sequence[Raw] = (), count: int = 2) -> ClusterCache:
    """Nodes with cards of their own, and what is on them."""
    made = ClusterCache(SETTINGS)
    for raw in nodes:
        made.node_changed(raw)
        made.device_changed(write_device(read_node(raw), "", cards(count, node=raw["metadata"]["name"])))
    for raw in named:
        made.mtgpupods.mtgpupod_changed(raw)
    for raw in pods:
        made.pod_changed(raw)
    return made


def explained(found: ClusterCache, raw: Raw, *names: str, all_cards: bool = False) -> Explanation:
    return Explainer(found, SETTINGS).pod(raw, names, names, all_cards=all_cards)


def test_explain_bound_pod_names_its_slice() -> None:
    made = [Slice(0, 4, "1g.10gb", "MIG-b", "uid-p")]
    said = {
        node_slices.ANNOTATION: node_slices.with_status(None, made, 4),
        node_slices.EXISTING: node_slices.write_existing(made, [0], None),
    }
    own = {"name": "c", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    given = {"mgpu.io/slices-given": json.dumps({"c": {"mig-1g.10gb": ["0:4"]}})}
    raw = pod("p", own, node="n1", annotations=given, phase="Running")
    found = explained(state([node(labels={node_slices.LABEL: "mig"}, **said)], raw), raw, "n1")
    assert found.verdict == ("c is on mig-1g.10gb slice 0:4 of n1.",)


def test_explain_bound_pod_names_cards_and_other_devices() -> None:
    amounts = {"koordinator.sh/gpu": "50", "koordinator.sh/rdma": "50"}
    record = {
        "gpu": [{"minor": 1, "resources": {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}}],
        "rdma": [{"minor": 0, "resources": {"koordinator.sh/rdma": "50"}}],
    }
    given = {"scheduling.koordinator.sh/device-allocated": json.dumps(record)}
    own = {"name": "c", "resources": {"limits": amounts}}
    raw = pod("p", own, node="n1", annotations=given, phase="Running")
    (verdict,) = explained(state([node()], raw), raw, "n1").verdict
    assert verdict == "c is on card 1 and rdma device of minor 0 of n1."


def test_occupy_pod_is_listed_as_holder_only_of_unused_card() -> None:
    keeps, waits = occupy_pod(card=1), share("waits")
    for named, holders in (
        ([], "kube-system/mtgpupod-occupypod-n1-zxcvb"),
        ([mtgpupod(bound="GPU-n1-1")], "default/m"),
    ):
        rows = explained(state([node()], keeps, waits, named=named), waits, "n1").cards["n1"]
        assert [row.holders for row in rows] == [(), (holders,)]
    (own,) = [mtgpupod(bound="GPU-n1-1")]
    rows = Explainer(state([node()], keeps, named=[own]), SETTINGS).mtgpupod(own).cards["n1"]
    assert [(row.own, row.holders) for row in rows] == [(False, ()), (True, ())]


def test_explain_pod_of_mtgpupod_names_the_mtgpupod() -> None:
    raw = pod("m", container(), node="n1")
    raw["metadata"]["ownerReferences"] = [{"kind": "Other", "name": "x"}, owned("notebook")]
    assert explained(state([node()], raw), raw).verdict == (
        "It was created for an MtgpuPod and has the card of that MtgpuPod; explain mtgpupod/notebook.",
    )


def test_cards_of_excluded_nodes_are_listed_only_with_all_cards() -> None:
    """All it comes to there is the label."""
    waits = share("waits")
    elsewhere = node("n2", labels={"vke.node.gpu.schedule": "other"})
    found = state([node(), elsewhere], waits)
    assert list(explained(found, waits, "n1", "n2").cards) == ["n1"]
    assert list(explained(found, waits, "n2", all_cards=True).cards) == ["n2"]


def test_conditions_without_trouble_are_omitted() -> None:
    waits = share("waits")
    rows = [("Degraded", "False"), ("Degraded", "True"), ("DisruptionTarget", "True"), ("PodScheduled", "False")]
    waits["status"]["conditions"] = [{"type": t, "status": s, "message": "m"} for t, s in (*rows, ("Ready", "True"))]
    assert [(row.type, row.status) for row in explained(state([node()], waits), waits, "n1").conditions] == rows[1:]


def test_explain_gated_pod_names_its_gates() -> None:
    waits = share("waits")
    waits["spec"]["schedulingGates"] = [{"name": "team/quota"}]
    assert explained(state([node()], waits), waits, "n1").verdict == (
        "It waits for its scheduling gates first: team/quota.",
        "Its cards fit on 1 of 1 node, so it does not wait for cards.",
    )


def test_explain_whole_cards_names_no_card_policy() -> None:
    whole = pod("whole", container("c", 200))
    assert explained(state([node()], whole), whole, "n1").policy == "whole cards must be idle; nodes: binpack"


shares = st.tuples(st.integers(1, 4).map(lambda n: n * 25), st.integers(1, 79))


@examples(20)
@given(st.lists(shares, max_size=6), shares)
def test_property_explanation_equals_filter_and_engine(held: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    def of(name: str, request: tuple[int, int], **more: Any) -> Raw:
        core, gib = request
        own = container("c", 100) if core == 100 else container("c", core, gib * 1024)
        return pod(name, own, **more)

    pods = [
        of(f"h{i}", request, node=f"n{i % 3}", annotations=RECORD, phase="Running") for i, request in enumerate(held)
    ]
    waits, names = of("waits", asked), ["n0", "n1", "n2"]
    found = state([node(name) for name in names], *pods, waits, count=1)
    known = found.gpu_pod("uid-waits")
    assert known is not None
    answer, filter_ = explained(found, waits, *names), Filter(found, SETTINGS)
    said = filter_.filter(known, names)
    assert {row.name: row.reason for row in answer.nodes if row.reason is not None} == {**said.failed, **said.hopeless}
    fits = [row.name for row in answer.nodes if row.reason is None]
    assert sorted(fits) == said.passed
    assert [row.points for row in answer.nodes if row.reason is None] == filter_.scores(known, fits)
    for row in answer.nodes:
        view = found.node_snapshot(row.name, "uid-waits")
        assert known.request is not None
        found_there = assess(known.request, view.node or Node(""), view.available_cards, SETTINGS)
        assert row.reason == (found_there.summary().reason if isinstance(found_there, Rejection) else None)
