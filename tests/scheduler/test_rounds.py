"""A thread repeats its work until the process ends."""

import threading

from scheduler.rounds import run_rounds


def test_round_that_fails_does_not_end_the_work() -> None:
    stop = threading.Event()
    rounds: list[int] = []

    def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 3:
            stop.set()
        raise ValueError("one object")

    run_rounds("test", work, 0.0, stop)
    assert rounds == [0, 1, 2]


def test_stop_ends_the_pause() -> None:
    stop = threading.Event()
    run_rounds("test", stop.set, 3600.0, stop)


def test_stopped_process_does_no_work() -> None:
    stop = threading.Event()
    stop.set()
    rounds: list[int] = []
    run_rounds("test", lambda: rounds.append(1), 0.0, stop)
    assert not rounds
