"""Creates and reads pods of a cluster for the end-to-end tests, as users do with the Kubernetes Python client.

The fixture `bench` of conftest.py provides a `Bench`. It polls through `mgpu.kube.Api`, whose calls take much less CPU
than those of the Python client.
"""

import json
import shutil
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
    """Return a pod whose container `c` requests these amounts: `asking("p", gpu_mem=8)`.

    requests: name the amounts in the requests alone, instead of in the limits.
    """
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
    """Return an mGPU pod with one container, `c`."""
    limits = {CORE: str(core)} | ({} if mib is None else {MEMORY: str(mib)})
    own = {"name": "c", "image": "cuda", "resources": {"limits": limits}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [own], **spec}}


def _of_gpu(pod: Any) -> list[Any]:
    containers = [*(pod.spec.init_containers or ()), *pod.spec.containers]
    return [c for c in containers if _GPU & (c.resources.limits or {}).keys()]


class Bench:
    """The pods of the namespace `default` in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        configuration = client.Configuration()
        config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        # `Api.connect` removes the temporary file that the library has written.
        configuration.ssl_ca_cert = str(shutil.copy(str(configuration.ssl_ca_cert), cluster.folder / "bench-ca.crt"))
        self._client = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self._client)
        self.samples = Samples(cluster.api, load_settings())

    def create(self, pod: Json) -> Any:
        return self.core.create_namespaced_pod("default", pod)  # type: ignore[arg-type]

    def pod(self, name: str) -> Any:
        return self.core.read_namespaced_pod(name, "default")

    def runs(self, name: str, seconds: float = 60.0) -> Any:
        """Return the pod as soon as it runs."""
        until(lambda: self.raw(name)["status"].get("phase") == "Running", seconds)
        return self.pod(name)

    def raw(self, name: str) -> Json:
        """Return the pod as the API server has it."""
        return self.cluster.api.get(f"{PODS}/{name}")

    def delete(self, name: str) -> None:
        """Delete the pod and wait until it is gone."""
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
        """Return container → card indexes, from the pod's allocation record in any vocabulary."""
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
        """Return container → card indexes, from the logs of its GPU containers. All must be cards of the pod's node."""
        pod = self.pod(name)
        prefix = f"GPU-{pod.spec.node_name}-"
        seen = {}
        for container in _of_gpu(pod):
            uuids = self.environment(name, container.name)["NVIDIA_VISIBLE_DEVICES"].split(",")
            assert all(uuid.startswith(prefix) for uuid in uuids), uuids
            seen[container.name] = sorted(int(uuid.removeprefix(prefix)) for uuid in uuids)
        return seen

    def environment(self, name: str, container: str) -> dict[str, str]:
        """Return the environment of the container, which is its log."""
        text = self.core.read_namespaced_pod_log(name, "default", container=container)
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)  # other lines are mounts

    def exact(self, name: str) -> None:
        """Check that the pod runs, and that every container sees exactly the cards of the pod's record."""
        self.runs(name)
        assert self.cards(name)
        assert self.sees(name) == self.cards(name)

    def waits(self, name: str) -> str:
        """Return why the pod has no node, as soon as its condition says it."""

        def find_reason() -> str | None:
            rows = self.raw(name)["status"].get("conditions") or ()
            return next((r.get("message") for r in rows if (r["type"], r["status"]) == ("PodScheduled", "False")), None)

        return until(find_reason)

    def events(self, name: str, reason: str) -> list[str]:
        selector = f"involvedObject.name={name},reason={reason}"
        events: list[Any] = self.core.list_namespaced_event("default", field_selector=selector).items
        return [event.message for event in events]

    def within_capacity(self) -> bool:
        """Return whether no card is overcommitted."""
        return all(
            state.core_used <= state.card.core and state.memory_used <= state.card.memory
            for states in self.samples.states().values()
            for state in states
        )

    def clear(self) -> None:
        """Delete all pods and their events."""
        for name in self.names():
            self.cluster.api.delete(f"{PODS}/{name}")
        until(lambda: not self.names())
        self.cluster.api.delete("/api/v1/namespaces/default/events")

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()
