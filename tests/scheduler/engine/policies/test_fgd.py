"""Fragmentation gradient descent as published, against figures worked out by hand and a literal reading."""

from fractions import Fraction
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.learning.node_board import UNFIT
from scheduler.engine.learning.shapes import NodeClass, Shape, milli_per_card
from scheduler.engine.policies.fgd import Fgd, TypicalPod, typical_pods
from tests.examples import examples
from tests.scheduler.engine.learning.clusters import CLASSES, SHAPES, Node, node_rows, nodes

SHARE, PAIR, CPU_ONLY = Shape(4000, 0, 1, 500), Shape(4000, 0, 2, 1000), Shape(2000, 0)
BY_HAND = Fgd((TypicalPod(SHARE, 6), TypicalPod(CPU_ONLY, 3), TypicalPod(PAIR, 1)))
NODE: Node = (NodeClass(8000, 0, 2), 8000, 0, (1000, 400))


def test_fragments_computed_by_hand() -> None:
    # share: 400 on the card that is too full; pair and CPU-only: all 1400 that idle.
    assert BY_HAND.fragments(node_rows(NODE)).tolist() == [6 * 400 + 3 * 1400 + 1 * 1400]


def test_score_computed_by_hand() -> None:
    # on card 0 free is (600, 400): 6·400 + 4·1000 = 6400, 160 less per pod: int(100·sigmoid(0.16)) = 53;
    # on card 1 (1000, 0): 6·0 + 4·1000 = 4000, 400 less: int(100·sigmoid(0.4)) = 59.
    small = Shape(1000, 0, 1, 400)
    assert BY_HAND.keys(node_rows(NODE), small).tolist() == [59]
    assert BY_HAND.cards(node_rows(NODE), small) == (1,)
    after = node_rows((NODE[0], 7000, 0, (600, 400)), (NODE[0], 7000, 0, (1000, 0)))
    assert BY_HAND.rate_changes(node_rows(NODE), after).tolist() == [53, 59]


def test_node_without_cpu_is_all_fragments() -> None:
    assert BY_HAND.fragments(node_rows((NODE[0], 3999, 0, (1000, 400)))).tolist() == [10 * 1400]


def test_no_change_scores_50() -> None:
    assert BY_HAND.rate_changes(node_rows(NODE), node_rows(NODE)).tolist() == [50]


def test_of_equal_cards_the_first_is_chosen() -> None:
    node = (NodeClass(8000, 0, 3), 8000, 0, (300, 1000, 1000))
    assert BY_HAND.cards(node_rows(node), Shape(0, 0, 1, 1000)) == (1,)
    assert BY_HAND.cards(node_rows(node), PAIR) == (1, 2)
    assert BY_HAND.cards(node_rows(node), CPU_ONLY) == ()


def test_typical_pods_are_the_most_frequent_95_percent() -> None:
    counts = {SHARE: 60, PAIR: 30, SHARE._replace(memory=5): 4, CPU_ONLY: 1, Shape(1, 0, 1, 1): 5}
    assert typical_pods(counts) == (
        TypicalPod(SHARE, 64),
        TypicalPod(PAIR, 30),
        TypicalPod(Shape(1, 0, 1, 1), 5),
    )
    assert typical_pods({SHARE: 95, PAIR: 5}) == (TypicalPod(SHARE, 95),)
    assert typical_pods({}) == ()


def test_of_equally_frequent_typical_pods_the_larger_comes_first() -> None:
    assert [pod.shape for pod in typical_pods({CPU_ONLY: 1, PAIR: 1, SHARE: 1})] == [PAIR, SHARE, CPU_ONLY]


def fragmented(node: Node, typical: tuple[TypicalPod, ...]) -> int:
    """The page's sentence, word by word, times the number of typical pods."""
    kind, cpu, _, free = node
    amount = 0
    for pod in typical:
        need = milli_per_card(pod.shape, kind)
        fits = need and cpu >= pod.shape.cpu and sum(left >= need for left in free) >= pod.shape.cards
        amount += pod.number * sum(left for left in free if not fits or left < (need or 0))
    return amount


def scored(before: int, after: int, total: int) -> int:
    return int(100 / (1 + exp(-Fraction(before - after, 1000 * total))))


@examples(30)
@given(
    nodes(),
    st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(1, 9)), min_size=1, max_size=6, unique_by=lambda t: t[0]),
    st.sampled_from(SHAPES),
)
def test_property_fgd_equals_literal_reading(node: Node, typical: list[tuple[Shape, int]], shape: Shape) -> None:
    pods = tuple(TypicalPod(*row) for row in typical)
    judge, rows = Fgd(pods), node_rows(node)
    before = fragmented(node, pods)
    assert judge.fragments(rows).tolist() == [before]
    kind, cpu, memory, free = node
    need = milli_per_card(shape, kind)
    fitting = [card for card, left in enumerate(free) if need is not None and left >= need]
    if need is None or cpu < shape.cpu or memory < shape.memory or len(fitting) < shape.cards:
        assert judge.keys(rows, shape).tolist() == [UNFIT]
        return
    if shape.cards == 1:
        ways: list[tuple[int, ...]] = [(card,) for card in fitting]
    else:
        ways = [tuple(sorted(sorted(fitting, key=lambda card: (free[card], card))[: shape.cards]))]
    scores = {}
    for way in ways:
        left = tuple(amount - need * (card in way) for card, amount in enumerate(free))
        scores[way] = scored(before, fragmented((kind, cpu - shape.cpu, memory, left), pods), judge.total)
    best = max(scores.values())
    assert judge.keys(rows, shape).tolist() == [best]
    assert judge.cards(rows, shape) == next(way for way in ways if scores[way] == best)


@pytest.mark.parametrize("number", [1, 7])
def test_keys_of_many_nodes_equal_keys_of_single_nodes(number: int) -> None:
    judge = Fgd(tuple(TypicalPod(shape, number) for shape in SHAPES))
    many = [(kind, kind.cpu, kind.memory, (1000 - 200 * i,) * kind.cards) for i in range(4) for kind in CLASSES]
    for shape in SHAPES:
        assert judge.keys(node_rows(*many), shape).tolist() == [int(judge.keys(node_rows(n), shape)[0]) for n in many]


def test_typical_pods_are_at_most_256() -> None:
    """A tenant chooses how many shapes come: with 3,000 a call took 540 ms in place of 6.5."""
    counts = {SHARE._replace(cpu=cpu): 1 for cpu in range(3000)} | {PAIR: 5}
    found = typical_pods(counts)
    assert len(found) == 256
    assert found[0] == TypicalPod(PAIR, 5)
