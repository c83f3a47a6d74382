"""Best fit by hand; `binpack` and `spread` are what the live scheduler's functions say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from playground.simulate.openb.experiment_policies import BestFit, Fullness
from scheduler.engine import node_score, place, policy_named
from scheduler.engine.learning.node_board import UNFIT, NodeBoard
from scheduler.engine.learning.shapes import NodeClass, Shape
from tests.builders import state
from tests.examples import examples


def board(*free: tuple[int, ...], cpu: int = 8000) -> NodeBoard:
    """Nodes that have this much free, of 8 CPUs and the given number of cards."""
    found = NodeBoard()
    for row, cards in enumerate(free):
        found.put(row, NodeClass(8000, 100, len(cards)), cpu, 100, cards)
    return found


def test_best_fit_scores_as_published() -> None:
    # 100 − 50·(cpu left / 8000) − 50·(gpu left / 2000), rounded down
    pod = Shape(4000, 10, 1, 500)
    nodes = board((1000, 1000), (600, 0), (400, 400))
    assert nodes.keys(BestFit(), pod).tolist()[:3] == [100 - 25 - 38, 100 - 25 - 3, UNFIT]
    assert BestFit().cards(board((1000, 500, 700)).rows([0]), pod) == (1,)
    assert BestFit().cards(board((1000, 500, 700)).rows([0]), pod._replace(cards=2)) == (1, 2)
    assert nodes.keys(BestFit(), Shape(1000, 10)).tolist()[:3] == [100 - 44 - 50, 100 - 44 - 15, 100 - 44 - 20]


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@examples(20)
@given(
    used=st.lists(st.sampled_from((0, 250, 400, 600, 1000)), min_size=1, max_size=4),
    cards=st.integers(1, 3),
    core=st.sampled_from((100, 400, 500, 1000)),
)
def test_fullness_scores_as_the_live_scheduler(policy: str, used: list[int], cards: int, core: int) -> None:
    states = [state(index, amount) for index, amount in enumerate(used)]
    request = GpuRequest("mgpu", (ContainerRequest("c", cards, core, 0),))
    placement = place(request, states, policy_named(policy, 100))
    nodes, pod = board(tuple(1000 - amount for amount in used)), Shape(0, 0, cards, core)
    key = nodes.keys(Fullness(policy), pod).tolist()[0]
    if isinstance(placement, Placement):
        assert Fullness(policy).cards(nodes.rows([0]), pod) == placement.cards("c")
        assert key == node_score(request, placement, states, policy, 100)
    else:
        assert key == UNFIT


def test_fullness_scores_pods_without_cards() -> None:
    nodes = board((1000, 500), ())
    assert nodes.keys(Fullness("binpack"), Shape(1, 1)).tolist()[:2] == [2, 0]
    assert Fullness("binpack").cards(nodes.rows([1]), Shape(1, 1)) == ()
