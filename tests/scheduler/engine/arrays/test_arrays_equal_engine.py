"""The arrays say what the engine says, of any nodes at once."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.pod_constraints import Constraints
from mgpu.model.pods import Node, Pod, Stage
from mgpu.model.quantities import MAX_QUANTITY
from mgpu.settings import Settings, load_settings
from scheduler.cluster.arrays import ClusterArrays
from scheduler.cluster.forecast import Forecast
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.filter import Filter
from scheduler.engine.arrays.array_rejections import MAX_REASONS
from scheduler.engine.arrays.node_table import EXACT, NodeTable
from scheduler.engine.node_assessment import assess, score
from tests.builders import GIB
from tests.examples import examples

MIB, KIB = 1 << 20, 1 << 10

amounts = st.one_of(
    st.sampled_from([0, 1, GIB // 2, GIB, 2 * GIB, 5 * GIB, 1 << 48]),
    st.integers(0, 400).map(lambda n: n * GIB // 20),
    st.integers(0, 4100).map(lambda n: n * MIB // 2),
    st.integers(0, 4100).map(lambda n: n * KIB // 2),
    st.builds(lambda n, more: n * GIB // 20 + more, st.integers(0, 400), st.integers(-2, 2)).map(abs),
)
cores = st.sampled_from([0, 0, 50, 100, 125, 300, 500, 700, 990])
sizes = st.sampled_from([8 * GIB, 8 * GIB, 8 * GIB, 16 * GIB, 10 * GIB + 12345])
policies = st.sampled_from([load_settings(f"nodePolicy: {policy}") for policy in ("binpack", "spread")])
dialects = st.sampled_from(["mgpu", "koordinator"])  # By default, the card policy of the latter is `minor`.
constraints = st.sampled_from(
    [Constraints()] * 4 + [Constraints(models=("A100",)), Constraints(excluded_models=("A100",))]
)


@st.composite
def cards(draw: st.DrawFn) -> tuple[CardState, ...]:
    one_size, found = draw(st.sampled_from([0, 8 * GIB])), list[CardState]()
    count = draw(st.sampled_from([4, 3, 2, 1, 0]))
    minors = draw(st.sampled_from([[None] * count, [*range(count)][::-1]]))
    for index in range(count):
        model, healthy = draw(st.sampled_from(["A100", "T4"])), draw(st.integers(0, 9)) < 9
        card = Card(index, f"GPU-{index}", model, one_size or draw(sizes), healthy=healthy, minor=minors[index])
        shares = draw(st.sampled_from([0, 0, 1, 2, 16]))
        ratio = draw(st.sampled_from([0, 0, 13, 50, 87, 100, 130]))
        gpuid = draw(st.sampled_from(["", "", "", "zxcvb", "qwert"]))
        used = CardState(card, draw(cores), draw(amounts), shares, ratio_used=ratio, gpuid=gpuid)
        found.append(used if shares else CardState(card))
    return tuple(found)


@st.composite
def requests(draw: st.DrawFn) -> GpuRequest:
    containers = []
    for i in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        count, stage = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([Stage.APP, *Stage]))
        whole = draw(st.integers(0, 4)) == 0
        core, memory = (1000, 0) if whole else (draw(cores), draw(amounts))
        ratio = None if whole else draw(st.sampled_from([None, None, 0, 1, 13, 29, 50, 87, 100]))
        memory = 0 if ratio else memory
        containers.append(ContainerRequest(f"c{i}", count, core, memory, whole=whole, stage=stage, ratio=ratio))
    return GpuRequest(draw(dialects), tuple(containers), draw(st.sampled_from([0, 1, 2, 16])), (), draw(constraints))


class Cluster:
    """Nodes n0, n1, … with these cards: what `Filter` asks of a State."""

    def __init__(self, nodes: Sequence[tuple[CardState, ...]], settings: Settings) -> None:
        self.matrix, self.forecast = ClusterArrays(), Forecast(settings)
        for i, of_node in enumerate(nodes):
            self.matrix.put(Node(f"n{i}"), of_node)

    def node_table(self, names: Sequence[str], _pod: Pod, request: GpuRequest) -> NodeTable:
        return self.matrix.table(names, request, {})

    def group_cards(self, *_: object) -> tuple[()]:
        return ()

    def group_nodes(self, _: GpuRequest) -> frozenset[str]:
        return frozenset()

    def agent_problems(self, _: Sequence[str]) -> dict[str, str]:
        return {}

    def remnant_problem(self, _: Pod) -> str | None:
        return None


def check(nodes: Sequence[tuple[CardState, ...]], request: GpuRequest, settings: Settings) -> None:
    cluster: Any = Cluster(nodes, settings)
    names = [f"n{i}" for i in range(len(nodes))]
    filter_, known = Filter(cluster, settings), GpuPod(Pod("default", "p", "u"), request)
    found, scores = filter_.filter(known, names[::-1]), filter_.scores(known, names)
    for name, of_node, points in zip(names, nodes, scores, strict=True):
        said = assess(request, Node(name), of_node, settings)
        if isinstance(said, Placement):
            assert name in found.passed
            assert points == score(request, said, of_node, settings)
        else:
            assert (found.hopeless if said.hopeless else found.failed)[name] == said.summary().reason
            assert points == 0
    by_name = dict(zip(names, scores, strict=True))
    assert filter_.scores_of_passed(known, found) == [by_name[name] for name in found.passed]
    assert len(found.passed) + len(found.failed) + len(found.hopeless) == len(nodes)


@given(st.lists(cards(), min_size=1, max_size=6), requests(), policies)
@examples(30)
def test_property_arrays_answer_as_the_engine(
    nodes: list[tuple[CardState, ...]], request: GpuRequest, settings: Settings
) -> None:
    check(nodes, request, settings)


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (MAX_REASONS, "insufficient GPU (2 cards: 1 core 10 percent short and memory 4.0 GiB short, 1 unhealthy)"),
        (MAX_REASONS + 1, "insufficient GPU (2 cards: 1 core and memory short, 1 unhealthy)"),
    ],
)
def test_reasons_beyond_the_limit_leave_amounts_out(count: int, reason: str) -> None:
    """The pod's condition holds them all, and has to be written."""
    ill = CardState(Card(1, "GPU-1", "", 8 * GIB, healthy=False))
    nodes = [(CardState(Card(0, "GPU-0", "", 8 * GIB), 100 + 10 * i, 4 * GIB, 1), ill) for i in range(count)]
    cluster: Any = Cluster(nodes, load_settings())
    known = GpuPod(Pod("default", "p", "u"), GpuRequest("mgpu", (ContainerRequest("c", 1, 1000, 8 * GIB),)))
    found = Filter(cluster, load_settings()).filter(known, [f"n{i}" for i in range(count)])
    assert found.failed["n0"] == reason
    assert len(found.failed) == count


def test_amounts_beyond_64_bits_are_left_to_the_engine() -> None:
    """A record written by hand says so much that two of them are beyond 64 bits."""
    full = CardState(Card(0, "GPU-0", "", 8 * GIB), 100, 2**64, 2)
    idle = CardState(Card(0, "GPU-0", "", 8 * GIB))
    request = GpuRequest("mgpu", (ContainerRequest("c", 1, 100, GIB),))
    check([(full,), (idle,)], request, load_settings())
    for memory in (4 * EXACT, MAX_QUANTITY):
        for ratio in (None, 0):
            check([(idle,)], GpuRequest("mgpu", (ContainerRequest("c", 2, 100, memory, ratio=ratio),)), load_settings())
            check([(idle,)], GpuRequest("mgpu", (ContainerRequest("c", 1, 100, memory, ratio=ratio),)), load_settings())


def test_containers_with_cards_of_their_own_are_decided_by_the_arrays() -> None:
    """The search over one node takes a millisecond and more, and there are thousands."""
    used = tuple(CardState(Card(i, f"GPU-{i}", "", 8 * GIB), 500 + 10 * i, 4 * GIB, 1) for i in range(4))
    sizes = [(1, 400), (2, 450), (1, 490)]
    request = GpuRequest(
        "mgpu", tuple(ContainerRequest(f"c{i}", count, core, GIB) for i, (count, core) in enumerate(sizes))
    )
    closely: list[int] = []
    for cards_of_node, looks in ((used, 0), (used[:3], 1)):  # no two of them fit on one card
        cluster: Any = Cluster([cards_of_node], load_settings())
        filter_ = Filter(cluster, load_settings(), pace=lambda: closely.append(1))
        found = filter_.filter(GpuPod(Pod("default", "p", "u"), request), ["n0"])
        assert (len(found.passed), len(closely)) == (1 - looks, looks), found
        check([cards_of_node], request, load_settings())


def test_nodes_whose_cards_differ_only_in_their_minors_are_scored_separately() -> None:
    """The policy `minor` chooses the small card of one node and the large card of the other."""
    nodes = [
        tuple(
            CardState(Card(index, f"GPU-{index}", "", size, minor=minor))
            for index, (size, minor) in enumerate(zip((8 * GIB, 24 * GIB), minors, strict=True))
        )
        for minors in ((0, 1), (1, 0))
    ]
    check(nodes, GpuRequest("koordinator", (ContainerRequest("c", 1, 500, ratio=50),)), load_settings())
