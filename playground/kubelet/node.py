"""The kubelet's configuration, its Node object, and the HTTPS server behind `kubectl logs`.

`NodeReporter` registers the node and keeps its status: capacity, allocatable, the Ready condition.
"""

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from werkzeug import Request, Response
from werkzeug.serving import WSGIRequestHandler, make_server

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from playground.apiserver import self_signed
from playground.container_runtime import Runtime
from playground.kubelet.device_manager import DeviceManager
from playground.kubelet.status import Json, now

Order = Literal["arrival", "created", "random"]


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """One node. All times are in seconds.

    root: the kubelet's folder; its sockets are `device-plugins/kubelet.sock` and `pod-resources/kubelet.sock`.
    admission: the order in which pods that wait together are admitted.
    seed: of everything random: that order, the ids, the order of a container's resources, conflicting variables.
    retry_seconds: until a container that could not start is tried again (the real kubelet: about 10).
    removal_grace: until the resource of a disconnected plugin is removed.
    status_seconds: how often the node's status is checked without a change of the devices or the Node.
    """

    node: str
    root: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "64", "memory": "256Gi", "pods": "250", "ephemeral-storage": "1Ti"}
    )
    admission: Order = "arrival"
    seed: int = 0
    retry_seconds: float = 1.0
    removal_grace: float = 300.0
    status_seconds: float = 10.0
    max_message: int = 4 << 20
    queries_per_second: float = 100.0
    query_burst: int = 10

    @property
    def plugins(self) -> Path:
        return self.root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        return self.root / "pod-resources"


log = logging.getLogger(__name__)

VERSION = "v1.36.0-playground"
HOST = "127.0.0.1"


class LogServer:
    """Serves GET `/containerLogs/<namespace>/<pod>/<container>` on a free loopback port, without authentication.

    A real API server forwards `kubectl logs` to it; the playground's own reads the runtime directly.
    """

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        @Request.application
        def answer(request: Request) -> Response:
            match request.path.split("/"):
                case ["", "containerLogs", namespace, pod, container]:
                    try:
                        return Response(runtime.logs(namespace, pod, container))
                    except KeyError as error:
                        return Response(str(error.args[0]), 400)
            return Response("not found", 404)

        self._server = make_server(HOST, 0, answer, threaded=True, request_handler=_Quiet)
        self.port = self._server.port
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self_signed(folder))
        # werkzeug's own TLS does the handshake in the thread that accepts, where a slow client would block all others.
        # Without a handshake on connect, the first read does it, in the connection's own thread.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="logs", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Write no access log."""


class NodeReporter:
    """Keeps the node's status, on changes of the devices and the Node and every `status_seconds`.

    port: where the kubelet's `LogServer` listens.
    """

    def __init__(self, api: Api, config: KubeletConfig, devices: DeviceManager, port: int) -> None:
        self._api = api
        self._config = config
        self._devices = devices
        self._port = port
        self._path = f"/api/v1/nodes/{config.node}"
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopped = False
        self.node: Json | None = None
        query = {"fieldSelector": f"metadata.name={config.node}"}
        self._watch = Reflector(api, "/api/v1/nodes", self._seen, lambda _: None, query)
        self._thread = threading.Thread(target=self._run, name=f"node {config.node}", daemon=True)

    def start(self) -> None:
        """Register, then report in the background. Raises ApiError and Unreachable where registration fails."""
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
        """Create the Node. An existing one is kept, but without a checkpoint its extended resources become zero."""
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
        """Patch only what differs from `node`, so that resources published by other clients stay."""
        wanted = self._status(node.get("status") or {})
        patch = _difference(node.get("status") or {}, wanted)
        if patch:
            answer = self._api.patch(f"{self._path}/status", {"status": patch})
            with self._lock:
                if self.node is node:  # otherwise the watch has already brought a newer object
                    self.node = answer

    def _status(self, old: Json) -> Json:
        """Return the status as the kubelet's setters do: its capacity over the existing one, then allocatable."""
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
    """Return the merge patch that makes `old` contain `new`. Nested maps lose the keys that `new` lacks."""
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
