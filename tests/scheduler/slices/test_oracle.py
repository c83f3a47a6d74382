"""The cases of an existing partitioner, with its tables as KnowGeometries, where the file with them is at hand."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mgpu.model.asks import Rejection
from mgpu.model.cards import Card
from mgpu.model.mig import arrange, layout_of
from mgpu.model.partitioning import NodeSlices
from mgpu.model.slices import MIG, Slice
from scheduler.slices.geometry import counts_of
from scheduler.slices.mps import mps_card
from scheduler.slices.plan import can_offer, cards_of, plan

FILE = Path(__file__).parents[4] / "shared" / "oracles" / "mig_cases.json"
FOUND: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"cases": [], "tables": {}}
MODELS = {"A30": ("NVIDIA A30", 24), "A100-40": ("NVIDIA A100-SXM4-40GB", 40), "A100-80": ("NVIDIA A100-SXM4-80GB", 80)}
KNOWN = {MODELS[name][0]: tuple(table) for name, table in FOUND["tables"].items()}

Node = tuple[list[Card], list[Slice], set[Slice]]
"""Cards, what is made on them, and what of it is used."""


def cases(*ops: str) -> list[Any]:
    found = [pytest.param(case, id=f"{case['op']}-{case['id']}") for case in FOUND["cases"] if case["op"] in ops]
    return found or [pytest.param({}, marks=pytest.mark.skip(reason=f"no {FILE.name}"))]


def node_of(gpus: Sequence[Mapping[str, Any]]) -> Node:
    """The instances of a card lie where ours would."""
    cards, made, used = list[Card](), list[Slice](), set[Slice]()
    for i, gpu in enumerate(gpus):
        model, gib = MODELS[gpu["model"]]
        layout = layout_of(model, gib << 30)
        assert layout
        busy = arrange(layout, (), gpu["used"])
        assert busy is not None
        free = arrange(layout, busy, gpu["free"])
        assert free is not None
        cards.append(Card(i, f"GPU-{i}", model, gib << 30))
        made += [Slice(i, start, name) for start, name in (*busy, *free)]
        used |= {Slice(i, start, name) for start, name in busy}
    return cards, made, used


def replanned(node: Node, pods: Sequence[Mapping[str, int]]) -> tuple[Slice, ...] | Rejection:
    cards, made, used = node
    return plan(cards, NodeSlices(MIG, made=tuple(made), cards=frozenset(c.index for c in cards)), used, pods, KNOWN)


def single(want: Mapping[str, int]) -> list[Mapping[str, int]]:
    """Each request a pod."""
    return [{name: 1} for name, count in want.items() for _ in range(count)]


def geometry(slices: Sequence[Slice]) -> dict[str, int]:
    return dict(Counter(s.name for s in slices))


@pytest.mark.parametrize("case", cases("mig_gpu_replan", "mig_node_replan"))
def test_replan(case: Mapping[str, Any]) -> None:
    node = node_of(case.get("gpus") or [case["gpu"]])
    planned = replanned(node, single(case["want"]))
    after = node[1] if isinstance(planned, Rejection) else planned
    assert geometry(after) == case["geometry"]
    assert ({*after} != {*node[1]}) == case["changed"]
    assert node[2] <= {*after}


@pytest.mark.parametrize("case", cases("mig_gpu_apply"))
def test_apply(case: Mapping[str, Any]) -> None:
    node = node_of([case["gpu"]])
    assert isinstance(replanned(node, [case["target"]]), Rejection) != case["ok"]
    assert geometry([*node[2]]) == case["used"]


@pytest.mark.parametrize("case", cases("mig_cluster_plan"))
def test_cluster_plan(case: Mapping[str, Any]) -> None:
    """Pod after pod, each to the first node that can be cut for it; it gets the slices that lie highest."""
    nodes = {name: node_of(gpus) for name, gpus in sorted(case["nodes"].items())}
    for containers in case["pods"]:
        ask = sum((Counter(container) for container in containers), Counter[str]())
        name = next(name for name, node in nodes.items() if can_offer(read(node), ask))
        cards, _, used = nodes[name]
        planned = replanned(nodes[name], [ask])
        assert not isinstance(planned, Rejection)
        for slice_, count in ask.items():
            free = [s for s in planned if s.name == slice_ and s not in used]
            used |= {*free[-count:]}
        nodes[name] = cards, [*planned], used
    found = [geometry([s for s in made if s.card == card.index]) for cards, made, _ in nodes.values() for card in cards]
    assert sorted(map(sorted, found)) == sorted(map(sorted, case["gpus_any_order"]))
    assert all(cut in case["gpus_any_order"] for cut in found)


def read(node: Node) -> Any:
    cards, made, used = node
    found = NodeSlices(MIG, made=tuple(made), cards=frozenset(card.index for card in cards))
    return cards_of(cards, found, used, KNOWN)


@pytest.mark.parametrize("case", cases("mps_gpu_replan"))
def test_mps_replan(case: Mapping[str, Any]) -> None:
    gpu = case["gpu"]
    names = [[name for name, count in gpu[part].items() for _ in range(count)] for part in ("used", "free")]
    numbered = [*enumerate([*names[0], *names[1]])]
    card = mps_card(
        Card(0, "GPU-0", "NVIDIA T4", gpu["mem_gb"] << 30), numbered[: len(names[0])], numbered[len(names[0]) :]
    )
    cut = card.cut((), counts_of(case["want"].items()))
    assert cut
    assert cut.touched == case["changed"]
    assert dict(Counter(name for _, name in cut.slices)) == case["geometry"]


def test_every_kind_of_case_is_played() -> None:
    played = {"mig_gpu_replan", "mig_node_replan", "mig_gpu_apply", "mig_cluster_plan", "mps_gpu_replan"}
    assert {case["op"] for case in FOUND["cases"]} <= played
