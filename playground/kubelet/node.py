"""The kubelet's Node object: registration, capacity and allocatable, the Ready condition."""

import logging
import threading
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from playground.kubelet.config import KubeletConfig
from playground.kubelet.devices import DeviceManager
from playground.kubelet.status import Json, now

log = logging.getLogger(__name__)

VERSION = "v1.36.0-playground"
HOST = "127.0.0.1"


class NodeReporter:
    """Keeps the node's status; on changes of devices and of the Node, and every `status_seconds`.

    port: where the kubelet's own server listens.
    """

    def __init__(self, api: Api, config: KubeletConfig, devices: DeviceManager, port: int) -> None:
        self._api, self._config, self._devices, self._port = api, config, devices, port
        self._path = f"/api/v1/nodes/{config.node}"
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._stopped = False
        self.node: Json | None = None
        query = {"fieldSelector": f"metadata.name={config.node}"}
        self._watch = Reflector(api, "/api/v1/nodes", self._seen, lambda _: None, query)
        self._thread = threading.Thread(target=self._run, name=f"node {config.node}", daemon=True)

    def start(self) -> None:
        """Register, then report behind. Raises ApiError and Unreachable where the node cannot be registered."""
        self._register()
        self._watch.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._watch.stop()
        self._wake.set()
        self._thread.join(5)

    def poke(self) -> None:
        self._wake.set()

    def _seen(self, node: Json) -> None:
        with self._lock:
            self.node = node
        self.poke()

    def _register(self) -> None:
        """A node that exists keeps what it is; without a checkpoint its extended resources go to zero."""
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self._config.node,
                "labels": {"kubernetes.io/hostname": self._config.node, "kubernetes.io/os": "linux"}
                | dict(self._config.labels),
                "annotations": dict(self._config.annotations),
            },
            "spec": {},
        }
        try:
            existing = self._api.create("/api/v1/nodes", body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            existing = self._api.get(self._path)
            if self._devices.without_checkpoint:
                existing = self._reset(existing)
        self.node = existing
        self._report(existing)

    def _reset(self, node: Json) -> Json:
        old = node.get("status") or {}
        zeros = {
            kind: {name: "0" for name in old.get(kind) or {} if _extended(name)} for kind in ("capacity", "allocatable")
        }
        return self._api.patch(f"{self._path}/status", {"status": zeros})

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._config.status_seconds)
            self._wake.clear()
            try:
                if self.node is not None and not self._stopped:
                    self._report(self.node)
            except (ApiError, Unreachable) as error:
                log.warning("status of node %s not written: %s", self._config.node, error)

    def _report(self, node: Json) -> None:
        """Patch only what differs from `node`: others' entries of its capacity stay."""
        wanted = self._status(node.get("status") or {})
        patch = _difference(node.get("status") or {}, wanted)
        if patch:
            answer = self._api.patch(f"{self._path}/status", {"status": patch})
            with self._lock:
                if self.node is node:  # else the watch has brought what was written after this
                    self.node = answer

    def _status(self, old: Json) -> Json:
        """As the kubelet's setters: capacity as it stands with ours over it; allocatable follows from capacity."""
        total, healthy, removed = self._devices.capacity()
        capacity = {
            **(old.get("capacity") or {}),
            **self._config.capacity,
            **{name: str(amount) for name, amount in total.items()},
            **dict.fromkeys(sorted(removed), "0"),
        }
        allocatable = {**capacity, **{name: str(amount) for name, amount in healthy.items()}}
        conditions = {row["type"]: row for row in old.get("conditions") or ()}
        if (conditions.get("Ready") or {}).get("status") != "True":
            conditions["Ready"] = {
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "message": "kubelet is posting ready status",
                "lastHeartbeatTime": now(),
                "lastTransitionTime": now(),
            }
        return {
            "capacity": capacity,
            "allocatable": allocatable,
            "conditions": [conditions[kind] for kind in sorted(conditions)],
            "addresses": [
                {"type": "InternalIP", "address": HOST},
                {"type": "Hostname", "address": self._config.node},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "nodeInfo": {**_NODE_INFO, "machineID": self._config.node, "systemUUID": self._config.node},
        }


_NODE_INFO = {
    "architecture": "amd64",
    "bootID": "",
    "containerRuntimeVersion": "playground://1",
    "kernelVersion": "playground",
    "kubeProxyVersion": "",
    "kubeletVersion": VERSION,
    "operatingSystem": "linux",
    "osImage": "playground",
}


def _extended(name: str) -> bool:
    return "/" in name and not name.startswith("kubernetes.io/")


def _difference(old: Json, new: Json) -> Json:
    """The merge patch that makes `old` contain `new`; tables are compared key by key, and lose what `new` lacks."""
    patch: Json = {}
    for key, value in new.items():
        before: Any = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            changes = {k: v for k, v in value.items() if before.get(k) != v}
            changes |= {k: None for k in before if k not in value}
            if changes:
                patch[key] = changes
        elif before != value:
            patch[key] = value
    return patch
