"""Pauses that grow before what goes again and again is made."""

from scheduler.mtgpupods.fairness import LONGEST_PAUSE, Backoffs
from tests.clock import Clock


def test_pauses_grow_to_the_longest_and_begin_anew_after_as_long() -> None:
    clock = Clock()
    backoffs, pauses = Backoffs(clock), []
    for _ in range(8):
        assert not backoffs.remaining("n1", "x")
        backoffs.extend("n1", "x")
        pauses.append(backoffs.remaining("n1", "x"))
        clock.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert not backoffs.remaining("n1", "y")
    clock.now += LONGEST_PAUSE
    backoffs.extend("n1", "x")
    assert backoffs.remaining("n1", "x") == 1
    backoffs.reset("n1", "x")
    assert not backoffs.remaining("n1", "x")


def test_what_was_long_ago_is_not_kept() -> None:
    clock = Clock()
    backoffs = Backoffs(clock)
    for i in range(1000):
        backoffs.extend("n1", str(i))
        clock.now += 10
    assert len(backoffs._pauses) < 300
