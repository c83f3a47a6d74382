"""The playground's kubelet without threads, sockets or time: the test moves its device manager and pod workers."""

import random
from pathlib import Path
from typing import Any, cast

from mgpu.kube import Api
from mgpu.kube.events import Recorder
from playground.container_runtime import Runtime
from playground.kubelet.device_checkpoint import FILE
from playground.kubelet.device_manager import AdmissionError, DeviceManager
from playground.kubelet.pod_worker import STRATEGIC_PATCH, Machine, PodWorker
from playground.kubelet.services import PodResources, TokenBucket
from playground.kubelet.status import rejected
from proto import podresources_pb2
from tests.deviceplugin.machine.agent import RESOURCES
from tests.deviceplugin.machine.cluster import Cluster, Raw


class Killed(BaseException):
    """The kubelet is killed; its calls to plugins are cancelled."""


class NoEvents:
    def record(self, *_: Any) -> None: ...

    def warn(self, *_: Any) -> None: ...


class Kubelet:
    """The kubelet. `waiting` has the pods that wait for admission, `failed` the reasons of rejected pods by UID."""

    def __init__(self, folder: Path, cluster: Cluster, runtime: Runtime, rng: random.Random) -> None:
        self.folder, self._cluster, self.runtime, self._rng = folder, cluster, runtime, rng
        self.failed: dict[str, str] = {}
        self.workers: dict[str, PodWorker] = {}
        self.admitting = False
        cluster.watchers.append(self._seen)
        self.start()

    def start(self) -> None:
        """Start or restart: only the checkpoint and the containers stay."""
        for worker in self.workers.values():
            worker.stop()
        self._pods = {raw["metadata"]["uid"]: raw for raw in self._cluster.pods.values()}
        self.waiting = sorted(self._pods, key=lambda uid: self._pods[uid]["metadata"]["creationTimestamp"])
        self._found = set(self.waiting)
        self.workers, self._leaving, self._busy = {}, dict[str, PodWorker](), set[str]()
        self.devices = DeviceManager(self.folder / FILE, self.active, rng=self._rng, clock=lambda: 0.0)
        self._machine = Machine(
            "n1", "", cast(Api, self._cluster), self.runtime, self.devices, cast(Recorder, NoEvents()), 0.0
        )
        self._lister = PodResources(Path(), self.devices, self._listed, TokenBucket(1, 1 << 30))
        self.admitting = False

    def listing(self) -> podresources_pb2.ListPodResourcesResponse:
        return self._lister.List(None, None)

    def active(self) -> list[str]:
        return [uid for uid, worker in self.workers.items() if not worker.ended]

    def admit(self, position: int) -> None:
        """Admit a waiting pod. Pods from before the start of the kubelet come first, the oldest one first."""
        if self.admitting or not self.waiting:
            return
        uid = self.waiting.pop(position % len(self.waiting) if self._found.isdisjoint(self.waiting) else 0)
        raw = self._pods.get(uid)
        if raw is None:
            return
        ended = raw["status"]["phase"] in ("Succeeded", "Failed") or raw["metadata"].get("deletionTimestamp")
        self.admitting = True
        refusal = "" if ended else self._refusal(raw)
        self.admitting = False
        if refusal:
            self.failed[uid] = refusal
            self._reject(raw, refusal)
        worker = PodWorker(self._machine, raw, ended=bool(refusal))
        latest = self._pods.get(uid)
        if latest is None:
            self._leaving[uid] = worker
            worker.remove()
        else:
            self.workers[uid] = worker
            if not refusal or latest["metadata"].get("deletionTimestamp"):
                worker.update(latest)

    def work(self, uid: str) -> None:
        """Sync a pod, unless that is in progress."""
        worker = self.workers.get(uid) or self._leaving.get(uid)
        if worker is None or uid in self._busy:
            return
        self._busy.add(uid)
        worker.sync()
        self._busy.discard(uid)

    def working(self) -> list[str]:
        return [uid for uid in (*self.workers, *self._leaving) if uid not in self._busy]

    def _refusal(self, raw: Raw) -> str:
        spec, uid = raw["spec"], raw["metadata"]["uid"]
        try:
            for container in [*spec.get("initContainers", ()), *spec["containers"]]:
                latest = self.runtime.latest(uid, container["name"])
                running = uid in self._found and latest is not None and latest.running
                self.devices.allocate(raw, container, running=running)
                asked = {name for name in container.get("resources", {}).get("limits", {}) if name in RESOURCES}
                if not running and (missing := asked - self.devices.ids(uid, container["name"]).keys()):
                    # Without a checkpoint it has set the capacity of the resource to 0.
                    return f"OutOf{min(missing)}"
        except AdmissionError as error:
            return str(error)
        return ""

    def _reject(self, raw: Raw, why: str) -> None:
        meta = raw["metadata"]
        now = self._pods.get(meta["uid"])
        if now is not None:
            self._cluster.patch(
                f"/{meta['name']}/status",
                {"metadata": {"uid": meta["uid"]}, "status": rejected("", why)},
                STRATEGIC_PATCH,
            )

    def _seen(self, what: str, raw: Raw) -> None:
        uid = raw["metadata"]["uid"]
        if what == "gone":
            self._pods.pop(uid, None)
            if worker := self.workers.pop(uid, None):
                self._leaving[uid] = worker
                worker.remove()
            return
        if uid not in self._pods:
            self.waiting.append(uid)
        self._pods[uid] = raw
        if uid in self.workers:
            self.workers[uid].update(raw)

    def _listed(self) -> list[Raw]:
        ended = {uid for uid, worker in self.workers.items() if worker.ended}
        return [raw for uid, raw in self._pods.items() if uid not in ended]
