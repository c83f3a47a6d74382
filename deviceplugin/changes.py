"""Typed events between the parts of the agent.

`deviceplugin.node_state` creates one `Changes`. A part publishes that something has changed, without reference to the
readers, and `deviceplugin.agent` subscribes all readers in one place. An event has no data. A reader reads the present
state of the part that owns it, so it does not matter if two events arrive as one.
"""

from collections.abc import Callable
from enum import Enum, auto


class Change(Enum):
    """The kinds of events."""

    CARDS = auto()
    """The GPUs of the node, or their health."""
    PODS = auto()
    """A pod of the node, or whether all of them have been listed."""
    PARTITIONS = auto()
    """Which cards are whole, or which slices exist."""
    HOLDINGS = auto()
    """The cards of pods without allocation records, or another fact that only the reporter reads."""
    RECONCILED = auto()
    """The reconciler has gone through the pods, all of which have been listed."""


class Changes:
    """The listeners of each kind of event.

    Subscribe before any part is started. `publish` may be called from any thread, and listeners run on that thread.
    """

    def __init__(self) -> None:
        self._listeners: dict[Change, list[Callable[[], None]]] = {}

    def subscribe(self, change: Change, *listeners: Callable[[], None]) -> None:
        """Call these listeners, in this order and after earlier ones, whenever the change is published."""
        self._listeners.setdefault(change, []).extend(listeners)

    def publish(self, change: Change) -> None:
        """Call the listeners of this change. They must not block."""
        for listener in self._listeners.get(change, ()):
            listener()
