"""Posts Events on a background thread, so that callers never wait for the API server.

The scheduler and the agents create one `Recorder` each. An Event may be dropped: nothing may depend on it.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

from mgpu.kube.client import Api, ApiError, Unreachable

log = logging.getLogger(__name__)

_QUEUE = 1000
_REPEAT_SECONDS = 60.0


class Recorder:
    """Posts core/v1 Events for `component`. An equal event on the same object is posted at most once a minute."""

    def __init__(self, api: Api, component: str, host: str = "") -> None:
        self._api = api
        self._source = {"component": component, **({"host": host} if host else {})}
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_QUEUE)
        self._stopped = False
        self._recent: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="events", daemon=True).start()

    def warn(self, regarding: dict[str, Any], reason: str, message: str) -> None:
        self.record(regarding, reason, message, "Warning")

    def record(self, regarding: dict[str, Any], reason: str, message: str, kind: str = "Normal") -> None:
        """Post an Event.

        Args:
            regarding: a `pod_reference` or a `node_reference`.
            reason: a reason in UpperCamelCase.
        """
        if self._is_repeated((regarding.get("uid", ""), reason, message)):
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        namespace = regarding.get("namespace") or "default"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{regarding['name']}.", "namespace": namespace},
            "involvedObject": regarding,
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "source": self._source,
            "reportingComponent": self._source["component"],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._queue.put_nowait((f"/api/v1/namespaces/{namespace}/events", event))
        except queue.Full:
            log.warning("dropping Event, since %d are queued: %s %s", _QUEUE, reason, message)

    def stop(self) -> None:
        """Post the queued events and end the thread. Later events are dropped."""
        self._stopped = True
        with contextlib.suppress(queue.Full):  # with a full queue, the thread ends after it has posted all
            self._queue.put_nowait(None)

    def _is_repeated(self, key: tuple[str, str, str]) -> bool:
        """Return whether an equal Event was posted in the last minute. If not, remember this one."""
        now = time.monotonic()
        with self._lock:
            while self._recent and now - next(iter(self._recent.values())) > _REPEAT_SECONDS:
                self._recent.popitem(last=False)
            if key in self._recent:
                return True
            self._recent[key] = now
            return False

    def _run(self) -> None:
        while not (self._stopped and self._queue.empty()):
            queued = self._queue.get()
            if queued is None:
                return
            path, event = queued
            try:
                self._api.create(path, event)
            except (ApiError, Unreachable) as error:
                log.warning("failed to post Event: %s: %s", event["message"], error)


def pod_reference(namespace: str, name: str, uid: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}


def node_reference(name: str, uid: str = "") -> dict[str, Any]:
    # The kubelet uses the name of the node as the uid in its Events, and `kubectl describe node` selects Events by it.
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid or name}
