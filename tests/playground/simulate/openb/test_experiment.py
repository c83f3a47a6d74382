"""What arrives, what is placed, and what is counted."""

from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from playground.simulate.openb.experiment import ExperimentNodes, arrivals, run
from playground.simulate.openb.experiment_policies import POLICIES, endless, pick, shuffled
from playground.simulate.openb.trace import Trace, demand, read_trace
from scheduler.engine.learning.shapes import NodeClass, Shape
from tests.playground.simulate.openb.traces import generated


def test_arrivals_contain_every_pod_once_then_draw_with_replacement(trace: Trace) -> None:
    found = arrivals(trace, Random(1), 1.3)
    assert Counter(found[:6]) == Counter(trace.pods)
    assert set(found[6:]) <= set(trace.pods)
    assert sum(map(demand, found[:-1])) < 13_000 <= sum(map(demand, found))


def test_arrivals_for_a_small_load_are_part_of_the_trace(trace: Trace) -> None:
    found = arrivals(trace, Random(1), 0.1)
    assert Counter(found) <= Counter(trace.pods)
    assert sum(map(demand, found[:-1])) < 1000 <= sum(map(demand, found))


def test_random_order_is_the_same_on_every_platform() -> None:
    assert shuffled(range(6), Random(42)) == [1, 3, 2, 0, 5, 4]
    assert list(islice(endless("ab", Random(7)), 8)) == list("bababaab")
    assert [pick(range(100), random) for random in [Random(3)] for _ in range(3)] == [23, 54, 36]


def test_curve_is_the_mean_over_arrivals_of_a_percentage() -> None:
    trace = Trace((NodeClass(8000, 8, 2),), (Shape(1000, 1, 1, 1000),))
    assert run(trace, "bestfit", 0, 1.5).curve == {50: 50.0, 100: 100.0, 150: 100.0}
    fine = Trace((NodeClass(10**6, 10**6, 2),), (Shape(1, 1, 1, 4),))
    curve = run(fine, "bestfit", 0, 0.05).curve
    assert curve[1] == pytest.approx((0.6 + 0.8 + 1.0 + 1.2 + 1.4) / 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_run_with_a_seed_is_reproducible(policy: str, trace: Trace) -> None:
    first = run(trace, policy, 3, 2.0)
    again = run(trace, policy, 3, 2.0)
    assert first.curve == again.curve
    assert (first.policy, first.seed) == (policy, 3)
    assert 50 < max(first.curve.values()) <= 100
    assert run(trace, policy, 4, 2.0).curve != first.curve


def test_take_beyond_what_is_free_is_refused() -> None:
    nodes = ExperimentNodes([NodeClass(2000, 2, 2, "T4")])
    nodes.take(Shape(1000, 1, 1, 600), 0, (0,))
    for pod, cards in (
        (Shape(1000, 1, 1, 600), (0,)),
        (Shape(1001, 1, 1, 100), (1,)),
        (Shape(1000, 2, 1, 100), (1,)),
        (Shape(1000, 1, 2, 100), (1,)),
        (Shape(1000, 1, 2, 100), (1, 1)),
        (Shape(1000, 1, 1, 100, models=("G2",)), (1,)),
    ):
        with pytest.raises(ValueError, match=r"Shape\("):
            nodes.take(pod, 0, cards)
    nodes.take(Shape(1000, 1, 2, 400), 0, (0, 1))
    assert nodes.board.rows([0]).free.tolist() == [[0, 600]]


def test_while_there_is_room_for_all_every_pod_is_placed(tmp_path: Path) -> None:
    """In a cluster of hundreds of nodes, from files with all columns of the real trace."""
    trace = read_trace(*generated(tmp_path, Random(1), nodes=300, pods=2_000))
    assert (len(trace.nodes), len(trace.pods)) == (300, 2_000)
    assert run(trace, "fgd", 42, 0.2).curve[19] == pytest.approx(19, abs=0.02)
