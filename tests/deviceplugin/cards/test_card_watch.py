"""The thread that keeps cards current."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deviceplugin.cards.card_watch import CardWatch, keep_vanished
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, Problem, RetryLater
from tests.builders import card, cards

Step = tuple[Card, ...] | Exception


class Script:
    """A source that tells what the test puts in, one step for each read, and hangs between."""

    driver = ""

    def __init__(self, *steps: Step) -> None:
        self.steps: queue.Queue[Step | None] = queue.Queue()
        self.closed = threading.Event()
        for step in steps:
            self.steps.put(step)

    def read(self) -> tuple[Card, ...]:
        step = self.steps.get()
        if isinstance(step, Exception):
            raise step
        return step or ()

    def wait(self, stop: threading.Event) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


@contextmanager
def watching(script: Script) -> Iterator[tuple[CardWatch, "queue.Queue[tuple[Card, ...]]", "queue.Queue[str]"]]:
    changes: queue.Queue[tuple[Card, ...]] = queue.Queue()
    problems: queue.Queue[str] = queue.Queue()
    watch = CardWatch(script, changes.put, problems.put, first_pause=0.001)
    watch.start()
    yield watch, changes, problems
    script.steps.put(None)
    watch.stop()
    assert script.closed.wait(60)


def test_watch_retries_and_keeps_the_last_good_cards() -> None:
    script = Script(RetryLater("no driver"), RetryLater("no driver"), cards(2))
    with watching(script) as (watch, changes, problems):
        assert changes.get(timeout=60) == cards(2)
        assert problems.get(timeout=60) == "no driver"
        script.steps.put(BadObject([Problem("f", "bad")]))
        assert problems.get(timeout=60) == "f: bad"
        assert watch.cards == cards(2)
        assert watch.problem == "f: bad"
        assert problems.empty()


def test_only_changes_are_reported() -> None:
    script = Script(cards(2), cards(2), (card(0), card(1, healthy=False)))
    with watching(script) as (watch, changes, _):
        assert changes.get(timeout=60) == cards(2)
        assert changes.get(timeout=60) == (card(0), card(1, healthy=False))
        assert watch.problem == ""
        assert not watch.stalled


def test_vanished_card_stays_as_unhealthy_unless_its_index_is_taken() -> None:
    assert keep_vanished(cards(2), (card(0),)) == (card(0), card(1, healthy=False))
    other = Card(1, "GPU-other", "", 1)
    assert keep_vanished(cards(2), (card(0), other)) == (card(0), other)
    assert keep_vanished((), ()) == ()
