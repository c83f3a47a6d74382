"""A node for tests: the playground's API server, kubelet and runtime, and the real agent between them."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from kubernetes import client

from deviceplugin.agent import Agent
from deviceplugin.cards.simulated_cards import SimulatedCards
from deviceplugin.inventory.node_objects import NodeObjects
from deviceplugin.isolation.driver.memory_limits import MemoryLimits
from deviceplugin.usage.usage_reader import UsageSource
from mgpu.kube import Api, ApiError
from mgpu.kube.kubeconfig import Configured
from mgpu.settings import load_settings
from playground.container_runtime import GpuClients, Runtime
from playground.kubelet import Kubelet, KubeletConfig
from playground.nvml_state import state_file
from playground.simulated_nvml import SimulatedMig, simulated_processes
from tests.builders import CORE
from tests.waiting import until

Json = dict[str, Any]
PODS, NODE = "/api/v1/namespaces/default/pods", "/api/v1/nodes/n1"
DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "devices.scheduling.koordinator.sh"},
    "spec": {
        "group": "scheduling.koordinator.sh",
        "scope": "Cluster",
        "names": {"kind": "Device", "plural": "devices", "singular": "device"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def api_of(url: str, timeout: float = 60.0) -> Api:
    """Return a client. The timeout is long, since the API server in this process may be slow on a busy machine."""
    return Api(Configured(client.Configuration(host=url, api_key={"authorization": "Bearer admin"})), timeout=timeout)


@contextmanager
def served(agent: Agent) -> Iterator[None]:
    """Run the agent on its own loop and thread, and stop it at the end as SIGTERM does."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(agent.run())
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run, name="agent")
    thread.start()
    try:
        yield
    finally:
        agent.stop()
        thread.join(60)
    assert not thread.is_alive()
    assert not failed


class Node:
    """The node `n1` with simulated cards. `with node.agent(): …` runs an agent."""

    def __init__(self, url: str, folder: Path, cards: object) -> None:
        self.url = url
        self.folder = folder
        self.api = api_of(url)
        self.file = folder / "cards.yaml"
        self.limits = folder / "limits"
        self.set_cards(cards)
        self.nvml = state_file(self.file)
        self.runtime = Runtime(folder / "cdi", GpuClients(self.nvml))
        config = KubeletConfig("n1", folder, retry_seconds=0.2, status_seconds=0.2)
        self.kubelet = Kubelet(config, self.api, self.runtime)
        self.kubelet.start()

    def set_cards(self, cards: object) -> None:
        new = self.file.with_suffix(".new")
        new.write_bytes(orjson.dumps(cards))
        new.replace(self.file)

    @contextmanager
    def agent(self, **settings: Any) -> Iterator[Agent]:
        """Run an agent, and wait until it is ready.

        Args:
            settings: keys of the block `deviceplugin`, or whole paths.
        """
        with self.starting(**settings) as agent:
            until(lambda: not agent.not_ready_reason() and self.healthy_ids())
            yield agent

    @contextmanager
    def starting(self, **settings: Any) -> Iterator[Agent]:
        """Run an agent without waiting until it is ready."""
        with self.made(**settings) as agent, served(agent):
            yield agent

    @contextmanager
    def made(self, **settings: Any) -> Iterator[Agent]:
        """Create an agent that does not run yet."""
        folders = {"kubeletDir": str(self.folder), "cdiDir": str(self.folder / "cdi"), "limitsDir": str(self.limits)}
        # Only tests of measured use need it.
        own = {"node": "n1", "usageSeconds": 0, **folders, "criSocket": str(self.folder / "cri.sock"), **settings}
        api = api_of(self.url, timeout=10.0)
        parsed = load_settings(flags={k if "." in k else f"deviceplugin.{k}": value for k, value in own.items()})
        agent = Agent(
            parsed,
            NodeObjects(api, "n1"),
            SimulatedCards(self.file, "n1"),
            api,
            SimulatedMig(self.file, "n1"),
            usage_source=UsageSource(*simulated_processes(self.file, "n1")),
            limits=MemoryLimits(simulated_processes(self.file, "n1")[0]),
        )
        yield agent
        api.close()

    def healthy_ids(self) -> int:
        """Return how many core ids the kubelet can allocate. The node status follows later."""
        return self.kubelet.devices.capacity()[1].get(CORE, 0)

    def allocatable(self) -> Mapping[str, str]:
        return dict(self.api.get(NODE)["status"]["allocatable"])

    def create(self, pod: Mapping[str, Any]) -> Json:
        """Create a pod of `tests.builders.pod`; the API server chooses its UID."""
        meta = {k: v for k, v in pod["metadata"].items() if k != "uid"}
        return self.api.create(PODS, {**pod, "metadata": meta})

    def pod(self, name: str) -> Json:
        return self.api.get(f"{PODS}/{name}")

    def runs(self, name: str) -> Json:
        return until(lambda: pod if (pod := self.pod(name))["status"]["phase"] == "Running" else None)

    def waits(self, name: str) -> str:
        """Return why the pod's container does not start."""
        rows = self.pod(name)["status"].get("containerStatuses") or [{}]
        return str((rows[0].get("state", {}).get("waiting") or {}).get("message", ""))

    def decide(self, name: str, **cards: str) -> None:
        """Write an allocation record: container → card indexes."""
        record = {f"vke.volcengine.com/gpu-index-container-{c}": value for c, value in cards.items()}
        patch = {"metadata": {"annotations": {"vke.volcengine.com/assumed": "true", **record}}}
        self.api.patch(f"{PODS}/{name}", patch)

    def env(self, name: str, container: str = "c") -> Mapping[str, str]:
        found = [c for c in self.runtime.containers() if (c.pod, c.name) == (name, container)]
        return found[-1].env

    def visible(self, name: str, container: str = "c") -> str:
        return self.env(name, container)["NVIDIA_VISIBLE_DEVICES"]

    def device(self) -> Json | None:
        try:
            return self.api.get(f"{DEVICES}/n1")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def cdi_files(self) -> list[Path]:
        return sorted((self.folder / "cdi").glob("*.json"))

    def close(self) -> None:
        self.kubelet.stop()
        self.api.close()
