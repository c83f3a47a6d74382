"""The kubelet's pod workers.

A pod worker is a thread that starts the containers of one pod, reports the pod's status and ends the pod. `kubelet`
starts a `PodWorker` for each pod and passes the changes of the pod to it. A test of the node agent calls
`PodWorker.sync` itself, without a thread.
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
"""The annotation of a pod with the number of seconds that each app container runs until it ends with exit code 0."""
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_KILLED = 137  # the exit code of a process that SIGKILL has ended


@dataclass(frozen=True, slots=True)
class Machine:
    """The objects and settings that the workers of one node share.

    Attributes:
        node: The name of the node.
        host_ip: The node's IP address, for the status of its pods.
        api: The kubelet's connection to the API server.
        runtime: The container runtime.
        devices: The device manager.
        events: The recorder of the pods' events.
        retry_seconds: The time after which a worker repeats a failed start of a container or a failed request.
    """

    node: str
    host_ip: str
    api: Api
    runtime: Runtime
    devices: DeviceManager
    events: Recorder
    retry_seconds: float


class PodWorker:
    """Runs one pod.

    Attributes:
        ended: Whether no container of the pod runs and none will be started. It is true from the start for a pod that
            the kubelet rejected.
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
        """Tell the worker to continue with a newer version of the pod's object."""
        self._pod = pod
        self.poke()

    def remove(self) -> None:
        """Let the worker kill the containers. It reports no status, because the pod's object is gone."""
        self._gone = True
        self.poke()

    def poke(self) -> None:
        """Wake the thread for another call of `sync`."""
        with self._wake:
            self._dirty = True
            self._wake.notify()

    def stop(self) -> None:
        """Tell the thread to end, because the kubelet stops. The containers continue to run."""
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
        """Start or end the containers that are due, and report the status.

        Return the seconds until the next call is due, or None if no call is due before the next `poke`.
        """
        pod = self._pod
        phase = (pod.get("status") or {}).get("phase")
        if self._gone or pod["metadata"].get("deletionTimestamp") or phase in ("Succeeded", "Failed"):
            self._terminate(pod)
            return None
        if self.ended:
            if self._reported:
                self._report(pod)  # again, if the API server did not answer
            return None
        if not self._reported:
            self._report(pod)
        self._complete(pod)
        if self._initialize(pod):
            for container in pod["spec"]["containers"]:
                self._ensure(pod, container)
        if self._status(pod)["phase"] in ("Succeeded", "Failed"):
            # Who sees the phase may count on the device ids, as with the real kubelet, so this comes before the report.
            self._finish(pod)
        self._report(pod)
        return self._next(pod)

    def _initialize(self, pod: Json) -> bool:
        """Run the init containers one after the other. Each of them ends at once, except for sidecars.

        Return whether the app containers may start.
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
                    # The real kubelet also reports the end before it starts the next container.
                    self._report(pod)
        return True

    def _ensure(self, pod: Json, container: Json) -> bool:
        """Start the container unless it runs or must not be restarted. Return False if it should run but does not."""
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
        """Record a failed start of a container for the status, the events and the next try. Return False."""
        self._waiting[name] = reason, message
        self._retry_at[name] = time.monotonic() + self._machine.retry_seconds
        self._machine.events.warn(_reference(pod), "Failed", f"Error: {message}")
        return False

    def _restarts(self, pod: Json, container: Json, exit_code: int | None) -> bool:
        policy = "Always" if sidecar(container) else pod["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and exit_code != 0)

    def _complete(self, pod: Json) -> None:
        """End the app containers whose run time, given by the annotation RUN_SECONDS, is over."""
        for container, left in self._remaining(pod):
            if left <= 0:
                self._machine.runtime.end(container)

    def _remaining(self, pod: Json) -> list[tuple[Container, float]]:
        """Return the running app containers with their remaining seconds, or [] for a pod without the annotation."""
        seconds = (pod["metadata"].get("annotations") or {}).get(RUN_SECONDS)
        if seconds is None:
            return []
        apps = {container["name"] for container in pod["spec"]["containers"]}
        running = [c for c in self._machine.runtime.containers(pod["metadata"]["uid"]) if c.running and c.name in apps]
        return [(c, c.started + float(seconds) - time.time()) for c in running]

    def _next(self, pod: Json) -> float | None:
        """Return the seconds until the next retry or the next end of a container, or None if there is none."""
        now = time.monotonic()
        waits = [at - now for at in self._retry_at.values()] + [left for _, left in self._remaining(pod)]
        return max(0.0, min(waits)) if waits else None

    def _terminate(self, pod: Json) -> None:
        """Kill the containers and report the new status. If the pod is being deleted, remove its object."""
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
        """End the containers that still run, such as sidecars. After that, other pods may get the pod's device ids."""
        for container in self._machine.runtime.containers(pod["metadata"]["uid"]):
            if container.running:
                self._machine.runtime.end(container)
        self._machine.runtime.remove_sandbox(pod["metadata"]["uid"])
        self.ended = True

    def _status(self, pod: Json) -> Json:
        spec = pod["spec"]
        inits = [self._view(pod, c, init=True) for c in spec.get("initContainers") or ()]
        apps = [self._view(pod, c) for c in spec["containers"]]
        return pod_status(pod, inits, apps, self._machine.host_ip, self._reported)

    def _report(self, pod: Json) -> None:
        """Patch the pod's status if it has changed."""
        status = self._status(pod)
        if status != self._reported:
            # The uid is a precondition, because a new pod of the same name must not get this status.
            patch = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
            path = _path(pod) + "/status"
            self._ignoring_absence(lambda: self._machine.api.patch(path, patch, STRATEGIC_PATCH))
            self._reported = status

    def _view(self, pod: Json, container: Json, *, init: bool = False) -> ContainerView:
        uid, name = pod["metadata"]["uid"], container["name"]
        devices = self._machine.devices
        ids_of = {} if init else devices.ids(uid, name)  # the kubelet reports health for app containers only
        held = {r: {i: devices.health(r, i) for i in ids} for r, ids in ids_of.items()}
        attempts = tuple(c for c in self._machine.runtime.containers(uid) if c.name == name)
        return ContainerView(name, container.get("image", ""), attempts, self._waiting.get(name), held, init)

    def _ignoring_absence(self, call: Callable[[], Any]) -> None:
        """Make a request, and ignore its failure if the pod is gone or was recreated.

        Raises Unreachable for other errors, after which `sync` is called again.
        """
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
