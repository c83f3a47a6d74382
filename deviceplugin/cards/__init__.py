"""The interface to the cards of a node, which come from NVML or from a file of simulated cards.

`deviceplugin.main` chooses the source, and `cards.card_watch` reads it.
"""

import threading
from typing import Protocol

from mgpu.model.cards import Card


class CardSource(Protocol):
    """A source of cards. `CardWatch` calls it on one thread.

    Attributes:
        driver: the driver's version; "" if there is none.
    """

    driver: str

    def read(self) -> tuple[Card, ...]:
        """Return the present cards. Raises RetryLater (no answer yet) and BadObject (an invalid answer)."""

    def wait(self, stop: threading.Event) -> None:
        """Wait until the cards may have changed: at most a few seconds, and not after `stop` is set."""

    def close(self) -> None:
        """Release the resources that `read` has opened."""


class NodeGpus(Protocol):
    """The part of `CardWatch` that most packages need."""

    @property
    def gpus(self) -> tuple[Card, ...]:
        """All GPUs, partitioned ones included; empty if they have not been read yet. Thread-safe."""
