"""The kubelet's PodResources service: which container holds which ids."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from playground.kubelet.devices import DeviceManager
from proto import podresources_pb2 as api
from proto import podresources_pb2_grpc as services

Raw = Mapping[str, Any]
QUERIES_PER_SECOND, BURST = 100.0, 10


class TokenBucket:
    """`rate` calls per second, and up to `burst` at once."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._last = float(burst), clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate)
            self._last = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class PodResources(services.PodResourcesListerServicer):
    """Serves on `socket`. `pods`: what the kubelet knows now. Beyond the limit: RESOURCE_EXHAUSTED."""

    def __init__(
        self, socket: Path, devices: DeviceManager, pods: Callable[[], Iterable[Raw]], limit: TokenBucket
    ) -> None:
        self._socket, self._devices, self._pods, self._limit = socket, devices, pods, limit
        self._server: Any = None

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(8, "pod-resources"), options=[("grpc.so_reuseport", 0)])
        services.add_PodResourcesListerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def List(self, request: Any, context: Any) -> api.ListPodResourcesResponse:  # noqa: N802, ARG002
        self._admit(context)
        held = self._held()
        return api.ListPodResourcesResponse(pod_resources=[_pod(pod, held) for pod in self._pods()])

    def Get(self, request: Any, context: Any) -> api.GetPodResourcesResponse:  # noqa: N802
        self._admit(context)
        wanted = (request.pod_namespace, request.pod_name)
        for pod in self._pods():
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == wanted:
                return api.GetPodResourcesResponse(pod_resources=_pod(pod, self._held()))
        context.abort(grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found")
        raise AssertionError("abort does not return")

    def GetAllocatableResources(self, request: Any, context: Any) -> api.AllocatableResourcesResponse:  # noqa: N802, ARG002
        self._admit(context)
        rows = sorted(self._devices.all_ids().items())
        devices = [device for resource, ids in rows for device in _one_by_one(resource, ids)]
        return api.AllocatableResourcesResponse(devices=devices)

    def _admit(self, context: Any) -> None:
        if not self._limit.take():
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def _held(self) -> dict[tuple[str, str], list[api.ContainerDevices]]:
        held: dict[tuple[str, str], list[api.ContainerDevices]] = {}
        for e in self._devices.entries():
            held.setdefault((e.uid, e.container), []).extend(_one_by_one(e.resource, e.ids))
        return held


def _one_by_one(resource: str, ids: Iterable[str]) -> list[api.ContainerDevices]:
    """An entry for each id, as the kubelet lists ids that have no topology."""
    return [api.ContainerDevices(resource_name=resource, device_ids=[device]) for device in ids]


def _pod(pod: Raw, held: Mapping[tuple[str, str], list[api.ContainerDevices]]) -> api.PodResources:
    meta, spec = pod["metadata"], pod["spec"]
    sidecars = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    return api.PodResources(
        name=meta["name"],
        namespace=meta["namespace"],
        containers=[
            api.ContainerResources(name=c["name"], devices=held.get((meta["uid"], c["name"]), ()))
            for c in [*sidecars, *spec["containers"]]
        ],
    )
