"""Typed events between the parts of the agent.

A part publishes that something has changed and does not know its readers; `deviceplugin.agent` subscribes all readers
in one place. An event has no data. A reader reads the present state from the part that owns the state, so one reading
can answer several events.
"""

from collections.abc import Callable
from enum import Enum, auto


class Change(Enum):
    """The kinds of events. The description of a kind says what has changed."""

    CARDS = auto()
    """The GPUs of the node, or their health, have changed."""
    PODS = auto()
    """A pod of the node has been added, changed or removed."""
    PARTITIONS = auto()
    """The set of whole cards, or the set of existing slices, has changed."""
    HOLDINGS = auto()
    """The cards of unrecorded pods or remnants, or another fact that only the reporter reads, have changed."""
    RECONCILED = auto()
    """All pods have been listed, and the reconciler may have updated their receipts and acknowledgements."""


class Changes:
    """The listeners of each kind of event.

    Subscribe before any part is started. `publish` may be called from any thread, and listeners run on that thread.
    """

    def __init__(self) -> None:
        self._listeners: dict[Change, list[Callable[[], None]]] = {}

    def subscribe(self, change: Change, *listeners: Callable[[], None]) -> None:
        """Call these listeners whenever the change is published, in this order and after those subscribed earlier."""
        self._listeners.setdefault(change, []).extend(listeners)

    def publish(self, change: Change) -> None:
        """Call the listeners of this change, which must not block."""
        for listener in self._listeners.get(change, ()):
            listener()
