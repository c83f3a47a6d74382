"""Where a node's cards come from: NVML, or a file of simulated ones, behind one interface."""

import threading
from typing import Protocol

from mgpu.model.cards import Card


class CardSource(Protocol):
    """Used by one thread at a time. driver: the driver's version, "" where there is none."""

    driver: str

    def read(self) -> tuple[Card, ...]:
        """The cards as they are now. Raises RetryLater (no answer yet) and BadObject (an answer without sense)."""

    def wait(self, stop: threading.Event) -> None:
        """Return when something may have changed: a few seconds at most, and soon after `stop` is set."""

    def close(self) -> None: ...
