"""The kubelet's pod workers.

A pod worker is a thread that starts the containers of one pod, reports the pod's status and ends the pod. `kubelet`
starts a `PodWorker` for each pod and passes the changes of the pod to it. A test of the node agent calls
`PodWorker.sync` itself, without a thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from playground.container_runtime import Container, CreateError, RunOptions, Runtime
from playground.kubelet.device_health import claim_rows
from playground.kubelet.device_manager import AdmissionError, DeviceManager, PluginError
from playground.kubelet.dra import Dra
from playground.kubelet.pod_claims import ClaimError, has_claims
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
        dra: The parts for Dynamic Resource Allocation. Without them, the claims of pods are ignored.
    """

    node: str
    host_ip: str
    api: Api
    runtime: Runtime
    devices: DeviceManager
    events: Recorder
    retry_seconds: float
    dra: Dra | None = None


class PodWorker:
    """Runs one pod.

    Attributes:
        ended: Whether no container of the pod runs and none will be started, and its claims are unprepared. It is true
            from the start for a pod that the kubelet rejected.
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
        self._claims_retry_at: float | None = None
        self._unprepared_version: Json | None = None
        self._ending = False
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
            return self._claims_pause()
        if self.ended:
            if self._reported:
                self._report(pod)  # again, if the API server did not answer
            return None
        if not self._reported:
            self._report(pod)
        if not self._ending:
            self._complete(pod)
            if self._prepare(pod) and self._initialize(pod):
                for container in pod["spec"]["containers"]:
                    self._ensure(pod, container)
        if self._ending or self._status(pod)["phase"] in ("Succeeded", "Failed"):
            # Who sees the phase may count on the device ids, as with the real kubelet, so this comes before the report.
            self._finish(pod)
        self._report(pod)
        return self._claims_pause() if self._ending else self._next(pod)

    def _prepare(self, pod: Json) -> bool:
        """Prepare the pod's claims before its first container starts. Return whether its containers may start.

        As in the kubelet (kuberuntime_manager.go, SyncPod), the claims belong to the sandbox: while it exists, they are
        not prepared again. After a failure the kubelet waits until it synchronizes all pods, unless the pod changes.
        """
        dra, uid = self._machine.dra, pod["metadata"]["uid"]
        if dra is None or not has_claims(pod) or self._machine.runtime.has_sandbox(uid):
            return True
        version = {"spec": pod["spec"], **{key: pod["metadata"].get(key) for key in ("labels", "annotations")}}
        if self._claims_pause() and version == self._unprepared_version:
            return False
        try:
            dra.claims.prepare(pod)
        except ClaimError as error:
            self._unprepared_version = version
            self._claims_retry_at = time.monotonic() + dra.retry_seconds()
            if not self._stop.is_set():
                message = f"Failed to prepare dynamic resources: {error}"
                self._machine.events.warn(_reference(pod), "FailedPrepareDynamicResources", message)
            return False
        self._claims_retry_at = None
        if self._gone or self._stop.is_set():
            return False
        self._machine.runtime.make_sandbox(uid)
        return True

    def _unprepare(self, pod: Json) -> bool:
        """Unprepare the pod's claims after its last container has ended. Return whether that is done."""
        dra = self._machine.dra
        if dra is None or not has_claims(pod):
            return True
        if self._claims_pause():
            return False
        try:
            dra.claims.unprepare(pod)
        except ClaimError as error:
            log.info("pod %s: %s", pod["metadata"]["name"], error)
            self._claims_retry_at = time.monotonic() + self._machine.retry_seconds
            return False
        self._claims_retry_at = None
        return True

    def _claims_pause(self) -> float | None:
        """Return the seconds until the claims are due, 0 if they are due now, and None if nothing is to do for them."""
        return None if self._claims_retry_at is None else max(0.0, self._claims_retry_at - time.monotonic())

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
            options = self._options(pod, container)
        except (ClaimError, PluginError, AdmissionError) as error:
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

    def _options(self, pod: Json, container: Json) -> RunOptions:
        """Return what the claims and the device plugins of a container add to it.

        Raises ClaimError, and the errors of `DeviceManager.run_options`.
        """
        dra = self._machine.dra
        claimed = dra.claims.cdi_devices(pod, container) if dra is not None and has_claims(pod) else ()
        options = self._machine.devices.run_options(pod, container)
        return replace(options, cdi=(*claimed, *options.cdi)) if claimed else options

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
        if self._claims_retry_at is not None:
            waits.append(self._claims_retry_at - now)
        return max(0.0, min(waits)) if waits else None

    def _terminate(self, pod: Json) -> None:
        """Kill the containers and report the new status. If the pod is being deleted, remove its object.

        An object whose claims cannot be unprepared stays, and so does its phase.
        """
        meta = pod["metadata"]
        containers = self._machine.runtime.containers(meta["uid"])
        for container in containers:
            if container.running:
                self._machine.runtime.end(container, _KILLED)
        self._waiting.clear()
        if (containers or self._reported) and not self._gone:
            self._report(pod)
        self._finish(pod)
        if not self.ended:
            return
        if has_claims(pod) and self._reported and not self._gone:
            self._report(pod)
        if meta.get("deletionTimestamp") and not self._gone:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
            self._ignoring_absence(lambda: self._machine.api.delete(_path(pod), body))
            self._deleted = True

    def _finish(self, pod: Json) -> None:
        """End the containers that still run, such as sidecars, and then unprepare the pod's claims.

        Other pods may get the pod's device ids when this is done. If the claims cannot be unprepared, `ended` stays
        false, and `sync` must be called again.
        """
        if not self._ending:
            self._claims_retry_at = None  # It was the time for another attempt to prepare the claims.
        self._ending = True
        for container in self._machine.runtime.containers(pod["metadata"]["uid"]):
            if container.running:
                self._machine.runtime.end(container)
        self._machine.runtime.remove_sandbox(pod["metadata"]["uid"])
        self.ended = self.ended or self._unprepare(pod)

    def _status(self, pod: Json, *, released: bool = True) -> Json:
        spec = pod["spec"]
        inits = [self._view(pod, c, init=True) for c in spec.get("initContainers") or ()]
        apps = [self._view(pod, c) for c in spec["containers"]]
        return pod_status(pod, inits, apps, self._machine.host_ip, self._reported, released=released)

    def _report(self, pod: Json) -> None:
        """Patch the pod's status if it has changed."""
        status = self._status(pod, released=self.ended or not has_claims(pod))
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
        claims = () if init else self._claim_rows(pod, container)
        return ContainerView(name, container.get("image", ""), attempts, self._waiting.get(name), held, init, claims)

    def _claim_rows(self, pod: Json, container: Json) -> list[Json]:
        """Return what the status says of the devices that a container has by its claims."""
        dra, namespace = self._machine.dra, pod["metadata"]["namespace"]
        if dra is None or not has_claims(pod):
            return []
        return claim_rows(pod, container, lambda name: dra.claims.state(namespace, name), dra.health)

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
