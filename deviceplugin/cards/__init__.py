"""The interface to the cards of a node, which come from NVML or from a file of simulated cards.

`deviceplugin.main` chooses the source, and `cards.card_watch` reads it.
"""

import threading
from typing import Protocol

from mgpu.model.cards import Card


class CardSource(Protocol):
    """A source of cards. `CardWatch` calls its methods on one thread; any thread may read `driver`.

    Attributes:
        driver: The version of NVIDIA's driver; "" if there is none.
    """

    driver: str

    def read(self) -> tuple[Card, ...]:
        """Return the present cards. Raises RetryLater if there is no answer yet, and BadObject if cards are invalid."""

    def wait(self, stop: threading.Event) -> None:
        """Wait until the cards may have changed or `stop` is set, but at most a few seconds."""

    def close(self) -> None:
        """Release the resources that `read` has opened."""


class NodeGpus(Protocol):
    """The part of `CardWatch` on which `isolation` and `pods` depend."""

    @property
    def gpus(self) -> tuple[Card, ...]:
        """All GPUs, including partitioned ones; empty if they have not been read yet. Thread-safe."""
