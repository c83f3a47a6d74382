"""The owners of device ids by the kubelet's PodResources API.

The API names pods without their UIDs, and leaves regular init containers out. So the checkpoint is the first source
(`deviceplugin.kubelet.checkpoint`), and this is asked where the checkpoint may be out of date or cannot be read.
"""

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
"""The largest answer in bytes. It lists every container of the node; users choose how many there are and how long their
names are, and decoding takes three times the memory, of which the agent has 256 MiB. 250 pods of 20 containers take
less than 1 MiB.
"""
_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


def pod_resources_socket(own: DevicePluginSettings) -> Path:
    """Return the socket of the setting, or else the one below the kubelet's folder."""
    return Path(own.pod_resources or Path(own.kubelet_dir) / "pod-resources" / "kubelet.sock")


@dataclass(frozen=True, slots=True)
class Owner:
    """A container that holds `ids` of a resource."""

    namespace: str
    name: str
    container: str
    ids: frozenset[str]


OwnersByResource = Mapping[str, Sequence[Owner]]
"""Resource → the containers that hold ids of it."""


def owners_by_resource(answer: api.ListPodResourcesResponse) -> OwnersByResource:
    """Return the part of an answer that is kept."""
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
    """Asks the kubelet, with one query at a time for all callers that wait: it answers at most 100 a second.

    Used on one event loop. An answer that is too large counts as none; a container that depends on it does not start.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: Any = None
        self._lock = asyncio.Lock()
        self._began = 0.0
        self._answer: OwnersByResource | None = None

    async def owners(self, resource: str) -> list[Owner]:
        """Return all containers that hold ids of the resource now. Raises RetryLater if the kubelet does not answer."""
        return list((await self._list()).get(resource, ()))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _list(self) -> OwnersByResource:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._lock:
            if self._answer is None or self._began < asked:
                # If this query fails, callers that wait must not take the answer of the previous one.
                self._began = loop.time()
                self._answer = None
                self._answer = await self._query()
            return self._answer

    async def _query(self) -> OwnersByResource:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        stub = podresources_pb2_grpc.PodResourcesListerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            answer: api.ListPodResourcesResponse = await stub.List(
                api.ListPodResourcesRequest(), timeout=_QUERY_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise RetryLater(f"PodResources: {error.code().name}: {error.details()}") from error
        return await asyncio.to_thread(
            owners_by_resource, answer
        )  # a large answer must not block the loop, which answers the kubelet
