"""Who holds device ids now: asked of the kubelet's PodResources API. It names pods, not their UIDs, and leaves regular
init containers out."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from mgpu.model.errors import RetryLater
from mgpu.settings import DevicePluginSettings
from proto import podresources_pb2 as api
from proto import podresources_pb2_grpc

_QUERY_SECONDS = 2.0
_LARGEST = 16 << 20
"""Bytes of an answer, which lists every container of the node. Their authors choose how many there are and how long
their names are, and decoding takes three times as much memory as the answer: the agent's limit is 256 MiB. 250 pods
of 20 containers take less than 1 MiB.
"""
_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


def pod_resources_socket(own: DevicePluginSettings) -> Path:
    return Path(own.pod_resources or Path(own.kubelet_dir) / "pod-resources" / "kubelet.sock")


@dataclass(frozen=True, slots=True)
class Owner:
    """A container that holds `ids` of a resource."""

    namespace: str
    name: str
    container: str
    ids: frozenset[str]


Held = Mapping[str, Sequence[Owner]]
"""By resource, the containers that hold ids of it."""


def held(answer: api.ListPodResourcesResponse) -> Held:
    found: dict[str, list[Owner]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: dict[str, list[str]] = {}
            for device in container.devices:  # several of one resource: one per NUMA node
                ids.setdefault(device.resource_name, []).extend(device.device_ids)
            for resource, own in ids.items():
                if own:
                    owner = Owner(pod.namespace, pod.name, container.name, frozenset(own))
                    found.setdefault(resource, []).append(owner)
    return found


class PodResources:
    """One query at a time (the kubelet answers 100 a second), shared by all who asked before it began.

    Of an answer only the containers that hold ids are kept. An answer that is too large is refused, as one that does
    not come: a container that depends on it is not started then.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: Any = None
        self._lock = asyncio.Lock()
        self._began = 0.0
        self._answer: Held | None = None

    async def owners(self, resource: str) -> list[Owner]:
        """Return all containers that hold ids of `resource`. Raises RetryLater where the kubelet gives no answer."""
        return list((await self._list()).get(resource, ()))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _list(self) -> Held:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._lock:
            if self._answer is None or self._began < asked:
                # Where this one fails, those who wait must not take the one before it for its answer.
                self._began, self._answer = loop.time(), None
                self._answer = await self._query()
            return self._answer

    async def _query(self) -> Held:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        stub = podresources_pb2_grpc.PodResourcesListerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            answer: api.ListPodResourcesResponse = await stub.List(
                api.ListPodResourcesRequest(), timeout=_QUERY_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise RetryLater(f"PodResources: {error.code().name}: {error.details()}") from error
        return await asyncio.to_thread(held, answer)  # the loop answers the kubelet meanwhile
