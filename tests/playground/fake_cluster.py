"""A cluster for the tests of kubelet, scheduling loop and collector: an API server and helpers for its objects."""

from pathlib import Path
from typing import Any

import grpc
from kubernetes import client

from mgpu.kube import Api, ApiError
from mgpu.kube.kubeconfig import Configured
from playground.container_runtime import Runtime
from playground.kubelet import Kubelet, KubeletConfig
from playground.scheduling import Extender, Scheduling
from proto import podresources_pb2 as resources
from proto import podresources_pb2_grpc as services
from tests.builders import node
from tests.playground.fake_plugin import CORE, Plugin
from tests.waiting import until

Json = dict[str, Any]
NODE = "/api/v1/nodes/n1"
PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"


class FakeCluster:
    """`start_kubelet` adds a kubelet for node n1, `start_scheduling` a scheduling loop; `close` stops everything."""

    kubelet: Kubelet

    def __init__(self, url: str, folder: Path) -> None:
        self.api = Api(Configured(client.Configuration(host=url, api_key={"authorization": "Bearer admin"})))
        self.folder = folder
        self._started: list[Any] = []

    def close(self) -> None:
        for part in self._started:
            part.stop()
        self.api.close()

    def start_scheduling(self, *extenders: Extender, api: Api | None = None) -> None:
        loop = Scheduling(api or self.api, extenders, backoff=(0.02, 0.2))
        self._started.append(loop)
        loop.start()

    def start_kubelet(self, **config: Any) -> None:
        self.config = KubeletConfig("n1", self.folder, retry_seconds=0.05, status_seconds=0.2, **config)
        self.runtime = Runtime(self.folder / "cdi")
        self.kubelet = Kubelet(self.config, self.api, self.runtime)
        self._started.append(self.kubelet)
        self.kubelet.start()

    def plugin(self, *, arrives: bool = True, **options: Any) -> Plugin:
        """Return a registered plugin; `arrives`: wait for its device list."""
        plugin = Plugin(self.config.plugins, **options)
        self._started.append(plugin)
        plugin.register()
        if arrives:
            until(lambda: set(self.kubelet.devices.all_ids()[CORE]) == set(plugin.devices))
        return plugin

    def node(self, name: str, **status: str) -> None:
        """Create a node without a kubelet."""
        body = node(name)
        del body["metadata"]["uid"]
        self.api.create("/api/v1/nodes", body)
        amounts = {"cpu": "4", "memory": "8Gi", "pods": "10", **status}
        self.api.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": amounts, "allocatable": amounts}})

    def capacity(self, resource: str = CORE) -> tuple[str | None, str | None]:
        """Return capacity and allocatable of the node n1."""
        status = self.api.get(NODE)["status"]
        return status["capacity"].get(resource), status["allocatable"].get(resource)

    def submit(self, name: str, amounts: dict[str, str] | None = None, **spec: Any) -> Json:
        """Create a pod without a node."""
        own = {"name": "c", "image": "cuda", "resources": {"requests": amounts or {}, "limits": amounts or {}}}
        return self.api.create(PODS, {"metadata": {"name": name}, "spec": {"containers": [own], **spec}})

    def create(self, name: str, core: int = 1, **spec: Any) -> Json:
        """Create a pod on the node n1."""
        return self.submit(name, {CORE: str(core)}, **{"nodeName": "n1", **spec})

    def pod(self, name: str) -> Json:
        return self.api.get(f"{PODS}/{name}")

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def exists(self, path: str) -> bool:
        try:
            self.api.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    def wait_running(self, name: str) -> Json:
        return dict(until(lambda: (pod := self.pod(name))["status"]["phase"] == "Running" and pod))

    def wait_gone(self, path: str) -> None:
        until(lambda: not self.exists(path))

    def waiting(self, name: str) -> Json:
        """Return the waiting state of the pod's first container, {} where it has none."""
        rows = self.pod(name)["status"].get("containerStatuses") or [{}]
        return rows[0].get("state", {}).get("waiting") or {}

    def node_of(self, name: str) -> str:
        return str(self.pod(name)["spec"].get("nodeName", ""))

    def wait_bound(self, name: str) -> str:
        return str(until(lambda: self.node_of(name)))

    def wait_refused(self, name: str) -> str:
        """Return the message of the condition PodScheduled=False."""

        def message() -> str:
            rows = self.pod(name)["status"].get("conditions") or ()
            return next((r["message"] for r in rows if (r["type"], r["status"]) == ("PodScheduled", "False")), "")

        return str(until(message))

    def listed(self) -> dict[str, dict[str, list[str]]]:
        """Return what PodResources lists: pod → container → ids."""
        with grpc.insecure_channel(f"unix:{self.config.pod_resources / 'kubelet.sock'}") as channel:
            stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
            pods = stub.List(resources.ListPodResourcesRequest(), timeout=5).pod_resources
        return {p.name: {c.name: [i for d in c.devices for i in d.device_ids] for c in p.containers} for p in pods}
