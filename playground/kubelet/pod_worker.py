"""The kubelet's pod workers: a thread per admitted pod that starts its containers, reports its status and ends it.

`kubelet` creates a `PodWorker` for each pod and calls `update`, `poke` and `remove`; tests call `sync` themselves.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from playground.container_runtime import Container, CreateError, Runtime
from playground.kubelet.device_manager import AdmissionError, DeviceManager, PluginError
from playground.kubelet.status import ContainerView, Json, pod_status, sidecar

log = logging.getLogger(__name__)

RUN_SECONDS = "playground.mgpu.io/run-seconds"
"""Pod annotation: the app containers end with exit code 0 after so many seconds."""
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_KILLED = 137


@dataclass(frozen=True, slots=True)
class Machine:
    """What the workers of one node share."""

    node: str
    host_ip: str
    api: Api
    runtime: Runtime
    devices: DeviceManager
    events: Recorder
    retry_seconds: float


class PodWorker:
    """Follows one pod.

    ended: whether no container of the pod runs any more and none will; true from the start for a rejected pod.
    """

    def __init__(self, machine: Machine, pod: Json, *, ended: bool = False) -> None:
        self._machine = machine
        self._pod = pod
        self.ended = ended
        self._wake = threading.Condition()
        self._dirty = True
        self._gone = False
        self._deleted = False
        self._stop = threading.Event()
        self._waiting: dict[str, tuple[str, str]] = {}
        self._retry_at: dict[str, float] = {}
        self._reported: Json = {}
        self._thread = threading.Thread(target=self._run, name=f"pod {pod['metadata']['name']}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def update(self, pod: Json) -> None:
        self._pod = pod
        self.poke()

    def remove(self) -> None:
        """Kill what runs and report nothing, because the pod's object is gone."""
        self._gone = True
        self.poke()

    def poke(self) -> None:
        with self._wake:
            self._dirty = True
            self._wake.notify()

    def stop(self) -> None:
        """End the thread, because the kubelet stops; containers go on."""
        self._stop.set()
        self.poke()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        pause: float | None = None
        while not (self._stop.is_set() or self._deleted or (self._gone and self.ended)):
            with self._wake:
                self._wake.wait_for(lambda: self._dirty, timeout=pause)
                self._dirty = False
            if self._stop.is_set():
                return
            try:
                pause = self.sync()
            except Unreachable as error:
                log.warning("pod %s: %s", self._pod["metadata"]["name"], error)
                pause = self._machine.retry_seconds

    def sync(self) -> float | None:
        """Bring the pod one step further. Return the seconds until the next call is due, None to wait for a change."""
        pod = self._pod
        phase = (pod.get("status") or {}).get("phase")
        if self._gone or pod["metadata"].get("deletionTimestamp") or phase in ("Succeeded", "Failed"):
            self._terminate(pod)
            return None
        if self.ended:
            return None
        if not self._reported:
            self._report(pod)
        self._complete(pod)
        if self._initialize(pod):
            for container in pod["spec"]["containers"]:
                self._ensure(pod, container)
        if self._report(pod) in ("Succeeded", "Failed"):
            self._finish(pod)
        return self._next(pod)

    def _initialize(self, pod: Json) -> bool:
        """Run init containers one after the other, each of which ends at once.

        Returns: whether the app containers may start.
        """
        for container in pod["spec"].get("initContainers") or ():
            latest = self._machine.runtime.latest(pod["metadata"]["uid"], container["name"])
            if not sidecar(container) and latest is not None and latest.exit_code == 0:
                continue
            if not self._ensure(pod, container):
                return False
            if not sidecar(container):
                started = self._machine.runtime.latest(pod["metadata"]["uid"], container["name"])
                if started:
                    self._machine.runtime.end(started)
                    # The real kubelet too reports the end before it starts the next container.
                    self._report(pod)
        return True

    def _ensure(self, pod: Json, container: Json) -> bool:
        """Start the container unless it runs or has ended for good. Return False while its start fails."""
        name = container["name"]
        latest = self._machine.runtime.latest(pod["metadata"]["uid"], name)
        if latest and (latest.running or not self._restarts(pod, container, latest.exit_code)):
            return True
        if time.monotonic() < self._retry_at.get(name, 0.0):
            return False
        try:
            options = self._machine.devices.run_options(pod, container)
        except (PluginError, AdmissionError) as error:
            return self._failed(pod, name, "CreateContainerConfigError", str(error))
        if self._gone or self._stop.is_set():
            return False
        try:
            self._machine.runtime.start(pod, container, options)
        except CreateError as error:
            return self._failed(pod, name, "CreateContainerError", str(error))
        self._waiting.pop(name, None)
        self._retry_at.pop(name, None)
        self._machine.events.record(_reference(pod), "Started", f"Started container {name}")
        return True

    def _failed(self, pod: Json, name: str, reason: str, message: str) -> bool:
        self._waiting[name] = reason, message
        self._retry_at[name] = time.monotonic() + self._machine.retry_seconds
        self._machine.events.warn(_reference(pod), "Failed", f"Error: {message}")
        return False

    def _restarts(self, pod: Json, container: Json, exit_code: int | None) -> bool:
        policy = "Always" if sidecar(container) else pod["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and exit_code != 0)

    def _complete(self, pod: Json) -> None:
        for container, left in self._remaining(pod):
            if left <= 0:
                self._machine.runtime.end(container)

    def _remaining(self, pod: Json) -> list[tuple[Container, float]]:
        seconds = (pod["metadata"].get("annotations") or {}).get(RUN_SECONDS)
        if seconds is None:
            return []
        apps = {container["name"] for container in pod["spec"]["containers"]}
        running = [c for c in self._machine.runtime.containers(pod["metadata"]["uid"]) if c.running and c.name in apps]
        return [(c, c.started + float(seconds) - time.time()) for c in running]

    def _next(self, pod: Json) -> float | None:
        now = time.monotonic()
        waits = [at - now for at in self._retry_at.values()] + [left for _, left in self._remaining(pod)]
        return max(0.0, min(waits)) if waits else None

    def _terminate(self, pod: Json) -> None:
        meta = pod["metadata"]
        containers = self._machine.runtime.containers(meta["uid"])
        for container in containers:
            if container.running:
                self._machine.runtime.end(container, _KILLED)
        self._waiting.clear()
        if (containers or self._reported) and not self._gone:
            self._report(pod)
        self._finish(pod)
        if meta.get("deletionTimestamp") and not self._gone:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
            self._ignoring_absence(lambda: self._machine.api.delete(_path(pod), body))
            self._deleted = True

    def _finish(self, pod: Json) -> None:
        """End sidecars after the last app container; the pod's ids may be given to other pods from here on."""
        for container in self._machine.runtime.containers(pod["metadata"]["uid"]):
            if container.running:
                self._machine.runtime.end(container)
        self._machine.runtime.remove_sandbox(pod["metadata"]["uid"])
        self.ended = True

    def _report(self, pod: Json) -> str:
        """Patch the pod's status where it changed. Return the phase."""
        spec = pod["spec"]
        inits = [self._view(pod, c, init=True) for c in spec.get("initContainers") or ()]
        apps = [self._view(pod, c) for c in spec["containers"]]
        status = pod_status(pod, inits, apps, self._machine.host_ip, self._reported)
        if status != self._reported:
            # The uid is a precondition: a pod that was recreated under the name must not get this status.
            patch = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
            path = _path(pod) + "/status"
            self._ignoring_absence(lambda: self._machine.api.patch(path, patch, STRATEGIC_PATCH))
            self._reported = status
        return str(status["phase"])

    def _view(self, pod: Json, container: Json, *, init: bool = False) -> ContainerView:
        uid, name = pod["metadata"]["uid"], container["name"]
        devices = self._machine.devices
        ids_of = {} if init else devices.ids(uid, name)  # the kubelet reports health for app containers only
        held = {r: {i: devices.health(r, i) for i in ids} for r, ids in ids_of.items()}
        attempts = tuple(c for c in self._machine.runtime.containers(uid) if c.name == name)
        return ContainerView(name, container.get("image", ""), attempts, self._waiting.get(name), held, init)

    def _ignoring_absence(self, call: Callable[[], Any]) -> None:
        """Ignore that the pod is gone or recreated, in which case nothing is to be written; retry other errors."""
        try:
            call()
        except ApiError as error:
            if error.status in (404, 409):
                log.info("pod %s: %s", self._pod["metadata"]["name"], error)
            else:
                raise Unreachable(str(error)) from error


def _path(pod: Json) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def _reference(pod: Json) -> dict[str, Any]:
    meta = pod["metadata"]
    return pod_reference(meta["namespace"], meta["name"], meta["uid"])
