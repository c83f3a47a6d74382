"""Ours: properties of the worth of nodes, and small clusters where the best fit is wrong."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.learning.expected_pods import UNIT, Learner
from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import NodeClass, NodeRows, Shape, milli_per_card
from scheduler.engine.policies.fragmentation import Fragmentation
from tests.examples import examples
from tests.scheduler.engine.learning.clusters import CLASSES, GIB, SHAPES, Node, board_of, node_rows, nodes

JUDGE = Fragmentation([(shape, UNIT * (10 + i)) for i, shape in enumerate(SHAPES)], dict.fromkeys(CLASSES, 5))
NEWCOMER = NodeClass(16000, 64 * GIB, 3, "L4", 24 * GIB)
MANY = 5000 * UNIT


def keys(judge: Fragmentation, shape: Shape, *cluster: Node) -> list[int]:
    found: list[int] = judge.keys(node_rows(*cluster), shape).tolist()
    return found


def empty(node: NodeClass) -> Node:
    return node, node.cpu, node.memory, (1000,) * node.cards


@examples(30)
@given(nodes((*CLASSES, NEWCOMER)), st.sampled_from(SHAPES))
def test_property_keys_and_cards_lose_the_least_worth(node: Node, shape: Shape) -> None:
    kind, cpu, memory, free = node
    rows, need = node_rows(node), milli_per_card(shape, kind)
    fitting = [card for card, left in enumerate(free) if need is not None and left >= need]
    if need is None or cpu < shape.cpu or memory < shape.memory or len(fitting) < shape.cards:
        assert keys(JUDGE, shape, node) == [UNFIT]
        return
    losses = {}
    for way in combinations(fitting, shape.cards):
        left = tuple(amount - need * (card in way) for card, amount in enumerate(free))
        after = node_rows((kind, cpu - shape.cpu, memory - shape.memory, left))
        losses[way] = int(JUDGE.rate_changes(rows, after)[0])
    assert max(losses.values()) <= 0
    chosen = JUDGE.cards(rows, shape)
    if shape.cards <= 1:
        assert chosen == next(way for way in losses if losses[way] == max(losses.values()))
    else:
        assert losses[chosen] <= max(losses.values())
    assert keys(JUDGE, shape, node)[0] <= 0


@examples(20)
@given(st.lists(nodes((*CLASSES, NEWCOMER)), min_size=1, max_size=6), st.sampled_from(SHAPES), st.randoms())
def test_property_key_ignores_other_nodes_and_order_of_cards(cluster, shape, chance) -> None:  # type: ignore[no-untyped-def]
    together = keys(JUDGE, shape, *cluster)
    mixed = [(kind, cpu, memory, tuple(chance.sample(free, len(free)))) for kind, cpu, memory, free in cluster]
    assert together == [keys(JUDGE, shape, node)[0] for node in mixed]
    assert keys(JUDGE, shape, *reversed(cluster)) == together[::-1]


@examples(20)
@given(nodes((*CLASSES, NEWCOMER)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_property_worth_never_rises_with_less_free(node: Node, cpu: int, memory: int, taken: int) -> None:
    kind, has_cpu, has_memory, free = node
    less = (kind, has_cpu * cpu // 9, has_memory * memory // 9, tuple(left * taken // 9 for left in free))
    before, after = JUDGE.worth(node_rows(node))[0], JUDGE.worth(node_rows(less))[0]
    assert 0 <= after <= before


def test_unbounded_cpu_and_memory_do_not_overflow() -> None:
    most = 2**63 - 1
    node = (CLASSES[1], most, most, (1000,) * 4)
    assert UNFIT < keys(JUDGE, SHAPES[1], node)[0] <= 0


def test_pod_for_any_model_avoids_nodes_that_others_are_bound_to() -> None:
    few, many = NodeClass(32000, 256 * GIB, 8, "T4"), NodeClass(32000, 256 * GIB, 8, "A100")
    anywhere, bound = Shape(1000, GIB, 1, 500), Shape(1000, GIB, 1, 500, models=("T4",))
    judge = Fragmentation([(anywhere, 10 * MANY), (bound, MANY)], {few: 1, many: 100})
    begun = (few, 31000, 255 * GIB, (500, *[1000] * 7))  # best fit goes here, half a card is begun
    on_few, on_many = keys(judge, anywhere, begun, empty(many))
    assert on_many > on_few


def test_pod_with_little_cpu_avoids_nodes_with_much() -> None:
    rich, poor = NodeClass(64000, 256 * GIB, 4), NodeClass(15000, 256 * GIB, 4)
    modest, hungry = Shape(1000, GIB, 1, 1000), Shape(16000, GIB, 1, 1000)
    judge = Fragmentation([(modest, MANY), (hungry, MANY)], {rich: 10, poor: 40})
    on_rich, on_poor = keys(judge, modest, empty(rich), empty(poor))
    assert on_poor > on_rich


def test_share_takes_the_free_part_that_others_use_least() -> None:
    node = NodeClass(64000, 256 * GIB, 3)
    judge = Fragmentation([(Shape(1000, GIB, 1, milli), MANY) for milli in (300, 350, 700)], {node: 10})
    rest = (node, 64000, 256 * GIB, (700, 350, 1000))
    # 300 of 350 waste 50; 300 of 700 leave 400, where one of 350 fits but the 700 does not; 300 of 1000 leave 700.
    assert judge.cards(node_rows(rest), Shape(1000, GIB, 1, 300)) == (2,)
    assert judge.cards(node_rows(rest), Shape(1000, GIB, 1, 350)) == (1,)


def test_whole_nodes_stay_whole_before_pods_were_seen() -> None:
    node = NodeClass(64000, 256 * GIB, 8)
    begun = (node, 60000, 250 * GIB, (1000,) * 7 + (0,))
    fresh = Fragmentation([], {node: 10})
    on_empty, on_begun = keys(fresh, Shape(1000, GIB, 1, 500), empty(node), begun)
    assert on_begun > on_empty


def test_of_equal_losses_the_fuller_node_wins() -> None:
    node = NodeClass(64000, 256 * GIB, 2)
    nothing_known = Fragmentation([], {})
    idle, begun = keys(nothing_known, Shape(1000, GIB, 1, 1000), empty(node), (node, 64000, 256 * GIB, (0, 1000)))
    assert begun > idle


def test_pod_without_cards_avoids_nodes_whose_cpu_others_need() -> None:
    judge = Fragmentation([(Shape(4000, GIB, 1, 1000), MANY)], {CLASSES[1]: 5})
    idle, full = empty(CLASSES[1]), (CLASSES[1], 8000, 256 * GIB, (0, 0, 0, 0))
    on_idle, on_full = keys(judge, Shape(30000, GIB), idle, (full[0], 32000, *full[2:]))
    assert on_full > on_idle
    assert judge.cards(node_rows(full), Shape(2000, GIB)) == ()


def test_same_pods_create_the_same_judge() -> None:
    learner = Learner()
    for i in range(200):
        learner.observe(SHAPES[i * i % len(SHAPES)])
    one, other = (Fragmentation(learner.counts(), dict.fromkeys(order, 5)) for order in (CLASSES, CLASSES[::-1]))
    rows = node_rows(*map(empty, CLASSES))
    assert one.worth(rows).tolist() == other.worth(rows).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_on_a_board_equal_keys_of_single_nodes(shape: Shape) -> None:
    cluster = [empty(kind) for kind in (*CLASSES, NEWCOMER)] * 3
    board = board_of(*cluster)
    found = board.keys(JUDGE, shape)
    assert found[: len(cluster)].tolist() == [keys(JUDGE, shape, node)[0] for node in cluster]
    assert isinstance(board.rows([0]), NodeRows)
    assert found.dtype == np.int64
