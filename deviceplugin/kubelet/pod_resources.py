"""Finds the owners of device ids through the kubelet's PodResources API.

The API does not return the UIDs of pods, and leaves regular init containers out. So `allocation` prefers the checkpoint
(`kubelet.checkpoint`), and calls this API only if the checkpoint may be out of date or cannot be read.
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
"""The size limit of an answer in bytes. An answer lists all containers of the node, and users choose their number and
the length of their names. Decoding an answer takes three times its size in memory, and the memory limit of the agent is
256 MiB. An answer with 250 pods of 20 containers each is smaller than 1 MiB.
"""
_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


def pod_resources_socket(own: DevicePluginSettings) -> Path:
    """Return the socket that the settings name, or the default one in the kubelet's folder."""
    return Path(own.pod_resources or Path(own.kubelet_dir) / "pod-resources" / "kubelet.sock")


@dataclass(frozen=True, slots=True)
class Owner:
    """A container that holds ids of a resource. `namespace` and `name` are those of its pod."""

    namespace: str
    name: str
    container: str
    ids: frozenset[str]


OwnersByResource = Mapping[str, Sequence[Owner]]
"""For each resource, the containers that hold ids of it."""


def owners_by_resource(answer: api.ListPodResourcesResponse) -> OwnersByResource:
    found: dict[str, list[Owner]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: dict[str, list[str]] = {}
            for device in container.devices:  # A resource may be listed once for each NUMA node.
                ids.setdefault(device.resource_name, []).extend(device.device_ids)
            for resource, own in ids.items():
                if own:
                    owner = Owner(pod.namespace, pod.name, container.name, frozenset(own))
                    found.setdefault(resource, []).append(owner)
    return found


class PodResources:
    """A client that makes one query for all waiting callers. The kubelet answers at most 100 queries per second.

    Use it on one event loop. Its lock makes sure that at most one query is in progress.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: Any = None
        self._lock = asyncio.Lock()
        self._began = 0.0
        self._answer: OwnersByResource | None = None

    async def owners(self, resource: str) -> list[Owner]:
        """Return the containers that hold ids of the resource.

        Raises RetryLater if the kubelet does not answer, or if its answer is larger than `_LARGEST`.
        """
        return list((await self._list()).get(resource, ()))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _list(self) -> OwnersByResource:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._lock:
            if self._answer is None or self._began < asked:
                self._began = loop.time()
                # If this query fails, waiting callers must not get the answer to the previous query.
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
        # A thread reads the answer, because a large one must not block the event loop, which answers the kubelet.
        return await asyncio.to_thread(owners_by_resource, answer)
