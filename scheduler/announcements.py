"""Makes kube-scheduler retry rejected pods when cards come free without a change that kube-scheduler observes.

kube-scheduler retries a pod that an extender has rejected as soon as an object of a core kind changes (schedule_one.go
records the plugin ExtenderName; defaultEnqueueExtension in framework.go registers this plugin for all events). If
nothing changes, it retries the pod after five minutes. A Device is not of a core kind. Of a Node, only changes of
allocatable, labels, taints, conditions and annotations count (events.go, NodeSchedulingPropertiesChange). So
`Announcements` changes the annotation `mgpu.io/cards-changed` of a Node, which has no other purpose.

There is also a race: kube-scheduler may observe a change (a pod ends, a label changes) before this process does. Then
it retries the pod at once, gets an answer that does not consider the change, and does not retry again. `Announcements`
covers this case too.

`scheduler.runtime` runs `Announcements` on a thread and passes the cache's events to it, and the extender reports
rejected pods. kube-scheduler retries all rejected pods after each announcement, whichever node it names. So
announcements must stay rare, and one is enough for all changes of the last second.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from scheduler.cluster.events import CardsFreed, NodeMayFit

log = logging.getLogger(__name__)

ANNOTATION = "mgpu.io/cards-changed"
NODE_PAUSE_SECONDS = 5.0
"""The pause between two announcements of one node, and before an announcement that failed is repeated."""
WATCH_LAG_SECONDS = 10.0
"""How much later than kube-scheduler this process may observe a change, for example after a broken watch."""
PAUSE_SECONDS = 1.0
"""The pause between two announcements."""


class Announcements:
    """Announces nodes in the thread that calls `run`, which calls `work`.

    Any thread may call the other methods, which return at once. `_changed` guards `_due`, `_announced` and
    `_last_announced`. `_last_rejection` and `_last_change` need no lock, because they are always replaced as a whole.

    Args:
        may_decide: Raises RetryLater while this replica must not decide. Changes are then ignored, because the replica
            that decides observes the same changes.
    """

    def __init__(self, api: Api, may_decide: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._may_decide = may_decide
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}  # By node, when to announce it.
        self._announced: dict[str, float] = {}  # By node, when it was announced; dropped after NODE_PAUSE_SECONDS.
        self._last_announced = -WATCH_LAG_SECONDS
        self._last_rejection = -WATCH_LAG_SECONDS
        # The node of the last NodeMayFit event, and the time of that event.
        self._last_change: tuple[str, float] = ("", -WATCH_LAG_SECONDS)

    def cards_freed(self, event: CardsFreed) -> None:
        self.announce(event.node)

    def node_may_fit(self, event: NodeMayFit) -> None:
        """Announce the node if a pod was rejected shortly before.

        kube-scheduler may have observed the change earlier, and retried the pod before this process knew of the change.
        """
        now = self._clock()
        self._last_change = (event.node, now)
        if now < self._last_rejection + WATCH_LAG_SECONDS:
            self._announce_for_race(event.node)

    def pod_rejected(self, filter_seconds: float) -> None:
        """Note that a pod fits on no node. If the filter may have missed the last change, announce the changed node.

        Args:
            filter_seconds: How long the filter has taken. It may have missed a change during this time.
        """
        self._last_rejection = self._clock()
        node, changed_at = self._last_change
        if changed_at >= self._last_rejection - filter_seconds:
            self._announce_for_race(node)

    def _announce_for_race(self, node: str) -> None:
        """Announce the node, but not before PAUSE_SECONDS have passed since the last announcement of any node.

        If another announcement is due by then, this one is left out, because the announcement of any node makes
        kube-scheduler retry all rejected pods.
        """
        if not self._decides():
            return
        with self._changed:
            when = max(self._clock(), self._last_announced + PAUSE_SECONDS)
            if not any(due <= when for due in self._due.values()):
                self._due[node] = when
                self._changed.notify()

    def announce(self, node: str) -> None:
        """Announce the node as soon as the pauses are over, if this replica decides."""
        if not self._decides():
            return
        with self._changed:
            after_pause = self._announced.get(node, -NODE_PAUSE_SECONDS) + NODE_PAUSE_SECONDS
            self._due.setdefault(node, max(self._clock(), after_pause, self._last_announced + PAUSE_SECONDS))
            self._changed.notify()

    def _decides(self) -> bool:
        try:
            self._may_decide()
        except RetryLater:
            return False
        return True

    def run(self, stop: threading.Event) -> None:
        """Announce nodes until `stop` is set. Call `wake` after setting it."""
        while not stop.is_set():
            self.work()
            with self._changed:
                if not stop.is_set():
                    self._changed.wait(self._wait_seconds())

    def wake(self) -> None:
        """Make `run` check its stop event."""
        with self._changed:
            self._changed.notify_all()

    def work(self) -> None:
        """Announce one node if any is due. That covers the others, since kube-scheduler retries all rejected pods."""
        with self._changed:
            now = self._clock()
            self._announced = {node: at for node, at in self._announced.items() if at + NODE_PAUSE_SECONDS > now}
            if all(when > now for when in self._due.values()):
                return
            nodes = sorted(self._due, key=lambda node: (self._due[node], node))
            self._due.clear()
            self._announced |= dict.fromkeys(nodes, now)
            self._last_announced = now
        while nodes and not self._write(nodes):
            del nodes[0]  # the node is gone

    def _wait_seconds(self) -> float | None:
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def _write(self, nodes: Sequence[str]) -> bool:
        """Announce the first of the nodes, and return whether it exists. After a transient error, retry all of them."""
        change = {"metadata": {"annotations": {ANNOTATION: datetime.now(UTC).isoformat(timespec="milliseconds")}}}
        try:
            self._api.patch(f"/api/v1/nodes/{quote(nodes[0], safe='')}", change)
        except ApiError as error:
            if error.status == 404:
                return False
            if error.status == 429 or error.status >= 500:
                self._retry(nodes, error)
            else:
                log.warning("cannot announce free cards: %s", error, extra={"node": nodes[0]})
        except Unreachable as error:
            self._retry(nodes, error)
        return True

    def _retry(self, nodes: Sequence[str], error: Exception) -> None:
        log.warning("cannot announce free cards, will retry: %s", error, extra={"node": nodes[0]})
        for node in nodes:
            self.announce(node)
