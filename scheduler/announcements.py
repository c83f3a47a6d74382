"""Cards that came free without kube-scheduler noticing: an annotation of their Node says so.

kube-scheduler looks again at a pod that an extender rejected when an object of a core kind changes
(schedule_one.go: the pod is filed under ExtenderName; framework.go, defaultEnqueueExtension: that is registered for
all events, without a hint), and else only after five minutes. A Device is no core kind. Of an update of a Node the
allocatable, labels, taints, conditions and annotations count (events.go, NodeSchedulingPropertiesChange); the
annotation is the one that means nothing to anybody else.

Of what it does notice (a pod that ends, a label) it may know before this process: it asks at once about a pod that
waits for just that, and is told what was so before. Then it asks no more, so this is announced too.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

ANNOTATION = "mgpu.io/cards-changed"
PAUSE = 5.0
"""Seconds between two announcements of one node, and before the next try of one that failed."""
BEHIND_SECONDS = 10.0
"""How long after kube-scheduler this process may come to know something: a watch that broke rests for so long."""
SPACING = 1.0
"""Seconds between two announcements, of any nodes, that only that makes necessary: after one all pods are looked at.
No call takes so long.
"""


class Announcements:
    """One thread; `add` never waits. may_decide raises RetryLater while this process must not write."""

    def __init__(self, api: Api, may_decide: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._may_decide, self._clock = api, may_decide, clock
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._made: dict[str, float] = {}
        self._last = self._refused = -BEHIND_SECONDS
        self._left = "", -BEHIND_SECONDS

    def refused(self) -> None:
        """A pod was told just now that it fits nowhere; what has come while that was worked out it was not told."""
        now = self._refused = self._clock()
        node, at = self._left
        if now < at + SPACING:
            self._wake(node)

    def left(self, node: str) -> None:
        """Room may have come on this node by something that kube-scheduler notices too."""
        self._left = node, self._clock()
        if self._left[1] < self._refused + BEHIND_SECONDS:
            self._wake(node)

    def _wake(self, node: str) -> None:
        """Whoever was refused, by a change of this node if no other one comes as soon."""
        try:
            self._may_decide()
        except RetryLater:
            return
        with self._changed:
            when = max(self._clock(), self._last + SPACING)
            if not any(due <= when for due in self._due.values()):
                self._due[node] = when
                self._changed.notify()

    def add(self, node: str) -> None:
        """Cards of this node have come free. Nothing where another replica decides: it has seen the same."""
        try:
            self._may_decide()
        except RetryLater:
            return
        with self._changed:
            self._due.setdefault(node, max(self._clock(), self._made.get(node, 0.0) + PAUSE))
            self._changed.notify()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`, which must be followed by `wake`."""
        while not stop.is_set():
            self.work()
            with self._changed:
                if not stop.is_set():
                    self._changed.wait(self._pause())

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def work(self) -> None:
        """Announce all that is due now."""
        with self._changed:
            now = self._clock()
            self._made = {node: made for node, made in self._made.items() if made + PAUSE > now}
            due = sorted(node for node, when in self._due.items() if when <= now)
            for node in due:
                del self._due[node]
                self._made[node] = self._last = now
        for node in due:
            self._announce(node)

    def _pause(self) -> float | None:
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def _announce(self, node: str) -> None:
        change = {"metadata": {"annotations": {ANNOTATION: datetime.now(UTC).isoformat(timespec="milliseconds")}}}
        try:
            self._api.patch(f"/api/v1/nodes/{quote(node, safe='')}", change)
        except ApiError as error:
            if error.status == 429 or error.status >= 500:
                self._later(node, error)
            elif error.status != 404:
                log.warning("cards of %s came free, which cannot be announced: %s", node, error)
        except Unreachable as error:
            self._later(node, error)

    def _later(self, node: str, error: Exception) -> None:
        log.warning("cards of %s came free, to be announced later: %s", node, error)
        self.add(node)
