"""Typed events between the parts of the agent.

A part publishes that something has changed, and does not know who reads it; `deviceplugin.agent` subscribes the readers
in one place. An event carries no data: a reader that is woken reads the present state of the part that owns it, so it
does not matter whether two events arrive as one.
"""

from collections.abc import Callable
from enum import Enum, auto


class Change(Enum):
    """What has changed."""

    CARDS = auto()
    """The GPUs of the node, or their health."""
    PODS = auto()
    """A pod of the node, or whether all of them are known."""
    PARTITIONS = auto()
    """Which cards are whole, or which slices there are."""
    HOLDINGS = auto()
    """What pods hold without an allocation record, or anything else that only the Node reports."""
    RECONCILED = auto()
    """The reconciler has looked at the pods, all of which are known."""


class Changes:
    """Subscribe before any part is started; publish from any thread. Listeners run on the publisher's thread."""

    def __init__(self) -> None:
        self._listeners: dict[Change, list[Callable[[], None]]] = {}

    def subscribe(self, change: Change, *listeners: Callable[[], None]) -> None:
        """Call these listeners, in this order and after earlier ones, whenever the change is published."""
        self._listeners.setdefault(change, []).extend(listeners)

    def publish(self, change: Change) -> None:
        """Call the listeners of this change. They must not block."""
        for listener in self._listeners.get(change, ()):
            listener()
