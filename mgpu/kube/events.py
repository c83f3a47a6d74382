"""Posts Events on a background thread, so that callers never wait for the API server.

An Event may be dropped, so nothing may depend on it. The scheduler, the agents and the playground post Events with a
`Recorder`.
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
"""The most Events that wait to be posted. Further Events are dropped."""
_REPEAT_SECONDS = 60.0
"""The time for which an equal Event on the same object is not posted again."""


class Recorder:
    """Posts core/v1 Events. An equal Event on the same object is posted at most once a minute.

    Thread-safe. The lock guards `_recent`.

    Args:
        host: The node of the source; "" if it has none.
    """

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
        """Queue an Event to be posted. The Event is dropped if the queue is full.

        Args:
            regarding: The object of the Event, such as the result of `pod_reference` or `node_reference`.
            reason: The reason in UpperCamelCase.
            message: The message, of which at most 1,024 characters are posted.
            kind: The type of the Event, `Normal` or `Warning`.
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
        """Let the thread post the queued Events and end. Return without waiting for it. Later Events may be dropped."""
        self._stopped = True
        with contextlib.suppress(queue.Full):  # If the queue is full, the thread ends when the queue is empty.
            self._queue.put_nowait(None)

    def _is_repeated(self, key: tuple[str, str, str]) -> bool:
        """Return whether an equal Event was recorded in the last minute. If not, remember this one."""
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
    # The kubelet uses the name of the node as the uid in its Events, and `kubectl describe node` selects by it.
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid or name}
