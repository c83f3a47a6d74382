"""The kubelet of one node, which admits the pods that are bound to the node and hands each to a `PodWorker`.

`playground.cluster` runs a `Kubelet` for each node, and tests run one without a cluster.
"""

import contextlib
import logging
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.compute_resources import Requests, add_requests, allocatable, requests_of
from playground import fit
from playground.container_runtime import Container, Runtime
from playground.kubelet.device_checkpoint import FILE
from playground.kubelet.device_manager import AdmissionError, DeviceManager
from playground.kubelet.dra import Dra
from playground.kubelet.node import HOST, KubeletConfig, LogServer, NodeReporter
from playground.kubelet.pod_claims import without_backed_resources
from playground.kubelet.pod_worker import STRATEGIC_PATCH, Machine, PodWorker
from playground.kubelet.services import PodResources, Registry, TokenBucket
from playground.kubelet.status import Json, rejected

Raw = Mapping[str, Any]


def unfit(pod: Raw, node: Raw, others: Iterable[Raw], held: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the reason and the message with which the pod must be rejected, or None if the pod can be admitted.

    Taints and the field `unschedulable` of the node are ignored, and so is an extended resource that the node does not
    have at all. If the device manager has allocated more of a resource than is allocatable, the allocated amount is the
    limit (kubelet lifecycle/predicate.go, devicemanager sanitizeNodeAllocatable). What a claim serves is not counted.

    Args:
        others: The other active pods of the node.
        held: The amounts that the device manager has allocated to all pods, by resource.
    """
    there = allocatable(node)
    pod = without_backed_resources(pod)
    own = {name: amount for name, amount in requests_of(pod).items() if "/" not in name or name in there}
    used: Requests = reduce(add_requests, map(requests_of, map(without_backed_resources, others)), Requests())
    tolerant = {**pod, "spec": {**pod["spec"], "tolerations": [{"operator": "Exists"}]}}
    for reason in fit.fits(tolerant, node, used, counted=lambda _: False):
        return "NodeAffinity", f"Predicate NodeAffinity failed: {reason}"
    for name, wanted in sorted(own.items()):
        total = max(there.get(name, 0), held.get(name, 0))
        if wanted and used.get(name, 0) + wanted > total:
            numbers = f"requested: {wanted}, used: {used.get(name, 0)}, capacity: {total}"
            return f"OutOf{name}", f"Node didn't have enough resource: {name}, {numbers}"
    return None


log = logging.getLogger(__name__)
MIRROR = "kubernetes.io/config.mirror"
"""The annotation of mirror Pods, which stand for pods that the kubelet did not get from the API server."""


class Kubelet:
    """Admits pods one by one, in the order that the configuration sets.

    `start` and `stop` may alternate any number of times. The checkpoint and the runtime's containers remain after a
    stop. `_wake` guards the pods, the queue of pods to admit, and the workers.
    """

    def __init__(self, config: KubeletConfig, api: Api, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        self._api = api
        self._rng = random.Random(config.seed)
        self._events = Recorder(api, "kubelet", config.node)
        self._wake = threading.Condition(threading.RLock())
        self._held = False
        self._loop: threading.Thread | None = None

    def start(self) -> None:
        """Register the node and start to serve. Raises ApiError or Unreachable if the node cannot be registered."""
        config = self.config
        for folder in (config.plugins, config.pod_resources):
            folder.mkdir(parents=True, exist_ok=True)
        self._pods: dict[str, Json] = {}
        self._queue: list[str] = []
        self._workers: dict[str, PodWorker] = {}
        self._leaving: dict[str, PodWorker] = {}
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
        self.dra = Dra(
            config.root, config.node, self._api, config.dra, active=self._claimants, changed=self._devices_changed
        )
        self._machine = Machine(
            config.node, HOST, self._api, self.runtime, self.devices, self._events, config.retry_seconds, self.dra
        )
        self._registry = Registry(config.plugins, self.devices, config.max_message)
        limit = TokenBucket(config.queries_per_second, config.query_burst)
        socket = config.pod_resources / "kubelet.sock"
        claimed = self.dra.claims.dynamic_resources
        self._pod_resources = PodResources(socket, self.devices, self._listed, limit, claimed)
        query = {"fieldSelector": f"spec.nodeName={config.node}"}
        self._watch = Reflector(self._api, "/api/v1/pods", self._seen, self._vanished, query)
        self._logs.start()
        self.node.start()
        self._pod_resources.start()
        self._registry.start()
        self.dra.start()
        self._watch.start()
        self._loop = threading.Thread(target=self._run, name=f"kubelet {config.node}", daemon=True)
        self._loop.start()

    def stop(self) -> None:
        """Stop the kubelet, but not the containers. A second call has no effect."""
        if self._loop is None:
            return
        self._stopped = True
        self._watch.stop()
        self.node.stop()
        self._registry.stop()
        self._pod_resources.stop()
        self._logs.stop()
        with self._wake:
            self._wake.notify()
        self._loop.join(5)  # It adds workers before it starts them.
        self._loop = None
        with self._wake:
            workers = [*self._workers.values(), *self._leaving.values()]
        for worker in workers:
            worker.stop()
        self.dra.stop()  # This ends the calls of drivers, for which a worker would wait.
        for worker in workers:
            worker.join(5)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Admit no pod inside the context. Afterwards admit the pods that have arrived, in the configured order."""
        self._held = True
        try:
            yield
        finally:
            with self._wake:
                self._held = False
                self._wake.notify()

    def restart_container(self, namespace: str, pod: str, container: str, exit_code: int = 1) -> None:
        """End a running container. The restart policy determines whether it starts again.

        Raises KeyError if the container does not run.
        """
        found = [c for c in self._running(namespace, pod) if c.name == container]
        if not found:
            raise KeyError(f"{namespace}/{pod}/{container} does not run on {self.config.node}")
        self.runtime.end(found[-1], exit_code)
        with self._wake:
            worker = self._workers.get(found[-1].uid)
        if worker:
            worker.poke()

    def complete(self, namespace: str, pod: str) -> None:
        """End every running container of the pod with exit code 0."""
        for container in self._running(namespace, pod):
            self.restart_container(namespace, pod, container.name, 0)

    def _running(self, namespace: str, pod: str) -> list[Container]:
        return [c for c in self.runtime.containers() if c.running and (c.namespace, c.pod) == (namespace, pod)]

    def _seen(self, pod: Json) -> None:
        if MIRROR in (pod["metadata"].get("annotations") or {}):
            return  # It stands for a process that runs already.
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
            # A worker may take long, if it cannot unprepare the claims of its pod.
            self._leaving = {left: other for left, other in self._leaving.items() if not other.ended}
            if worker:
                self._leaving[uid] = worker
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
        """Take the next pod to admit from the queue. Return it, or None if it no longer exists.

        Args:
            found: The UIDs of the pods that existed when the kubelet started. They are admitted by creation time.
        """
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
        """Allocate the pod's devices, and then check the node's resources.

        Return the reason and the message if the pod must be rejected, or None if it can be admitted.
        """
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
        """Report a rejection as an Event and in the pod's status, and return the pod with this status."""
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
        """Return the UIDs of the pods whose device ids must be kept.

        They include the pods that wait for admission. So after a restart no ids are freed until all pods have been
        admitted again (devicemanager UpdateAllocatedDevices, sourcesReady).
        """
        with self._wake:
            return [*self._active(), *self._queue]

    def _claimants(self) -> list[str] | None:
        """Return the UIDs of the pods whose claims must be kept, or None as long as the pods are not known."""
        if not self._watch.synced:
            return None
        with self._wake:
            ended = {uid for uid, worker in self._workers.items() if worker.ended}
            return [uid for uid in (*self._pods, *self._leaving) if uid not in ended]

    def _listed(self) -> list[Json]:
        """Return the pods that PodResources lists: all that have not ended, even if they still wait for admission."""
        with self._wake:
            ended = {uid for uid, worker in self._workers.items() if worker.ended}
            return [pod for uid, pod in self._pods.items() if uid not in ended]

    def _devices_changed(self) -> None:
        """Wake the node reporter, which reports the capacity, and the pod workers, which report the devices' health."""
        self.node.poke()
        with self._wake:
            workers = list(self._workers.values())
        for worker in workers:
            worker.poke()
