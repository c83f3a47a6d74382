"""The typed events that the ClusterCache publishes when its data changes.

`scheduler.runtime` subscribes the controllers to the public events. The parts of the cache exchange the internal
events. Except for ObjectWarning, an event only names an object, and the subscriber reads the current state of the
object from the cache (level-triggered).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mgpu.model.groups import Group

E = TypeVar("E")
Warn = Callable[[dict[str, Any], str, str], None]
"""A function of an object reference, a reason and a message. It records a Kubernetes Event of type Warning, and returns
at once."""


@dataclass(frozen=True, slots=True)
class CardsFreed:
    """Cards of this node may be free after a change that kube-scheduler does not observe, such as that of a Device."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeMayFit:
    """More pods may fit on this node: a pod has left it, or a label has changed. kube-scheduler observes this too."""

    node: str


@dataclass(frozen=True, slots=True)
class PartitionsChanged:
    """The partitioned cards of this node or their holdings may have changed, or mgpu no longer partitions the node."""

    node: str


@dataclass(frozen=True, slots=True)
class MtgpuPodsAffected:
    """Something has changed that the MtgpuPods or the occupy pods of this node depend on."""

    node: str


@dataclass(frozen=True, slots=True)
class PodUndecided:
    """The pod with this UID is bound without cards and needs a late binding decision."""

    uid: str


@dataclass(frozen=True, slots=True)
class PodResizing:
    """The pod with this UID has annotations of a live resize, and has changed."""

    uid: str


@dataclass(frozen=True, slots=True)
class ObjectWarning:
    """The cache asks for a Kubernetes Event of type Warning for an object.

    Attributes:
        regarding: The reference to the object.
    """

    regarding: dict[str, Any]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class HoldingsChanged:
    """Internal: a holding on this node was added, replaced or released, or its pod is being deleted.

    Attributes:
        group: The same-card group of the pod, or None if it has none.
    """

    node: str
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """Internal: a partition plan for this node was added or dropped, so the node's cards must be derived again."""

    node: str


@dataclass(frozen=True, slots=True)
class RemnantsEnded:
    """Internal: the last remnant of this namespace has ended."""

    namespace: str


class Publisher:
    """Calls the subscribers of an event's type, in the order in which they subscribed.

    The cache publishes while it holds its lock, so events arrive in the order of the changes. A subscriber must return
    at once. It may read from the cache; usually it adds a name to a queue.
    """

    def __init__(self) -> None:
        self._subscribers: dict[type, list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call the subscriber with each event of exactly this type. Not thread-safe: call it before the first event."""
        self._subscribers.setdefault(kind, []).append(subscriber)

    def publish(self, event: object) -> None:
        """Call all subscribers of the event's type, if there are any."""
        for subscriber in self._subscribers.get(type(event), ()):
            subscriber(event)
