"""The typed events with which the ClusterCache tells the rest of the scheduler what has changed.

`scheduler.runtime` registers the subscribers. Controllers are level-triggered: an event only names the object to look
at, and the subscriber reads its present state from the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mgpu.model.groups import Group

E = TypeVar("E")
Warn = Callable[[dict[str, Any], str, str], None]
"""(object reference, reason, message): records a Kubernetes Event of type Warning, and returns at once."""


@dataclass(frozen=True, slots=True)
class CardsFreed:
    """Cards of this node came free by a change that kube-scheduler cannot observe, such as one of a Device."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeMayFit:
    """More pods may fit on this node since a pod left it or a label changed, which kube-scheduler observes too."""

    node: str


@dataclass(frozen=True, slots=True)
class PartitionsChanged:
    """The partitioned cards of this node changed, or what is held of them, or whether mgpu partitions the node."""

    node: str


@dataclass(frozen=True, slots=True)
class MtgpuPodsAffected:
    """Something changed that matters to the MtgpuPods or the occupy pods of this node."""

    node: str


@dataclass(frozen=True, slots=True)
class PodUndecided:
    """The pod with this UID is bound, has no cards and has not started: it needs a late binding decision."""

    uid: str


@dataclass(frozen=True, slots=True)
class ObjectWarning:
    """A user should know this about an object; it becomes a Kubernetes Event of type Warning."""

    regarding: dict[str, Any]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class HoldingsChanged:
    """Inside the cache: what is held on this node changed. group: the same-card group of the holding that changed."""

    node: str
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class RemnantsEnded:
    """Inside the cache: the last pod of this namespace that was deleted by force has ended."""

    namespace: str


class Publisher:
    """Calls the subscribers of an event's type, in the order in which they subscribed.

    The cache publishes while it holds its lock, so that events come in the order of the changes. A subscriber must
    return at once: it may read from the cache, and usually puts a name into a queue.
    """

    def __init__(self) -> None:
        self._subscribers: dict[type, list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> None:
        """Call the subscriber with each event of exactly this type. Not thread-safe: call it before events come."""
        self._subscribers.setdefault(kind, []).append(subscriber)

    def publish(self, event: object) -> None:
        """Call all subscribers of this event; without any, the event is dropped."""
        for subscriber in self._subscribers.get(type(event), ()):
            subscriber(event)
