"""The snapshot of a cluster from API objects."""

import json
from typing import Any

import pytest
from rich.console import Console

from mgpu.model import node_slices
from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.device_object import write_device
from mgpu.model.pods import read_node
from mgpu.model.slice_names import Slice
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import nodes_json
from mgpu.presentation.overview import make_overview
from mgpu.settings import load_settings
from mgpu.version import AGENT_ANNOTATION, AgentReport, IsolationReport, write_agent_report
from tests.builders import card, cards, container, node, pod, share

Raw = dict[str, Any]
ALLOCATED = "scheduling.koordinator.sh/device-allocated"
ON_CARD_1 = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
DEVICE = write_device(read_node(node()), "", cards(2))


def test_pod_with_a_record_holds_its_card() -> None:
    found = make_overview([node()], [DEVICE], [share(node="n1", annotations=ON_CARD_1)], load_settings())
    first, second = nodes_json(found.nodes)["n1"]["cards"]
    assert (first["holders"], second["holders"]) == ([], ["default/p/c"])
    assert second["core"] == {"used": 50, "total": 100}
    assert not found.unclear


def test_overview_lists_pending_pods_only() -> None:
    plain = pod("plain", container())
    ended = share("ended", node="n1", annotations=ON_CARD_1, phase="Succeeded")
    found = make_overview([node()], [DEVICE], [share("waits"), ended, plain], load_settings())
    assert found.pending == ("default/waits",)
    assert all(not card.uses for card in found.nodes[0].cards)


def test_unreadable_objects_are_unclear() -> None:
    odd = share("odd", node="n1", annotations={"vke.volcengine.com/gpu-index-container-c": "?"})
    broken = {"metadata": {"name": "n2"}, "spec": {"devices": 3}}
    large = {"metadata": {"name": "n3", "labels": {f"label-{i}": "" for i in range(3000)}}}
    nodes = [node(), node("n2"), large]
    found = make_overview(nodes, [DEVICE, broken], [odd, share("new", node="n1")], load_settings())
    assert set(found.unclear) == {"Device n2", "Pod default/odd", "Pod default/new", "Node n3"}
    assert [card.holders for card in found.nodes[0].cards] == [["default/odd/c"], ["default/odd/c"]]


def test_pod_with_an_unreadable_request_holds_every_card() -> None:
    odd = pod("odd", container(core=120), node="n1", annotations=ON_CARD_1)
    found = make_overview([node()], [DEVICE], [odd], load_settings())
    assert [card.state.core_used for card in found.nodes[0].cards] == [1000, 1000]


def test_overview_has_constraints_and_groups() -> None:
    pair, constraint = {"mgpu.io/same-card-group": "pair"}, {"mgpu.io/card-models": "H100"}
    pods = [
        share("b", node="n1", annotations={**ON_CARD_1, **pair}),
        share("a", node="n1", annotations={**ON_CARD_1, **pair}),
        share("waits", annotations=constraint),
        share("bad", annotations={"mgpu.io/card-models": ""}),
    ]
    found = make_overview([node()], [DEVICE], pods, load_settings())
    assert {pod: constraints.texts() for pod, constraints in found.constraints.items()} == {
        "default/a": {"same-card-group": "pair"},
        "default/b": {"same-card-group": "pair"},
        "default/waits": {"card-models": "H100"},
    }
    (group,) = found.groups
    assert str(group.group) == "same-card-group pair"
    assert (group.pods, [str(seat) for seat in group.cards]) == (("default/a", "default/b"), ["card 1 of n1"])
    assert found.pending == ("default/bad", "default/waits")
    assert list(found.unclear) == ["Pod default/bad"]
    assert [str(use.constraints) for use in found.nodes[0].cards[1].uses] == ["same-card-group pair"] * 2


def asking(name: str, resource: str, amount: str, annotations: dict[str, str] | None = None) -> Raw:
    own = {"name": "c", "resources": {"limits": {resource: amount}}}
    return pod(name, own, node="n1", annotations=annotations)


def test_pods_of_all_vocabularies_hold_one_card() -> None:
    allocated = {"minor": 1, "resources": {"koordinator.sh/gpu-core": "25", "koordinator.sh/gpu-memory-ratio": "25"}}
    pods = [
        share(node="n1", annotations=ON_CARD_1),
        asking("g", "aliyun.com/gpu-mem", "8", {"ALIYUN_COM_GPU_MEM_IDX": "1"}),
        asking("k", "koordinator.sh/gpu", "25", {ALLOCATED: json.dumps({"gpu": [allocated]})}),
    ]
    found = make_overview([node()], [DEVICE], pods, load_settings())
    assert not found.unclear
    card = found.nodes[0].cards[1]
    assert {use.pod: (use.dialect, use.core, use.memory >> 30) for use in card.uses} == {
        "default/p": ("mgpu", 500, 1),
        "default/g": ("gpushare", 0, 8),
        "default/k": ("koordinator", 250, 20),
    }


def test_other_devices_have_holders() -> None:
    rdma = {"type": "rdma", "id": "mlx5_0", "minor": 3, "resources": {"koordinator.sh/rdma": "100"}}
    device = {**DEVICE, "spec": {"devices": [*DEVICE["spec"]["devices"], rdma]}}
    allocated = {"rdma": [{"minor": 3, "resources": {"koordinator.sh/rdma": "50"}}]}
    held = asking("r", "koordinator.sh/rdma", "50", {ALLOCATED: json.dumps(allocated)})
    (seen,) = make_overview([node()], [device], [held], load_settings()).nodes
    assert [card.uses for card in seen.cards] == [(), ()]
    (other,) = seen.others
    assert (other.state.card.type, other.state.core_used, other.holders) == ("rdma", 500, ["default/r/c"])
    assert nodes_json([seen])["n1"]["cards"][2]["type"] == "rdma"


def test_allocations_of_nvidias_plugin_are_held() -> None:
    rows = [
        {"podUID": uid, "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": [f"GPU-n1-{i}"]}
        for i, uid in enumerate(["uid-old", "uid-gone"])
    ]
    device = {**DEVICE, "metadata": {"name": "n1", "annotations": {CHECKPOINTS: json.dumps(rows)}}}
    old = asking("old", "nvidia.com/gpu", "1")
    found = make_overview([node()], [device], [old], load_settings())
    assert not found.unclear
    uses = [use for card in found.nodes[0].cards for use in card.uses]
    assert [(use.pod, use.dialect, use.core) for use in uses] == [
        ("default/old", "nvidia", 1000),
        ("pod uid-gone", "nvidia", 1000),
    ]
    ended = make_overview([node()], [device], [{**old, "status": {"phase": "Succeeded"}}], load_settings())
    assert [len(card.uses) for card in ended.nodes[0].cards] == [0, 1]


def test_record_takes_precedence_over_the_checkpoint() -> None:
    rows = [{"podUID": "uid-p", "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ["GPU-n1-0"]}]
    device = {**DEVICE, "metadata": {"name": "n1", "annotations": {CHECKPOINTS: json.dumps(rows)}}}
    found = make_overview([node()], [device], [share(node="n1", annotations=ON_CARD_1)], load_settings())
    assert [len(card.uses) for card in found.nodes[0].cards] == [0, 1]


def test_record_of_a_missing_card_is_unclear() -> None:
    away = {**ON_CARD_1, "vke.volcengine.com/gpu-index-container-c": "7"}
    found = make_overview([node()], [DEVICE], [share(node="n1", annotations=away)], load_settings())
    assert dict(found.unclear) == {"Pod default/p": "its record names card 7, which n1 does not have"}


def test_other_devices_of_a_checkpoint_are_no_missing_cards() -> None:
    rows = [
        {"podUID": "uid-old", "containerName": "c", "resourceName": resource, "deviceIDs": [id]}
        for resource, id in (("nvidia.com/gpu", "GPU-n1-0"), ("rdma/hca", "mlx5_0"))
    ]
    device = {**DEVICE, "metadata": {"name": "n1", "annotations": {CHECKPOINTS: json.dumps(rows)}}}
    found = make_overview([node()], [device], [asking("old", "nvidia.com/gpu", "1")], load_settings())
    assert not found.unclear
    assert [card.holders for card in found.nodes[0].cards] == [["default/old/c"], []]


def test_unrecorded_pod_holds_its_share_on_every_card() -> None:
    """The scheduler counts in the same way: no card of the node may seem free."""
    found = make_overview([node()], [DEVICE], [share("before", node="n1", phase="Running")], load_settings())
    assert [card.state.core_used for card in found.nodes[0].cards] == [500, 500]
    assert not any(use.certain for card in found.nodes[0].cards for use in card.uses)
    assert list(found.unclear) == ["Pod default/before"]


def test_cards_of_an_unhealthy_list_are_unhealthy() -> None:
    lists = [
        {"metadata": {"name": f"unhealthy-gpu-{name}", "namespace": "kube-system"}, "data": {"gpus": gpus}}
        for name, gpus in (("n1", "1"), ("n2", "?"))
    ]
    found = make_overview([node()], [DEVICE], [], load_settings(), lists)
    assert [card.state.card.healthy for card in found.nodes[0].cards] == [True, False]
    assert list(found.unclear) == ["ConfigMap unhealthy-gpu-n2"]


def test_pod_with_an_invalid_constraint_keeps_its_cards() -> None:
    """A pod from before the rule keeps its cards."""
    odd = share("odd", node="n1", annotations={**ON_CARD_1, "mgpu.io/card-models": ",", "mgpu.io/spread-group": "web"})
    found = make_overview([node()], [DEVICE], [odd], load_settings())
    assert [len(card.uses) for card in found.nodes[0].cards] == [0, 1]
    assert not found.unclear
    assert found.constraints["default/odd"].texts() == {"spread-group": "web"}


def sliced(made: list[Slice], mode: str = "mig", refused: tuple[int, str] | None = None) -> Raw:
    status = node_slices.with_status(None, made, 4)
    said = {node_slices.ANNOTATION: status, node_slices.EXISTING: node_slices.write_existing(made, [0], refused)}
    return node(labels={node_slices.LABEL: mode}, **said)


def holding(name: str, type: str, *places: str) -> Raw:
    own = {"name": "c", "resources": {"limits": {f"nvidia.com/{type}": str(len(places))}}}
    return pod(name, own, node="n1", annotations={"mgpu.io/slices-given": json.dumps({"c": {type: places}})})


def test_partitioned_card_has_slices_and_their_use() -> None:
    made = [Slice(0, 0, "3g.40gb", "MIG-a"), Slice(0, 4, "1g.10gb", "MIG-b", "uid-p"), Slice(0, 6, "2g.20gb", "MIG-c")]
    raw = sliced(made)
    found = make_overview([raw], [DEVICE], [holding("p", "mig-1g.10gb", "0:4")], load_settings())
    assert not found.unclear
    shown = nodes_json(found.nodes)["n1"]
    first, second = shown["cards"]
    assert first["slices"] == [
        {"profile": "3g.40gb", "start": 0, "holder": None},
        {"profile": "1g.10gb", "start": 4, "holder": "default/p/c"},
        {"profile": "2g.20gb", "start": 6, "holder": None},
    ]
    assert (first["core"]["used"], first["memory"]["used"], first["holders"]) == (14.2, 10 << 30, ["default/p/c"])
    assert (second["slices"], found.nodes[0].cards[1].mode) == ([], "mig")
    assert shown["annotations"] == raw["metadata"]["annotations"]


def test_mps_shares_have_no_start() -> None:
    made = [Slice(0, i, "4gb") for i in range(2)]
    found = make_overview([sliced(made, "mps")], [DEVICE], [holding("p", "gpu-4gb", "0:1")], load_settings())
    first, second = nodes_json(found.nodes)["n1"]["cards"]
    rows = [{"profile": "4gb", "holder": holder} for holder in (None, "default/p/c")]
    assert (first["slices"], first["core"]["used"], second["slices"]) == (rows, 5, [])
    assert [card.mode for card in found.nodes[0].cards] == ["mps", ""]


def test_slices_of_a_deleted_pod_are_held() -> None:
    found = make_overview([sliced([Slice(0, 0, "3g.40gb", "MIG-a", "uid-gone")])], [DEVICE], [], load_settings())
    (card, *_) = nodes_json(found.nodes)["n1"]["cards"]
    assert [s["holder"] for s in card["slices"]] == ["pod uid-gone"]
    assert card["memory"]["used"] == 40 << 30


def test_record_of_a_missing_slice_is_unclear() -> None:
    found = make_overview([sliced([])], [DEVICE], [holding("p", "mig-1g.10gb", "0:4")], load_settings())
    assert list(found.unclear) == ["Pod default/p"]


@pytest.mark.parametrize(
    ("refused", "note"),
    [
        ((5, "in use"), "plan 5 was refused: in use"),
        ((4, "before"), "plan 5 is under way"),
        (None, "plan 5 is under way"),
    ],
)
def test_node_has_a_note_about_its_plan(refused: tuple[int, str] | None, note: str) -> None:
    raw = sliced([], refused=refused)
    said = raw["metadata"]["annotations"]
    said[node_slices.ANNOTATION] = node_slices.with_spec(said[node_slices.ANNOTATION], {0: {"1g.10gb": 1}}, 5)
    assert make_overview([raw], [DEVICE], [], load_settings()).nodes[0].note == note


def test_unreadable_slice_annotations_are_unclear() -> None:
    raw = node(labels={node_slices.LABEL: "mig"}, **{node_slices.ANNOTATION: "{"})
    odd = node("n2", labels={node_slices.LABEL: "both"})
    found = make_overview([raw, odd], [DEVICE], [], load_settings())
    assert list(found.unclear) == ["Node n1", "Node n2"]
    assert [card.mode for card in found.nodes[0].cards] == ["mig", "mig"]


@pytest.mark.parametrize(
    ("backend", "found", "title"),
    [
        ("mps", "mps", " · limits by mps ─"),
        ("none", "none", "80 GiB ─"),
        ("\x1b[2J", "", "80 GiB ─"),
        (None, "", "80 GiB ─"),
    ],
)
def test_a_node_says_what_holds_containers_to_their_shares(backend: str | None, found: str, title: str) -> None:
    isolation = None if backend is None else IsolationReport(backend)
    report = AgentReport("1", None, 1, "mgpu", isolation=isolation)
    raw = node()
    raw["metadata"]["annotations"][AGENT_ANNOTATION] = write_agent_report(report)
    device = write_device(read_node(raw), "", (card(),))
    (view,) = make_overview([raw], [device], [], load_settings()).nodes
    assert view.isolation == found
    assert nodes_json([view])["n1"].get("isolation", "") == found
    console = Console(width=80, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(card_map([view]))
    assert title in captured.get().splitlines()[0]
