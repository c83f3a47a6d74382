"""Work that gives way."""

from scheduler.background import Pace


def test_it_works_for_a_little_and_rests_as_long_as_told() -> None:
    rests: list[float] = []
    pace = Pace(3, rests.append)
    while not rests:
        pace()
    assert 0.006 < rests[0] <= 0.015
