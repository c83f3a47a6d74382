"""Reads the node's cards on a thread of its own, so that a driver that hangs blocks nothing else.

`deviceplugin.node_state` creates one `CardWatch`. The agent reads its cards mainly through `deviceplugin.node_devices`.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from deviceplugin.cards import CardSource
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, RetryLater

log = logging.getLogger(__name__)

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_STALLED_SECONDS = 90.0
"""If a reading and the pause after it take longer than this together, the driver counts as hanging. The pause is at
most `_LONGEST_PAUSE`."""


class CardWatch:
    """A thread that reads a card source again and again, from `start` to `stop`. Any thread may read its attributes.

    Args:
        source: The source of the cards. Only the thread of this object calls its methods.
        changed: A function that the thread calls when the cards have changed.
        failed: A function that the thread calls with the text of each new problem.
        first_pause: The pause after the first failure, in seconds. Each further failure doubles the pause, up to
            `_LONGEST_PAUSE`.

    Attributes:
        cards: The cards that were read last, with the missing ones (`with_missing_cards`); None if they have not been
            read yet.
        problem: The reason why `cards` may be out of date; "" if the last reading succeeded.
    """

    def __init__(
        self,
        source: CardSource,
        changed: Callable[[], None],
        failed: Callable[[str], None],
        first_pause: float = _FIRST_PAUSE,
    ) -> None:
        self._source = source
        self._on_change = changed
        self._on_failure = failed
        self._first_pause = first_pause
        self._stop = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cards", daemon=True)
        self.cards: tuple[Card, ...] | None = None
        self.problem = "the cards have not been read yet"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait at most two seconds for it, since the driver may hang."""
        self._stop.set()
        self._thread.join(timeout=2)

    @property
    def gpus(self) -> tuple[Card, ...]:
        """The same as `cards`, but empty if they have not been read yet."""
        return self.cards or ()

    @property
    def is_stalled(self) -> bool:
        """Whether the driver counts as hanging."""
        return time.monotonic() - self._beat > _STALLED_SECONDS

    def _run(self) -> None:
        pause = self._first_pause
        while not self._stop.is_set():
            self._beat = time.monotonic()
            if self._read():
                pause = self._first_pause
                self._source.wait(self._stop)
            else:
                self._stop.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        self._source.close()

    def _read(self) -> bool:
        try:
            cards = with_missing_cards(self.cards or (), self._source.read())
        except (BadObject, RetryLater) as error:
            if str(error) != self.problem:
                self.problem = str(error)
                self._on_failure(self.problem)
            return False
        self.problem = ""
        if cards != self.cards:
            self.cards = cards
            log.info("cards changed", extra={"cards": len(cards), "healthy": sum(card.healthy for card in cards)})
            self._on_change()
        return True


def with_missing_cards(before: tuple[Card, ...], now: tuple[Card, ...]) -> tuple[Card, ...]:
    """Return the cards of `now`, and those cards of `before` that are not in `now`, marked as unhealthy.

    So pods keep their shares of a missing card, and new pods do not get that card. A missing card is left out if
    another card has its index now.
    """
    uuids, indexes = {card.uuid for card in now}, {card.index for card in now}
    gone = (replace(c, healthy=False) for c in before if c.uuid not in uuids and c.index not in indexes)
    return tuple(sorted((*now, *gone), key=lambda card: card.index))
