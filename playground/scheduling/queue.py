"""The state of the scheduling loop: the queue of unbound pods, and the cache of the nodes and their reserved resources.

Both are thread-safe. `loop` uses them.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from mgpu.model.compute_resources import add_requests, requests_of

Raw = Mapping[str, Any]


class Event(Enum):
    """A change of the cluster that may make a refused pod schedulable."""

    NODE = auto()
    """A node was added, or anything of it that filters consider has changed except for its annotations."""
    ANNOTATION = auto()
    """The annotations of a node have changed."""
    POD = auto()
    """A pod that was bound is gone or has ended."""
    CLAIM = auto()
    SLICE = auto()
    CLASS = auto()


ALL_EVENTS = frozenset(Event)


@dataclass(slots=True)
class Waiting:
    """A pod that is not bound yet.

    Attributes:
        pod: The pod as it was last observed.
        number: The pod's number in the order of arrival.
        tries: The number of failed attempts, from which the back-off is computed.
        events: The events since the pod's last attempt began that may help the pod.
        wanted: The events for which the pod waits if it was refused.
    """

    pod: Raw
    number: int
    tries: int = 0
    events: set[Event] = field(default_factory=set)
    wanted: frozenset[Event] = ALL_EVENTS

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of the queue: the higher priority first, then the earlier arrival."""
        return -int(self.pod["spec"].get("priority") or 0), self.number


class Queue:
    """The unbound pods, ordered by priority and arrival.

    A refused pod waits for its back-off. Unless an error was the reason, it also waits for a change of the pod itself
    or for an event that concerns the reason, for `patience` seconds at most. The back-off doubles from `first` to
    `longest` seconds. The defaults are those of kube-scheduler. `_ready` guards all attributes.
    """

    def __init__(self, first: float = 1.0, longest: float = 10.0, patience: float = 300.0) -> None:
        self._first = first
        self._longest = longest
        self._patience = patience
        self._numbers = itertools.count()
        self._pods: dict[str, Waiting] = {}
        self._active: list[tuple[tuple[int, int], str]] = []
        self._backoff: list[tuple[float, int, str]] = []
        self._refused: dict[str, float] = {}
        self._flying: set[str] = set()  # The UIDs of the pods that `pop` has returned and that are being scheduled.
        self._ready = threading.Condition()
        self._closed = False

    def put(self, pod: Raw) -> None:
        """Add or update an unbound pod. If its spec, labels or annotations change, a refused pod is tried again.

        It still waits for its back-off.
        """
        uid = pod["metadata"]["uid"]
        with self._ready:
            known = self._pods.get(uid)
            if known is None:
                self._pods[uid] = known = Waiting(pod, next(self._numbers))
                heapq.heappush(self._active, (known.rank, uid))
                self._ready.notify()
                return
            moved = _pod_essence(known.pod) != _pod_essence(pod)
            known.pod = pod
            if moved and uid in self._refused:
                self._retry(uid, self._refused.pop(uid))

    def remove(self, uid: str) -> None:
        """Forget a pod that was bound, was deleted or has ended."""
        with self._ready:
            self._pods.pop(uid, None)
            self._refused.pop(uid, None)
            self._flying.discard(uid)

    def pop(self) -> Raw | None:
        """Wait for the next pod to schedule and return it, or None if the queue is closed."""
        with self._ready:
            while not self._closed:
                now = time.monotonic()
                self._lose_patience(now)
                while self._backoff and self._backoff[0][0] <= now:
                    uid = heapq.heappop(self._backoff)[2]
                    if uid in self._pods:
                        heapq.heappush(self._active, (self._pods[uid].rank, uid))
                while self._active:
                    uid = heapq.heappop(self._active)[1]
                    if uid in self._pods and uid not in self._flying:
                        self._flying.add(uid)
                        self._pods[uid].events.clear()
                        return self._pods[uid].pod
                until = [self._backoff[0][0]] if self._backoff else []
                until += [refused + self._patience for refused in self._refused.values()]
                self._ready.wait(min(until) - now if until else None)
        return None

    def refused(self, uid: str, *, error: bool = False, wanted: frozenset[Event] = ALL_EVENTS) -> None:
        """Put back a pod that could not be scheduled.

        Args:
            error: Whether the reason is an error, such as a failed request, and not that the pod fits no node. After an
                error the pod is tried again even if the cluster does not change.
            wanted: The events after which the pod may fit.
        """
        with self._ready:
            known = self._pods.get(uid)
            self._flying.discard(uid)
            if known is None:
                return
            known.tries += 1
            until = time.monotonic() + min(self._first * 2 ** (known.tries - 1), self._longest)
            known.wanted = wanted
            # If the cluster changed during the attempt, the pod may fit now.
            if error or known.events & wanted:
                self._retry(uid, until)
            else:
                self._refused[uid] = until

    def changed(self, event: Event = Event.NODE, helps: Callable[[Raw], bool] = lambda _: True) -> None:
        """Note a change of the cluster. Refused pods that wait for it are then tried again after their back-off.

        Args:
            helps: Returns whether the change may help a pod.
        """
        with self._ready:
            for uid in self._flying & self._pods.keys():
                if helps(self._pods[uid].pod):
                    self._pods[uid].events.add(event)
            for uid, until in list(self._refused.items()):
                if event in self._pods[uid].wanted and helps(self._pods[uid].pod):
                    del self._refused[uid]
                    self._retry(uid, until)

    def close(self) -> None:
        """Make every call of `pop` return None."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def _lose_patience(self, now: float) -> None:
        """Try the pods again that have waited for an event for too long."""
        for uid, until in [row for row in self._refused.items() if row[1] + self._patience <= now]:
            del self._refused[uid]
            self._retry(uid, until)

    def _retry(self, uid: str, until: float) -> None:
        heapq.heappush(self._backoff, (until, self._pods[uid].number, uid))
        self._ready.notify()


def _pod_essence(pod: Raw) -> tuple[Any, ...]:
    meta = pod["metadata"]
    return pod["spec"], meta.get("labels"), meta.get("annotations")


class Cache:
    """The nodes, and the resources that the pods on them reserve.

    A pod reserves its resources as soon as its node is chosen; Kubernetes calls it *assumed* until the watch shows the
    binding. `_lock` guards all attributes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, Raw] = {}
        self._pods: dict[str, tuple[str, dict[str, int]]] = {}
        self._used: dict[str, dict[str, int]] = {}
        self._seen: set[str] = set()

    def set_node(self, node: Raw) -> Event | None:
        """Store a node. Return the event if anything that scheduling considers has changed."""
        with self._lock:
            name = node["metadata"]["name"]
            before = self._nodes.get(name)
            self._nodes[name] = node
        if before is None or _node_essence(before) != _node_essence(node):
            return Event.NODE
        annotations = (row["metadata"].get("annotations") for row in (before, node))
        return Event.ANNOTATION if next(annotations) != next(annotations) else None

    def remove_node(self, name: str) -> None:
        """Remove a node. The reservations of its pods stay until the pods are gone."""
        with self._lock:
            self._nodes.pop(name, None)

    def bound(self, pod: Raw) -> None:
        """Store a pod that the API server shows as bound to a node."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            self._seen.add(uid)
            self._put(uid, pod["spec"]["nodeName"], pod)

    def assume(self, pod: Raw, node: str) -> None:
        """Reserve the resources of a pod that is being bound to `node`."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            if uid not in self._seen:
                self._put(uid, node, pod)

    def forget(self, uid: str) -> None:
        """Undo `assume` after a failed binding, unless the API server shows the pod as bound."""
        with self._lock:
            if uid not in self._seen:
                self._take(uid)

    def gone(self, uid: str) -> bool:
        """Remove a pod that was deleted or has ended. Return whether it reserved anything."""
        with self._lock:
            self._seen.discard(uid)
            return self._take(uid)

    def snapshot(self) -> list[tuple[Raw, Mapping[str, int]]]:
        """Return every node, sorted by name, with its reserved resources. Later changes do not affect the result."""
        with self._lock:
            return [(self._nodes[name], self._used.get(name, {})) for name in sorted(self._nodes)]

    def _put(self, uid: str, node: str, pod: Raw) -> None:
        self._take(uid)
        requests = requests_of(pod)
        self._pods[uid] = node, requests
        self._used[node] = add_requests(self._used.get(node, {}), requests)

    def _take(self, uid: str) -> bool:
        node, requests = self._pods.pop(uid, ("", {}))
        if node:
            self._used[node] = add_requests(self._used[node], {name: -amount for name, amount in requests.items()})
        return bool(node)


def _node_essence(node: Raw) -> tuple[Any, ...]:
    meta = node["metadata"]
    return node.get("spec"), meta.get("labels"), (node.get("status") or {}).get("allocatable")
