"""A kubelet with a runtime against a real API server of ours: what its tests do and look at."""

from pathlib import Path
from typing import Any

import grpc
from kubernetes import client

from mgpu.kube import Api, ApiError
from playground.kubelet import Kubelet, KubeletConfig
from playground.runtime import Runtime
from proto import podresources_pb2 as resources
from proto import podresources_pb2_grpc as services
from tests.playground.kubelet_plugin import CORE, Plugin
from tests.waiting import until

Json = dict[str, Any]
NODE, PODS = "/api/v1/nodes/n1", "/api/v1/namespaces/default/pods"


class Bench:
    def __init__(self, url: str, folder: Path, **config: Any) -> None:
        self.api = Api(client.Configuration(host=url, api_key={"authorization": "Bearer admin"}))
        self.folder = folder
        self.config = KubeletConfig("n1", folder, retry_seconds=0.05, status_seconds=0.2, **config)
        self.runtime = Runtime(folder / "cdi")
        self.kubelet = Kubelet(self.config, self.api, self.runtime)
        self.kubelet.start()
        self.plugins: list[Plugin] = []

    def plugin(self, *, arrives: bool = True, **options: Any) -> Plugin:
        """A plugin that is registered, and whose device list has arrived."""
        plugin = Plugin(self.config.plugins, **options)
        self.plugins.append(plugin)
        plugin.register()
        if arrives:
            until(lambda: set(self.kubelet.devices.all_ids()[CORE]) == set(plugin.devices))
        return plugin

    def capacity(self, resource: str = CORE) -> tuple[str | None, str | None]:
        status = self.api.get(NODE)["status"]
        return status["capacity"].get(resource), status["allocatable"].get(resource)

    def create(self, name: str, core: int = 1, **spec: Any) -> Json:
        own = {"name": "c", "image": "cuda", "resources": {"limits": {CORE: str(core)}}}
        body = {"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers": [own], **spec}}
        return self.api.create(PODS, body)

    def pod(self, name: str) -> Json:
        return self.api.get(f"{PODS}/{name}")

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def runs(self, name: str) -> Json:
        return dict(until(lambda: (pod := self.pod(name))["status"]["phase"] == "Running" and pod))

    def waits(self, name: str) -> Json:
        rows = self.pod(name)["status"].get("containerStatuses") or [{}]
        return rows[0].get("state", {}).get("waiting") or {}

    def gone(self, name: str) -> bool:
        try:
            self.pod(name)
        except ApiError as error:
            return error.status == 404
        return False

    def listed(self) -> dict[str, dict[str, list[str]]]:
        """PodResources: pod → container → ids."""
        with grpc.insecure_channel(f"unix:{self.config.pod_resources / 'kubelet.sock'}") as channel:
            stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
            pods = stub.List(resources.ListPodResourcesRequest(), timeout=5).pod_resources
        return {p.name: {c.name: [i for d in c.devices for i in d.device_ids] for c in p.containers} for p in pods}

    def close(self) -> None:
        self.kubelet.stop()
        for plugin in self.plugins:
            plugin.stop()
        self.api.close()
