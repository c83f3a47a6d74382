"""Paced work sleeps between its steps."""

from scheduler.background import Pace


def test_pace_sleeps_in_proportion_to_the_work() -> None:
    rests: list[float] = []
    pace = Pace(3, rests.append)
    while not rests:
        pace()
    assert 0.006 < rests[0] <= 0.015
