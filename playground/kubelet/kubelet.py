"""A kubelet for one node that has no containers to run and a device manager as nasty as the real one."""

import contextlib
import logging
import random
import threading
from collections.abc import Iterator

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from mgpu.kube.reflector import Reflector
from playground.kubelet.admission import unfit
from playground.kubelet.checkpoint import FILE
from playground.kubelet.config import KubeletConfig
from playground.kubelet.devices import AdmissionError, DeviceManager
from playground.kubelet.logs import LogServer
from playground.kubelet.node import HOST, NodeReporter
from playground.kubelet.plugins import Registry
from playground.kubelet.podresources import PodResources, TokenBucket
from playground.kubelet.status import Json, rejected
from playground.kubelet.worker import STRATEGIC_PATCH, Machine, PodWorker
from playground.runtime import Container, Runtime

log = logging.getLogger(__name__)


class Kubelet:
    """`start` and `stop` any number of times: the checkpoint and the runtime's containers carry over.

    Pods are admitted one by one, in the order that the configuration says.
    """

    def __init__(self, config: KubeletConfig, api: Api, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self._api = api
        self._rng = random.Random(config.seed)
        self._events = Recorder(api, "kubelet", config.node)
        self._wake = threading.Condition(threading.RLock())
        self._held = False
        self._loop: threading.Thread | None = None

    def start(self) -> None:
        """Registers the node. Raises ApiError and Unreachable where it cannot."""
        config = self.config
        for folder in (config.plugins, config.pod_resources):
            folder.mkdir(parents=True, exist_ok=True)
        self._pods: dict[str, Json] = {}
        self._queue: list[str] = []
        self._workers: dict[str, PodWorker] = {}
        self._stopped = False
        self.devices = DeviceManager(
            config.plugins / FILE,
            self._not_ended,
            rng=self._rng,
            grace=config.removal_grace,
            changed=self._devices_changed,
        )
        self._logs = LogServer(self.runtime, config.root)
        self.node = NodeReporter(self._api, config, self.devices, self._logs.port)
        self._machine = Machine(
            config.node, HOST, self._api, self.runtime, self.devices, self._events, config.retry_seconds
        )
        self._registry = Registry(config.plugins, self.devices, config.max_message)
        limit = TokenBucket(config.queries_per_second, config.query_burst)
        socket = config.pod_resources / "kubelet.sock"
        self._pod_resources = PodResources(socket, self.devices, self._listed, limit)
        query = {"fieldSelector": f"spec.nodeName={config.node}"}
        self._watch = Reflector(self._api, "/api/v1/pods", self._seen, self._vanished, query)
        self._logs.start()
        self.node.start()
        self._pod_resources.start()
        self._registry.start()
        self._watch.start()
        self._loop = threading.Thread(target=self._run, name=f"kubelet {config.node}", daemon=True)
        self._loop.start()

    def stop(self) -> None:
        """Containers go on. Idempotent."""
        if self._loop is None:
            return
        self._stopped = True
        self._watch.stop()
        self.node.stop()
        self._registry.stop()
        self._pod_resources.stop()
        self._logs.stop()
        with self._wake:
            workers = list(self._workers.values())
            self._wake.notify()
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(5)
        self._loop.join(5)
        self._loop = None

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """No pod is admitted meanwhile; those that came are then admitted in the configured order."""
        self._held = True
        try:
            yield
        finally:
            with self._wake:
                self._held = False
                self._wake.notify()

    def restart_container(self, namespace: str, pod: str, container: str, exit_code: int = 1) -> None:
        """The container ends; by its restart policy it is started anew. Raises KeyError where it does not run."""
        found = [c for c in self._running(namespace, pod) if c.name == container]
        if not found:
            raise KeyError(f"{namespace}/{pod}/{container} does not run on {self.config.node}")
        self.runtime.end(found[-1], exit_code)
        with self._wake:
            worker = self._workers.get(found[-1].uid)
        if worker:
            worker.poke()

    def complete(self, namespace: str, pod: str) -> None:
        """Every app container of the pod ends well; with restartPolicy Never the pod has succeeded."""
        for container in self._running(namespace, pod):
            self.restart_container(namespace, pod, container.name, 0)

    def _running(self, namespace: str, pod: str) -> list[Container]:
        return [c for c in self.runtime.containers() if c.running and (c.namespace, c.pod) == (namespace, pod)]

    def _seen(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        with self._wake:
            new = uid not in self._pods
            self._pods[uid] = pod
            worker = self._workers.get(uid)
            if new:
                self._queue.append(uid)
                self._wake.notify()
        if worker:
            worker.update(pod)

    def _vanished(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        with self._wake:
            self._pods.pop(uid, None)
            worker = self._workers.pop(uid, None)
        if worker:
            worker.remove()

    def _run(self) -> None:
        while not self._watch.wait_synced(0.1):
            if self._stopped:
                return
        with self._wake:
            found = {*self._queue}
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopped or (self._queue and not self._held))
                if self._stopped:
                    return
                pod = self._pick(found)
            if pod is not None:
                self._take(pod, restored=pod["metadata"]["uid"] in found)

    def _pick(self, found: set[str]) -> Json | None:
        """The next pod, None where it vanished meanwhile. What was `found` at the start goes by creation time."""
        position = 0
        if self.config.admission == "created" or not found.isdisjoint(self._queue):
            position = min(range(len(self._queue)), key=lambda i: (self._created(self._queue[i]), i))
        elif self.config.admission == "random":
            position = self._rng.randrange(len(self._queue))
        return self._pods.get(self._queue.pop(position))

    def _created(self, uid: str) -> str:
        pod = self._pods.get(uid)
        return pod["metadata"].get("creationTimestamp", "") if pod else ""

    def _take(self, pod: Json, *, restored: bool) -> None:
        meta = pod["metadata"]
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") or meta.get("deletionTimestamp")
        refusal = None if ended else self._refusal(pod, restored=restored)
        if refusal:
            pod = self._reject(pod, *refusal)
        worker = PodWorker(self._machine, pod, ended=bool(refusal))
        with self._wake:
            latest = self._pods.get(meta["uid"])
            if latest is not None:
                self._workers[meta["uid"]] = worker
        if latest is None:
            worker.remove()
        elif not refusal or latest["metadata"].get("deletionTimestamp"):
            worker.update(latest)
        worker.start()

    def _refusal(self, pod: Json, *, restored: bool) -> tuple[str, str] | None:
        """(reason, message) where the pod is not admitted: devices first, then the node's resources."""
        spec, uid = pod["spec"], pod["metadata"]["uid"]
        try:
            for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
                latest = self.runtime.latest(uid, container["name"])
                self.devices.allocate(pod, container, running=restored and latest is not None and latest.running)
        except AdmissionError as error:
            return "UnexpectedAdmissionError", f"Allocate failed due to {error}, which is unexpected"
        if self.node.node is None:
            return None
        with self._wake:
            others = [self._pods[other] for other in self._active() if other != uid and other in self._pods]
        return unfit(pod, self.node.node, others, self.devices.held_amounts())

    def _reject(self, pod: Json, reason: str, message: str) -> Json:
        meta = pod["metadata"]
        log.info("pod %s/%s rejected: %s: %s", meta["namespace"], meta["name"], reason, message)
        self._events.warn(pod_reference(meta["namespace"], meta["name"], meta["uid"]), reason, message)
        status = rejected(reason, message)
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        try:
            self._api.patch(path, {"metadata": {"uid": meta["uid"]}, "status": status}, STRATEGIC_PATCH)
        except (ApiError, Unreachable) as error:
            log.warning("status of rejected pod %s/%s not written: %s", meta["namespace"], meta["name"], error)
        return {**pod, "status": {**(pod.get("status") or {}), **status}}

    def _active(self) -> list[str]:
        with self._wake:
            return [uid for uid, worker in self._workers.items() if not worker.ended]

    def _not_ended(self) -> list[str]:
        """Those that wait to be admitted (again) too: what was allocated is kept until all have been looked at
        (devicemanager UpdateAllocatedDevices, sourcesReady).
        """
        with self._wake:
            return [*self._active(), *self._queue]

    def _listed(self) -> list[Json]:
        """What PodResources shows: pods that have not ended, those that wait for admission too."""
        with self._wake:
            ended = {uid for uid, worker in self._workers.items() if worker.ended}
            return [pod for uid, pod in self._pods.items() if uid not in ended]

    def _devices_changed(self) -> None:
        """Capacity may have changed, and the health in every pod's status."""
        self.node.poke()
        with self._wake:
            workers = list(self._workers.values())
        for worker in workers:
            worker.poke()
