"""The thread that follows the cards of a node."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deviceplugin.cards.card_watch import CardWatch, with_missing_cards
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, Problem, RetryLater
from tests.builders import card, cards

Reading = tuple[Card, ...] | Exception
ONE_UNHEALTHY = (card(0), card(1, healthy=False))


class FakeSource:
    """A source that returns or raises one reading after the other, and hangs when there is none."""

    driver = ""

    def __init__(self, *readings: Reading) -> None:
        self.readings: queue.Queue[Reading] = queue.Queue()
        self.closed = threading.Event()
        for reading in readings:
            self.readings.put(reading)

    def read(self) -> tuple[Card, ...]:
        reading = self.readings.get()
        if isinstance(reading, Exception):
            raise reading
        return reading

    def wait(self, stop: threading.Event) -> None: ...

    def close(self) -> None:
        self.closed.set()


@contextmanager
def watching(source: FakeSource) -> Iterator[tuple[CardWatch, queue.Queue[Reading], queue.Queue[str]]]:
    changes: queue.Queue[Reading] = queue.Queue()
    problems: queue.Queue[str] = queue.Queue()
    watch = CardWatch(source, lambda: changes.put(watch.gpus), problems.put, first_pause=0.001)
    watch.start()
    yield watch, changes, problems
    source.readings.put(())
    watch.stop()
    assert source.closed.wait(60)


def test_watch_retries_and_keeps_the_last_good_cards() -> None:
    source = FakeSource(RetryLater("no driver"), RetryLater("no driver"), cards(2))
    with watching(source) as (watch, changes, problems):
        assert changes.get(timeout=60) == cards(2)
        assert problems.get(timeout=60) == "no driver"
        source.readings.put(BadObject([Problem("f", "bad")]))
        assert problems.get(timeout=60) == "f: bad"
        assert watch.cards == cards(2)
        assert watch.problem == "f: bad"
        assert problems.empty()


def test_only_changes_are_reported() -> None:
    with watching(FakeSource(cards(2), cards(2), ONE_UNHEALTHY)) as (watch, changes, _):
        assert changes.get(timeout=60) == cards(2)
        assert changes.get(timeout=60) == ONE_UNHEALTHY
        assert not watch.problem
        assert not watch.is_stalled


def test_missing_card_stays_unhealthy_unless_another_has_its_index() -> None:
    assert with_missing_cards(cards(2), (card(0),)) == ONE_UNHEALTHY
    other = Card(1, "GPU-other", "", 1)
    assert with_missing_cards(cards(2), (card(0), other)) == (card(0), other)
    assert with_missing_cards((), ()) == ()
