"""Writes changed records back to the API server, behind everything else, one after the other in the order given."""

import logging
import queue
import threading
from collections.abc import Mapping

from deviceplugin.pods import GpuPod
from mgpu.kube import Api, ApiError, Unreachable

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_PASSING = (401, 408, 429)
"""The refusals of 4xx that asking again may change. The others (the pod is gone or another one, an admission webhook
minds) would hold up the records of all other pods."""


class RecordWriter:
    """On a thread of its own. What was not written when it stops is derived and written again by the next agent."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._queue: queue.Queue[tuple[GpuPod, Mapping[str, str]] | None] = queue.Queue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._queue.put(None)
        self._thread.join(timeout=2)

    def write(self, known: GpuPod, annotations: Mapping[str, str]) -> None:
        """Make the pod's annotations say this."""
        self._queue.put((known, annotations))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._stop.is_set():
            self._write(*item)

    def _write(self, known: GpuPod, annotations: Mapping[str, str]) -> None:
        pod, pause = known.pod, _FIRST_PAUSE
        # The UID is a precondition: never a pod that was created anew under the name.
        patch = {"metadata": {"uid": pod.uid, "annotations": dict(annotations)}}
        while not self._stop.is_set():
            try:
                self._api.patch(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", patch)
            except (ApiError, Unreachable) as error:
                log.warning("record not written: %s", error, extra={"pod": pod.uid})
                if isinstance(error, ApiError) and error.status < 500 and error.status not in _PASSING:
                    return
                self._stop.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                log.info("record written: it says what the pod runs on", extra={"pod": pod.uid})
                return
