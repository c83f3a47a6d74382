"""Pauses that grow before what goes again and again is made."""

from scheduler.mtgpupods.backoff import LONGEST_PAUSE, Paces
from tests.clock import Clock


def test_pauses_grow_to_the_longest_and_begin_anew_after_as_long() -> None:
    clock = Clock()
    paces, pauses = Paces(clock), []
    for _ in range(8):
        assert not paces.left("n1", "x")
        paces.slow("n1", "x")
        pauses.append(paces.left("n1", "x"))
        clock.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert not paces.left("n1", "y")
    clock.now += LONGEST_PAUSE
    paces.slow("n1", "x")
    assert paces.left("n1", "x") == 1
    paces.forget("n1", "x")
    assert not paces.left("n1", "x")


def test_what_was_long_ago_is_not_kept() -> None:
    clock = Clock()
    paces = Paces(clock)
    for i in range(1000):
        paces.slow("n1", str(i))
        clock.now += 10
    assert len(paces._paces) < 300
