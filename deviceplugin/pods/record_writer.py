"""Writes exchanged allocation records and acknowledgements to the API server in the background.

`delivery.exchange` queues exchanged records, and `deviceplugin.agent` and `deviceplugin.reconciler` queue
acknowledgements. Each pod's annotations are retried separately: a pod whose PATCH always fails, for example because of
an admission webhook, must not delay those of other pods. First attempts and retries run on different threads, so that
retries that time out do not delay first attempts.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.pods.gpu_pod import GpuPod
from mgpu import dialects
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.pods import Pod

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
"""The pause before the first retry, and the longest pause between retries, in seconds."""
_PASSING = (401, 408, 429)
"""The 4xx statuses that are always retried. The others, except 409, are final: the pod is gone, or an admission webhook
denies the write."""
_CONFLICT = 409
"""This status is retried while the pod is on this node and has not ended. The API server returns it if the name belongs
to another pod now, and also after five conflicts with other writers of the pod."""


@dataclass(frozen=True, slots=True)
class _Record:
    """Annotations that wait to be written.

    Attributes:
        annotations: The values of the annotations, by key.
        due: The time of the next attempt, on the monotonic clock.
        pause: The pause after that attempt if it fails, in seconds.
    """

    pod: Pod
    annotations: Mapping[str, str]
    due: float = 0.0
    pause: float = _FIRST_PAUSE

    def followed_by(self, annotations: Mapping[str, str]) -> "_Record":
        return _Record(self.pod, {**self.annotations, **annotations}, self.due, self.pause)


class Pods(Protocol):
    """The part of `NodePods` that the writer needs."""

    def is_active(self, uid: str) -> bool:
        """Return whether the pod is on the node and has not ended."""

    def amend(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None:
        """Apply these annotations to the agent's copy of the pod, before the API server has them."""


class RecordWriter:
    """A queue of annotations with two threads that write them. It is thread-safe.

    Writes of one pod take effect in the order of the calls, and writes that wait are merged. `stop` drops annotations
    that are not written yet, since the next agent derives them again. The condition `_changed` guards all data.
    """

    def __init__(self, api: Api, pods: Pods) -> None:
        self._api = api
        self._pods = pods
        self._changed = threading.Condition()
        self._fresh: dict[str, _Record] = {}
        self._failed: dict[str, _Record] = {}
        self._in_flight: set[str] = set()
        self._stopped = False
        lanes = {"records": self._fresh, "records-retry": self._failed}
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=name, daemon=True) for name, lane in lanes.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2)

    def write(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None:
        """Add these annotations of the pod to the queue."""
        pod = gpu_pod.pod
        with self._changed:
            lane = self._failed if pod.uid in self._failed else self._fresh
            lane[pod.uid] = lane.get(pod.uid, _Record(pod, {})).followed_by(annotations)
            self._changed.notify_all()

    def acknowledge(self, gpu_pod: GpuPod) -> None:
        """Write the acknowledgement of the pod's allocation record, if its dialect has one and it is missing."""
        if gpu_pod.request and (annotations := dialects.acknowledgement(gpu_pod.pod, gpu_pod.request)):
            self._pods.amend(gpu_pod, annotations)
            self.write(gpu_pod, annotations)

    def _run(self, lane: dict[str, _Record]) -> None:
        while (record := self._next(lane)) is not None:
            retry = self._attempt(record)
            with self._changed:
                self._in_flight.discard(record.pod.uid)
                if retry:
                    self._put_back(record)
                self._changed.notify_all()

    def _next(self, lane: dict[str, _Record]) -> _Record | None:
        """Remove and return the next record that is due; None after `stop`. Skip pods that are being written."""
        with self._changed:
            while not self._stopped:
                ready = [record for uid, record in lane.items() if uid not in self._in_flight]
                record = min(ready, key=lambda record: record.due, default=None)
                wait = None if record is None else record.due - time.monotonic()
                if record is not None and wait is not None and wait <= 0:
                    self._in_flight.add(record.pod.uid)
                    return lane.pop(record.pod.uid)
                self._changed.wait(wait)
        return None

    def _put_back(self, record: _Record) -> None:
        """Schedule a retry. It includes newer annotations of the pod, so that they are not written before it."""
        newer = self._fresh.pop(record.pod.uid, None)
        annotations = {**record.annotations, **(newer.annotations if newer else {})}
        due = time.monotonic() + record.pause
        pause = min(record.pause * 2, _LONGEST_PAUSE)
        self._failed[record.pod.uid] = _Record(record.pod, annotations, due, pause)

    def _attempt(self, record: _Record) -> bool:
        """Write the record, and return whether it must be retried."""
        pod = record.pod
        # The UID is a precondition, so that another pod of the same name is not changed.
        patch = {"metadata": {"uid": pod.uid, "annotations": dict(record.annotations)}}
        try:
            self._api.patch(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", patch)
        except (ApiError, Unreachable) as error:
            log.warning("allocation record not written: %s", error, extra={"pod": pod.uid})
            if isinstance(error, ApiError) and error.status == _CONFLICT:
                return self._pods.is_active(pod.uid)
            return not isinstance(error, ApiError) or error.status >= 500 or error.status in _PASSING
        log.info("allocation record written", extra={"pod": pod.uid})
        return False
