"""Where a node's cards come from: NVML, or a file of simulated ones, behind one interface."""

import threading
from typing import Protocol

from mgpu.model.cards import Card


class CardSource(Protocol):
    """Reads the cards of the node. `CardWatch` calls it on one thread.

    Attributes:
        driver: the driver's version; "" where there is none.
    """

    driver: str

    def read(self) -> tuple[Card, ...]:
        """Return the cards as they are now. Raises RetryLater (no answer yet) and BadObject (an invalid answer)."""

    def wait(self, stop: threading.Event) -> None:
        """Return when something may have changed: after a few seconds at most, and soon after `stop` is set."""

    def close(self) -> None:
        """Release what `read` has opened."""


class NodeGpus(Protocol):
    """The GPUs of the node, for those who need nothing else of `CardWatch`."""

    @property
    def gpus(self) -> tuple[Card, ...]:
        """All GPUs, also those that are cut into slices; empty until they are known. Thread-safe."""
