"""The planning of slices for one pod, on 1,000 nodes with 8 cards each.

The time includes a check of which nodes can be partitioned for the pod, and one partition plan, with empty caches. The
scheduler reads the cards of a node only when the node changes, so the cost of reading them is a remark. A test in
`tests/scheduler/engine/partitioning` calls `run`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from time import process_time
from typing import NamedTuple

from bench.rows import Options, Row
from mgpu.model.cards import Card
from mgpu.model.gpu_requests import Rejection
from mgpu.model.mig import Instance, Layout, layout_of, possible_instances
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice
from scheduler.engine.partitioning import geometry, mps_shares
from scheduler.engine.partitioning.geometry import Geometries
from scheduler.engine.partitioning.partition_plan import PartitionableCards, can_offer, partitionable_cards, plan_cards

NODES, CARDS = 1000, 8
_GIB = 1 << 30
_MODEL = "NVIDIA A100-SXM4-80GB"
_FULL_CUTS: Geometries = {
    _MODEL: (
        {"1g.10gb": 7},
        {"1g.10gb": 5, "2g.20gb": 1},
        {"1g.10gb": 3, "2g.20gb": 2},
        {"1g.10gb": 1, "2g.20gb": 3},
        {"1g.10gb": 3, "3g.40gb": 1},
        {"1g.10gb": 3, "4g.40gb": 1},
        {"3g.40gb": 2},
        {"7g.80gb": 1},
    )
}
ASKS: tuple[tuple[str, str, Mapping[str, int], Geometries], ...] = (
    ("MIG, one slice", MIG, {"2g.20gb": 1}, {}),
    ("MIG, one large slice", MIG, {"4g.40gb": 1}, {}),
    ("MIG, slices of three profiles", MIG, {"1g.10gb": 2, "2g.20gb": 3, "3g.40gb": 2}, {}),
    ("MIG, KnowGeometries", MIG, {"3g.40gb": 1}, _FULL_CUTS),
    ("MIG, nowhere", MIG, {"7g.80gb": 9}, {}),
    ("MPS, one slice", MPS, {"20gb": 1}, {}),
    ("MPS, slices of three sizes", MPS, {"4gb": 3, "10gb": 2, "40gb": 1}, {}),
)


class Planned(NamedTuple):
    """The measurement of one request. Times are CPU milliseconds.

    Attributes:
        states: The number of different card states of all nodes.
        could: The number of nodes that can be partitioned for the pod.
    """

    name: str
    states: int
    could: int
    reading: float
    planning: float


def run(nodes: int = NODES) -> list[Planned]:
    return [_planned(name, mode, request, geometries, nodes) for name, mode, request, geometries in ASKS]


def rows(_: Options) -> Iterator[Row]:
    for one in run():
        said = (
            f"{one.could} nodes can be partitioned; reading the {one.states} different cards takes {one.reading:.0f} ms"
        )
        yield Row(what=one.name, value=one.planning, unit="ms CPU", remark=said)


def _planned(name: str, mode: str, request: Mapping[str, int], geometries: Geometries, count: int) -> Planned:
    found = _nodes(mode, count)
    for cached in (geometry._table, geometry._options_cache, geometry._partition_cache):
        cached.cache_clear()
    for shares in (mps_shares._options, mps_shares._partition):
        shares.cache_clear()
    began = process_time()
    nodes = [partitionable_cards(gpus, slices, used, geometries, {}) for gpus, slices, used in found]
    read = process_time()
    could = plan_over(nodes, request)
    ended = process_time()
    states = {card for node in nodes for _, card in node.cards}
    return Planned(name, len(states), could, (read - began) * 1000, (ended - read) * 1000)


def plan_over(nodes: Sequence[PartitionableCards], request: Mapping[str, int]) -> int:
    """Check every node, and plan the first one that can be partitioned. Return how many can be partitioned."""
    could = [node for node in nodes if can_offer(node, request)]
    planned = plan_cards(could[0] if could else nodes[0], [request])
    if isinstance(planned, Rejection) == bool(could):
        raise ValueError("the filter and the planner disagree")
    return len(could)


@cache
def _nodes(mode: str, count: int) -> list[tuple[list[Card], NodeSlices, list[Slice]]]:
    return [_node(Random(number), mode) for number in range(count)]


def _node(chance: Random, mode: str) -> tuple[list[Card], NodeSlices, list[Slice]]:
    """Return the cards of a node, its slices, and those that are used. Slices and load are random."""
    gpus = [Card(i, f"GPU-{i}", _MODEL, 80 * _GIB) for i in range(CARDS)]
    layout = layout_of(_MODEL, 80 * _GIB)
    load = chance.random()
    made: list[Slice] = []
    for gpu in gpus:
        cut = _shares(chance) if mode == MPS or layout is None else _instances(chance, layout)
        made += [Slice(gpu.index, start, name) for start, name in cut]
    used = [s for s in made if chance.random() < load]
    return gpus, NodeSlices(mode, existing=tuple(sorted(made)), cards=frozenset(range(CARDS))), used


def _instances(chance: Random, layout: Layout) -> list[Instance]:
    made: list[Instance] = []
    for _ in range(chance.randrange(8)):
        if can := possible_instances(layout, made):
            made.append(chance.choice(can))
    return made


def _shares(chance: Random) -> list[Instance]:
    names = chance.choices(["2gb", "4gb", "8gb", "10gb"], k=chance.randrange(9))
    return [Instance(number, name) for number, name in enumerate(names)]
