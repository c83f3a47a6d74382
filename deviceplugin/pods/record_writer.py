"""Writes changed allocation records back to the API server in the background.

Each pod's record is retried by itself: a pod whose PATCH always fails, since an admission webhook answers 500 for its
namespace, must not keep the records of the node's other pods from being written. First attempts and retries run on
threads of their own, so that retries that time out delay no first attempt.
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
_PASSING = (401, 408, 429)
"""The 4xx refusals that another attempt may change. The others (the pod is gone, an admission webhook denies the write)
are final, except for 409: the API server gives it where the pod is another one by now, and also where it has lost five
races with other writers of the pod. So that write is tried again for as long as the pod is on this node."""
_CONFLICT = 409


@dataclass(frozen=True, slots=True)
class _Record:
    """Annotations of a pod that are still to be written.

    Attributes:
        due: when, on the monotonic clock.
        pause: seconds before the next retry.
    """

    pod: Pod
    annotations: Mapping[str, str]
    due: float = 0.0
    pause: float = _FIRST_PAUSE

    def followed_by(self, annotations: Mapping[str, str]) -> "_Record":
        return _Record(self.pod, {**self.annotations, **annotations}, self.due, self.pause)


class Pods(Protocol):
    """What is needed of `NodePods`."""

    def is_active(self, uid: str) -> bool:
        """Return whether the pod is on the node and has not ended."""

    def amend(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None:
        """Let the pod's record say this before the API server says so."""


class RecordWriter:
    """Thread-safe. Writes of one pod take effect in the order in which they were given; those that wait are merged.

    What is not written when it stops is derived and written again by the next agent.
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
        """Make the pod's annotations say this, without waiting for it."""
        pod = gpu_pod.pod
        with self._changed:
            lane = self._failed if pod.uid in self._failed else self._fresh
            lane[pod.uid] = lane.get(pod.uid, _Record(pod, {})).followed_by(annotations)
            self._changed.notify_all()

    def acknowledge(self, gpu_pod: GpuPod) -> None:
        """Write the acknowledgement that the pod's dialect has for an allocation record, if it has one."""
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
        """Wait for the record that is due first and that the other thread is not writing. Return None when stopped."""
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
        """Retry the record after a pause, merged with what was given meanwhile, which must not overtake it."""
        newer = self._fresh.pop(record.pod.uid, None)
        annotations = {**record.annotations, **(newer.annotations if newer else {})}
        due = time.monotonic() + record.pause
        pause = min(record.pause * 2, _LONGEST_PAUSE)
        self._failed[record.pod.uid] = _Record(record.pod, annotations, due, pause)

    def _attempt(self, record: _Record) -> bool:
        """Write the record, and return whether it must be retried."""
        pod = record.pod
        # The UID is a precondition: a pod that was created again under the same name is not written.
        patch = {"metadata": {"uid": pod.uid, "annotations": dict(record.annotations)}}
        try:
            self._api.patch(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", patch)
        except (ApiError, Unreachable) as error:
            log.warning("record not written: %s", error, extra={"pod": pod.uid})
            if isinstance(error, ApiError) and error.status == _CONFLICT:
                return self._pods.is_active(pod.uid)
            return not isinstance(error, ApiError) or error.status >= 500 or error.status in _PASSING
        log.info("record written", extra={"pod": pod.uid})
        return False
