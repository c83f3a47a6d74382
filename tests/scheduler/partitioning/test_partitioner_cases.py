"""The planner against the results that another partitioner's tests demand, with its tables as KnowGeometries."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mgpu.model.cards import Card
from mgpu.model.gpu_requests import Rejection
from mgpu.model.mig import arrange, layout_of
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, Slice
from scheduler.engine.partitioning.geometry import counts_of
from scheduler.engine.partitioning.mps_shares import mps_card
from scheduler.engine.partitioning.partition_plan import can_offer, partitionable_cards, plan_cards
from tests import data

CASES = data.load("mig_partitioner")
MODELS = {
    "A30-24": ("NVIDIA A30", 24),
    "A100-40": ("NVIDIA A100-SXM4-40GB", 40),
    "A100-80": ("NVIDIA A100-SXM4-80GB", 80),
}
KNOWN = {MODELS[name][0]: tuple(table) for name, table in CASES["geometries"].items()}

Case = Mapping[str, Any]
Node = tuple[list[Card], list[Slice], set[Slice]]
"""Cards, what is made on them, and what of it is used."""


def cases(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", CASES[kind].values(), ids=CASES[kind])


def node_of(given: Sequence[Case]) -> Node:
    """The cards with their slices, which lie where mgpu would have put them."""
    cards, made, used = list[Card](), list[Slice](), set[Slice]()
    for i, card in enumerate(given):
        model, gib = MODELS[card["model"]]
        layout = layout_of(model, gib << 30)
        assert layout
        busy = arrange(layout, (), card.get("used", {}))
        assert busy is not None
        free = arrange(layout, busy, card.get("free", {}))
        assert free is not None
        cards.append(Card(i, f"GPU-{i}", model, gib << 30))
        made += [Slice(i, start, name) for start, name in (*busy, *free)]
        used |= {Slice(i, start, name) for start, name in busy}
    return cards, made, used


def partitioning(node: Node) -> NodeSlices:
    cards, made, _ = node
    return NodeSlices(MIG, existing=tuple(made), cards=frozenset(card.index for card in cards))


def replan(node: Node, pods: Sequence[Mapping[str, int]]) -> tuple[Slice, ...] | Rejection:
    cards, _, used = node
    return plan_cards(partitionable_cards(cards, partitioning(node), used, KNOWN, {}), pods)


def single(requests: Mapping[str, int]) -> list[Mapping[str, int]]:
    """Each request as a pod of its own."""
    return [{name: 1} for name, count in requests.items() for _ in range(count)]


def geometry(slices: Sequence[Slice]) -> dict[str, int]:
    return dict(Counter(s.name for s in slices))


@cases("replan")
def test_replan(case: Case) -> None:
    node = node_of(case["cards"])
    _, made, used = node
    planned = replan(node, single(case["requests"]))
    after = made if isinstance(planned, Rejection) else planned
    assert geometry(after) == case["after"]
    assert ({*after} != {*made}) == case["changed"]
    assert used <= {*after}


@cases("refused")
def test_refused(case: Case) -> None:
    assert isinstance(replan(node_of(case["cards"]), [case["request"]]), Rejection)


@cases("cluster")
def test_cluster(case: Case) -> None:
    """Each pod goes to the first node that can be cut for it, and gets the slices that lie highest."""
    nodes = {name: node_of(cards) for name, cards in sorted(case["nodes"].items())}
    for containers in case["pods"]:
        request = sum((Counter(container) for container in containers), Counter[str]())
        name = next(name for name, node in nodes.items() if offers(node, request))
        cards, _, used = nodes[name]
        planned = replan(nodes[name], [request])
        assert not isinstance(planned, Rejection)
        for slice_, count in request.items():
            free = [s for s in planned if s.name == slice_ and s not in used]
            used |= {*free[-count:]}
        nodes[name] = cards, [*planned], used
    found = [geometry([s for s in made if s.card == card.index]) for cards, made, _ in nodes.values() for card in cards]
    assert Counter(map(frozenset, map(dict.items, found))) == Counter(map(frozenset, map(dict.items, case["after"])))


def offers(node: Node, request: Mapping[str, int]) -> bool:
    cards, _, used = node
    return can_offer(partitionable_cards(cards, partitioning(node), used, KNOWN, {}), request)


@cases("mps")
def test_mps(case: Case) -> None:
    card = mps_card(Card(0, "GPU-0", "NVIDIA T4", case["memory"] << 30), [], [])
    partition = card.partition((), counts_of(case["requests"].items()))
    assert partition
    assert partition.touched == case["changed"]
    assert dict(Counter(name for _, name in partition.slices)) == case["after"]
