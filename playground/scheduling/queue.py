"""The scheduling queue: active pods by priority and arrival, back-off, and those that wait for a change."""

import heapq
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Raw = Mapping[str, Any]


@dataclass(slots=True)
class Waiting:
    """A pod that is not bound yet. `tries` grows the back-off."""

    pod: Raw
    number: int
    tries: int = 0
    moves: int = field(default=0)

    @property
    def rank(self) -> tuple[int, int]:
        return -int(self.pod["spec"].get("priority") or 0), self.number


class Queue:
    """Thread-safe. Back-off doubles from `first` to `longest` seconds (kube-scheduler: 1 and 10).

    A pod that was refused waits until something changes (`changed`), and out its back-off.
    """

    def __init__(self, first: float = 1.0, longest: float = 10.0) -> None:
        self._first, self._longest = first, longest
        self._numbers = itertools.count()
        self._moves = 0
        self._pods: dict[str, Waiting] = {}
        self._active: list[tuple[tuple[int, int], str]] = []
        self._backoff: list[tuple[float, int, str]] = []
        self._refused: dict[str, float] = {}
        self._flying: set[str] = set()
        self._ready = threading.Condition()
        self._closed = False

    def put(self, pod: Raw) -> None:
        """A pod without a node, new or as it is now; a change of its spec or labels is a reason to try again."""
        uid = pod["metadata"]["uid"]
        with self._ready:
            known = self._pods.get(uid)
            if known is None:
                self._pods[uid] = known = Waiting(pod, next(self._numbers))
                heapq.heappush(self._active, (known.rank, uid))
                self._ready.notify()
                return
            moved = _essence(known.pod) != _essence(pod)
            known.pod = pod
            if moved and uid in self._refused:
                self._retry(uid, self._refused.pop(uid))

    def remove(self, uid: str) -> None:
        with self._ready:
            self._pods.pop(uid, None)
            self._refused.pop(uid, None)
            self._flying.discard(uid)

    def pop(self) -> Raw | None:
        """The next pod to schedule, as soon as there is one; None: closed."""
        with self._ready:
            while not self._closed:
                now = time.monotonic()
                while self._backoff and self._backoff[0][0] <= now:
                    uid = heapq.heappop(self._backoff)[2]
                    if uid in self._pods:
                        heapq.heappush(self._active, (self._pods[uid].rank, uid))
                while self._active:
                    uid = heapq.heappop(self._active)[1]
                    if uid in self._pods and uid not in self._flying:
                        self._flying.add(uid)
                        self._pods[uid].moves = self._moves
                        return self._pods[uid].pod
                self._ready.wait(self._backoff[0][0] - now if self._backoff else None)
        return None

    def refused(self, uid: str, *, error: bool = False) -> None:
        """The pod could not be scheduled. error: something failed, so that waiting for a change makes no sense."""
        with self._ready:
            known = self._pods.get(uid)
            self._flying.discard(uid)
            if known is None:
                return
            known.tries += 1
            until = time.monotonic() + min(self._first * 2 ** (known.tries - 1), self._longest)
            # What changed while the pod was being looked at may be just what it waits for.
            if error or known.moves != self._moves:
                self._retry(uid, until)
            else:
                self._refused[uid] = until

    def changed(self) -> None:
        """Something in the cluster moved: whoever was refused is tried again, after its back-off."""
        with self._ready:
            self._moves += 1
            for uid, until in self._refused.items():
                self._retry(uid, until)
            self._refused.clear()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def _retry(self, uid: str, until: float) -> None:
        heapq.heappush(self._backoff, (until, self._pods[uid].number, uid))
        self._ready.notify()


def _essence(pod: Raw) -> tuple[Any, ...]:
    meta = pod["metadata"]
    return pod["spec"], meta.get("labels"), meta.get("annotations")
