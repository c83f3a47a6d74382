"""Counts and weights of the pods that are expected."""

import random
from itertools import pairwise

import pytest

from scheduler.engine.learning.expected_pods import ONE, UNIT, Learner, WeightedType, pods_per_empty_node, weigh_types
from scheduler.engine.learning.shapes import NodeClass, Shape
from tests.scheduler.engine.learning.clusters import GIB

A, B = Shape(1000, 0, 1, 250), Shape(2000, 0, 1, 500)


def taught(*shapes: Shape) -> Learner:
    learner = Learner()
    for shape in shapes:
        learner.observe(shape)
    return learner


def test_learner_counts_later_pods_more() -> None:
    assert taught(A).counts() == ((A, UNIT),)
    assert taught().counts() == ()
    older, newer = (dict(taught(*shapes).counts()) for shapes in ([A] * 500 + [B] * 500, [B] * 500 + [A] * 500))
    assert newer[A] == older[B] > older[A] == newer[B]
    assert older[A] == pytest.approx(UNIT * 4000 * (1 - 0.99975**500) * 0.99975**500, rel=0.001)


def test_learner_forgets_shapes_that_stay_away() -> None:
    assert A in dict(taught(A, *[B] * 10_000).counts())
    assert A not in dict(taught(A, *[B] * 40_000).counts())


def test_learner_is_bounded_and_keeps_frequent_shapes() -> None:
    learner = taught(*[A] * 10)
    for cpu in range(10_000):
        learner.observe(Shape(cpu, 0, 1, 100))
    counts = dict(learner.counts())
    assert len(counts) <= 4096
    assert counts[A] > 9 * UNIT * 0.05


def test_learner_counts_the_same_for_the_same_pods() -> None:
    chance = random.Random(1)
    pods = [Shape(chance.randrange(50), 0, 1, 100) for _ in range(2000)]
    assert taught(*pods).counts() == taught(*pods).counts()
    assert [shape for shape, _ in taught(*pods).counts()] == sorted(set(pods))


def test_learner_is_due_often_at_first() -> None:
    learner, at = Learner(), list[int]()
    for seen in range(1, 3001):
        learner.observe(A)
        if learner.due():
            assert not learner.due()
            at.append(seen)
    assert at[:8] == [1, 2, 3, 4, 6, 9, 13, 19]
    assert [later - earlier for earlier, later in pairwise(at) if earlier >= 1000] == [500] * 3


T4, BIG = NodeClass(8000, 64 * GIB, 2, "T4", 16 * GIB), NodeClass(96000, 512 * GIB, 8, "A100", 80 * GIB)
CLASSES = {T4: 3, BIG: 100}
ANYWHERE, BOUND = Shape(1000, GIB, 1, 500), Shape(1000, GIB, 1, 500, models=("T4",))
MANY = 5000 * UNIT


def of(weighed: tuple[WeightedType, ...], shape: Shape) -> WeightedType:
    return next(one for one in weighed if one.shape == shape)


def test_pods_per_empty_node_by_cards_cpu_and_memory() -> None:
    assert pods_per_empty_node(Shape(1000, GIB, 1, 300), BIG) == 24
    assert pods_per_empty_node(Shape(11000, GIB, 1, 300), BIG) == 8
    assert pods_per_empty_node(Shape(1000, 200 * GIB, 1, 300), BIG) == 2
    assert pods_per_empty_node(Shape(1000, GIB, 3, 1000), BIG) == 2
    assert pods_per_empty_node(Shape(1000, GIB, 1, 0, 8 * GIB), T4) == 4
    assert (
        pods_per_empty_node(BOUND, BIG)
        == pods_per_empty_node(Shape(0, 0, 4, 1000), T4)
        == pods_per_empty_node(Shape(1000, GIB), BIG)
        == 0
    )


def test_type_that_fits_few_nodes_weighs_more_than_frequent_one() -> None:
    weighed = weigh_types([(ANYWHERE, 2 * MANY), (BOUND, MANY)], CLASSES)
    assert of(weighed, BOUND).fit_weight > 5 * of(weighed, ANYWHERE).fit_weight
    assert of(weighed, BOUND).copy_weight > 5 * of(weighed, ANYWHERE).copy_weight


def test_weights_sum_to_the_same_for_any_scale_of_counts() -> None:
    for scale in (1, 7):
        weighed = weigh_types([(ANYWHERE, scale * MANY), (BOUND, MANY)], CLASSES)
        assert sum(one.fit_weight for one in weighed) == pytest.approx(ONE)
        assert sum(one.copy_weight for one in weighed) == pytest.approx(ONE * 0.5)  # the mean pod: half a card


def test_expected_number_of_rare_type_exceeds_its_count() -> None:
    weighed = weigh_types([(ANYWHERE, 10_000 * UNIT), (BOUND, 4 * UNIT)], CLASSES)
    assert of(weighed, BOUND).number == 8
    assert of(weighed, ANYWHERE).number == 10_200


def test_whole_node_type_is_expected_until_enough_was_seen() -> None:
    unseen = Shape(BIG.cpu, BIG.memory, 8, 1000)
    assert [one.shape for one in weigh_types([], CLASSES)] == [unseen]
    early, later = (of(weigh_types([(ANYWHERE, n * UNIT)], CLASSES), unseen).number for n in (10, 900))
    assert early > later > 0
    assert unseen not in [one.shape for one in weigh_types([(ANYWHERE, 1000 * UNIT)], CLASSES)]


def test_weigh_types_without_pods_or_nodes() -> None:
    assert weigh_types([], {}) == ()
    assert weigh_types([(Shape(1000, GIB), UNIT)], {NodeClass(4000, GIB, 0): 1}) == ()  # neither wants a card
    assert [one.shape for one in weigh_types([(BOUND, MANY)], {BIG: 1})] == [BOUND]  # where it may run is not there yet


def test_weigh_types_is_bounded_and_ignores_order() -> None:
    counts = [(Shape(cpu, GIB, 1, 500), MANY) for cpu in range(1, 400)]
    weighed = weigh_types(counts, CLASSES)
    assert len(weighed) == 256
    assert weigh_types(reversed(counts), CLASSES) == weighed
    assert weigh_types(counts, dict(reversed(CLASSES.items()))) == weighed
