"""The kubelet's configuration, the reporter of its Node object, and the HTTPS server for the logs of containers.

`kubelet` starts the reporter and the server. `playground.cluster` and the tests create the configuration.
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
from playground.kubelet.dra import DraConfig
from playground.kubelet.status import Json, now

Order = Literal["arrival", "created", "random"]


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """The configuration of the kubelet of one node. All times are in seconds.

    Attributes:
        node: The name of the node.
        root: The kubelet's folder. Its sockets are `device-plugins/kubelet.sock` and `pod-resources/kubelet.sock`.
            DRA drivers register in its folder `plugins_registry`.
        labels: The labels with which the Node is created, in addition to those that every Node gets.
        annotations: The annotations with which the Node is created.
        capacity: The capacity of the node without the resources of device plugins.
        admission: The order in which waiting pods are admitted: by arrival, by creation time, or at random. Pods that
            exist when the kubelet starts are always admitted by creation time.
        seed: The seed for all random choices: the order of admission if it is random, the device ids, the order of a
            container's resources, and which plugin's value wins if several plugins set the same environment variable or
            mount.
        retry_seconds: How long the kubelet waits before it tries again to start a container. In the real kubelet it is
            about 10.
        removal_grace: How long the node keeps the resource of a disconnected plugin.
        status_seconds: How often the status of the node is checked if neither the devices nor the Node change.
        max_message: The most bytes of a message from a device plugin.
        queries_per_second: How many calls of PodResources are allowed per second on average.
        query_burst: How many calls of PodResources are allowed at once.
        dra: The configuration of Dynamic Resource Allocation.
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
    dra: DraConfig = field(default_factory=DraConfig)

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
    """Serves `/containerLogs/<namespace>/<pod>/<container>` by HTTPS on a free loopback port, without authentication.

    A real API server forwards `kubectl logs` to this server. The playground's API server reads the log from the
    container runtime instead.
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
        # With its own TLS, werkzeug does the handshake in the thread that accepts connections, so a slow client would
        # block all others. Without a handshake on connect, the first read does it in the thread of the connection.
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
    """Registers the node and keeps its capacity, its allocatable resources and its Ready condition up to date.

    It checks the status when the devices or the Node change, and every `status_seconds`.

    Args:
        api: The client of the API server.
        config: The configuration of the kubelet.
        devices: The device manager, which knows the capacity of extended resources.
        port: The port on which the kubelet's `LogServer` listens.

    Attributes:
        node: The Node as it was last observed or written, or None before it is registered.
    """

    def __init__(self, api: Api, config: KubeletConfig, devices: DeviceManager, port: int) -> None:
        self._api = api
        self._config = config
        self._devices = devices
        self._port = port
        self._path = f"/api/v1/nodes/{config.node}"
        self._wake = threading.Event()
        self._lock = threading.Lock()  # guards changes of `node`
        self._stopped = False
        self.node: Json | None = None
        query = {"fieldSelector": f"metadata.name={config.node}"}
        self._watch = Reflector(api, "/api/v1/nodes", self._seen, lambda _: None, query)
        self._thread = threading.Thread(target=self._run, name=f"node {config.node}", daemon=True)

    def start(self) -> None:
        """Register the node, and then report its status in a thread.

        Raises:
            ApiError: The API server refuses the registration.
            Unreachable: The API server cannot be reached.
        """
        self._register()
        self._watch.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._watch.stop()
        self._wake.set()
        self._thread.join(5)

    def poke(self) -> None:
        """Let the thread check the status at once."""
        self._wake.set()

    def _seen(self, node: Json) -> None:
        with self._lock:
            self.node = node
        self.poke()

    def _register(self) -> None:
        """Create the Node and write its status.

        If the Node exists, it is kept. But if there is no device checkpoint, its extended resources are set to zero.
        """
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
        """Set the extended resources in the Node's status to zero, and return the Node."""
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
                log.warning("cannot write the status of node %s: %s", self._config.node, error)

    def _report(self, node: Json) -> None:
        """Patch only the fields that differ from `node`, so that resources that other clients have added remain."""
        wanted = self._status(node.get("status") or {})
        patch = _difference(node.get("status") or {}, wanted)
        if patch:
            answer = self._api.patch(f"{self._path}/status", {"status": patch})
            with self._lock:
                if self.node is node:  # otherwise the watch has already brought a newer object
                    self.node = answer

    def _status(self, old: Json) -> Json:
        """Return the Node's status as the real kubelet computes it.

        The capacity is the existing capacity, overridden by the configuration and by the device manager. A removed
        resource stays there as 0. `allocatable` is equal, except that only healthy devices count.
        """
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
    """Return the merge patch that gives `old` the fields of `new`.

    Top-level fields that only `old` has remain. If a top-level field is a map, the keys that only `old` has are removed
    from it.
    """
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
