import random
from itertools import pairwise

import pytest

from scheduler.engine.learning.expected_pods import UNIT, Learner
from scheduler.engine.learning.shapes import Shape

A, B = Shape(1000, 0, 1, 250), Shape(2000, 0, 1, 500)


def taught(*shapes: Shape) -> Learner:
    learner = Learner()
    for shape in shapes:
        learner.observe(shape)
    return learner


def test_later_pods_count_more() -> None:
    assert taught(A).counts() == ((A, UNIT),)
    assert taught().counts() == ()
    older, newer = (dict(taught(*shapes).counts()) for shapes in ([A] * 500 + [B] * 500, [B] * 500 + [A] * 500))
    assert newer[A] == older[B] > older[A] == newer[B]
    assert older[A] == pytest.approx(UNIT * 4000 * (1 - 0.99975**500) * 0.99975**500, rel=0.001)


def test_what_does_not_come_again_is_forgotten() -> None:
    assert A in dict(taught(A, *[B] * 10_000).counts())
    assert A not in dict(taught(A, *[B] * 40_000).counts())


def test_memory_is_bounded_and_keeps_what_is_frequent() -> None:
    learner = taught(*[A] * 10)
    for cpu in range(10_000):
        learner.observe(Shape(cpu, 0, 1, 100))
    counts = dict(learner.counts())
    assert len(counts) <= 4096
    assert counts[A] > 9 * UNIT * 0.05


def test_the_same_pods_teach_the_same() -> None:
    chance = random.Random(1)
    pods = [Shape(chance.randrange(50), 0, 1, 100) for _ in range(2000)]
    assert taught(*pods).counts() == taught(*pods).counts()
    assert [shape for shape, _ in taught(*pods).counts()] == sorted(set(pods))


def test_new_tables_are_due_often_at_first() -> None:
    learner, at = Learner(), list[int]()
    for seen in range(1, 3001):
        learner.observe(A)
        if learner.due():
            assert not learner.due()
            at.append(seen)
    assert at[:8] == [1, 2, 3, 4, 6, 9, 13, 19]
    assert [later - earlier for earlier, later in pairwise(at) if earlier >= 1000] == [500] * 3
