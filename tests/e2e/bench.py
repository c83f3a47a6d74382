"""What the end-to-end tests do and look at, through the Kubernetes Python client."""

import json
from typing import Any

from kubernetes import client, config

from mgpu.settings import load_settings
from playground.cluster import Cluster
from playground.samples import Samples
from tests.waiting import until

Json = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"
CORE, MEMORY = "vke.volcengine.com/mgpu-core", "vke.volcengine.com/mgpu-memory"
INDEX, ASSUMED = "vke.volcengine.com/gpu-index-container-", "vke.volcengine.com/assumed"
GPUSHARE = "scheduler.framework.gpushare.allocation"
KOORDINATOR, PER_CONTAINER = "scheduling.koordinator.sh/device-allocated", "mgpu.io/container-devices"


_GPU = {CORE, "aliyun.com/gpu-mem", "nvidia.com/gpu"} | {
    f"koordinator.sh/{name}" for name in ("gpu", "gpu-core", "gpu-memory", "gpu-memory-ratio")
}


def asking(name: str, *, requests: bool = False, **amounts: object) -> Json:
    """A pod whose container `c` asks in any vocabulary: `asking("p", gpu_mem=8)`, in limits or in requests alone."""
    resources = {_NAMES[key]: str(amount) for key, amount in amounts.items()}
    own = {"name": "c", "image": "cuda", "resources": {"requests" if requests else "limits": resources}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [own]}}


_NAMES = {
    "cpu": "cpu",
    "gpu_mem": "aliyun.com/gpu-mem",
    "nvidia": "nvidia.com/gpu",
    "gpu": "koordinator.sh/gpu",
    "core": "koordinator.sh/gpu-core",
    "memory": "koordinator.sh/gpu-memory",
    "ratio": "koordinator.sh/gpu-memory-ratio",
    "rdma": "koordinator.sh/rdma",
    "ram": "memory",
}


def share(name: str, core: int = 30, mib: int | None = 4096, **spec: Any) -> Json:
    """A pod with one container, `c`."""
    limits = {CORE: str(core)} | ({} if mib is None else {MEMORY: str(mib)})
    own = {"name": "c", "image": "cuda", "resources": {"limits": limits}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [own], **spec}}


def _of_gpu(pod: Any) -> list[Any]:
    containers = [*(pod.spec.init_containers or ()), *pod.spec.containers]
    return [c for c in containers if _GPU & (c.resources.limits or {}).keys()]


class Bench:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        configuration = client.Configuration()
        config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self._client = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self._client)
        self.samples = Samples(cluster.api, load_settings())

    def create(self, pod: Json) -> Any:
        return self.core.create_namespaced_pod("default", pod)  # type: ignore[arg-type]

    def pod(self, name: str) -> Any:
        return self.core.read_namespaced_pod(name, "default")

    def runs(self, name: str, seconds: float = 60.0) -> Any:
        """The pod, as soon as it runs."""
        return until(lambda: (pod := self.pod(name)).status.phase == "Running" and pod, seconds)

    def delete(self, name: str) -> None:
        """And wait until it is gone."""
        self.core.delete_namespaced_pod(name, "default")
        until(lambda: name not in self.names())

    def names(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.cluster.api.list(PODS)[0]}

    def count_bound(self) -> int:
        return sum("nodeName" in pod["spec"] for pod in self.cluster.api.list(PODS)[0])

    def bound(self) -> list[Any]:
        pods: list[Any] = self.core.list_namespaced_pod("default").items
        return [pod for pod in pods if pod.spec.node_name]

    def cards(self, name: str) -> dict[str, list[int]]:
        """Container → card indexes, as the pod's annotations say in whichever vocabulary."""
        pod = self.pod(name)
        annotations = pod.metadata.annotations or {}
        if GPUSHARE in annotations:
            return {container: sorted(map(int, row)) for container, row in json.loads(annotations[GPUSHARE]).items()}
        if PER_CONTAINER in annotations:
            rows = json.loads(annotations[PER_CONTAINER]).items()
            return {container: sorted(row["gpu"]) for container, row in rows if "gpu" in row}
        if KOORDINATOR in annotations:
            cards = sorted(row["minor"] for row in json.loads(annotations[KOORDINATOR]).get("gpu", ()))
            return {container.name: cards for container in _of_gpu(pod)}
        found = {key.removeprefix(INDEX): value for key, value in annotations.items() if key.startswith(INDEX)}
        return {container: sorted(map(int, value.split(","))) for container, value in found.items()}

    def sees(self, name: str) -> dict[str, list[int]]:
        """Container → card indexes, as the logs of its GPU containers say; each must name cards of its own node."""
        pod = self.pod(name)
        prefix = f"GPU-{pod.spec.node_name}-"
        seen = {}
        for container in _of_gpu(pod):
            uuids = self.environment(name, container.name)["NVIDIA_VISIBLE_DEVICES"].split(",")
            assert all(uuid.startswith(prefix) for uuid in uuids), uuids
            seen[container.name] = sorted(int(uuid.removeprefix(prefix)) for uuid in uuids)
        return seen

    def environment(self, name: str, container: str) -> dict[str, str]:
        """What the container sees: its log."""
        text = self.core.read_namespaced_pod_log(name, "default", container=container)
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)  # the others are mounts

    def exact(self, name: str) -> None:
        """The pod runs, and every container has exactly the cards of its record."""
        self.runs(name)
        assert self.cards(name)
        assert self.sees(name) == self.cards(name)

    def waits(self, name: str) -> str:
        """Why the pod has no node."""

        def found() -> str:
            rows = self.pod(name).status.conditions or ()
            return next((r.message or "" for r in rows if (r.type, r.status) == ("PodScheduled", "False")), "")

        return until(found)

    def events(self, name: str, reason: str) -> list[str]:
        selector = f"involvedObject.name={name},reason={reason}"
        events: list[Any] = self.core.list_namespaced_event("default", field_selector=selector).items
        return [event.message for event in events]

    def within_capacity(self) -> bool:
        """Whether no card is over what it has."""
        return all(
            state.core_used <= state.card.core and state.memory_used <= state.card.memory
            for states in self.samples.states().values()
            for state in states
        )

    def clear(self) -> None:
        """Delete all pods and what was said of them."""
        for name in self.names():
            self.core.delete_namespaced_pod(name, "default")
        until(lambda: not self.names())
        self.core.delete_collection_namespaced_event("default")

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()
