"""Who owns device ids: asked of the kubelet's PodResources API, and read from its checkpoint.

PodResources leaves regular init containers out and the answers that Allocate gave; the checkpoint has both, but it is
the kubelet's private file. So it is read only for what PodResources does not say.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import orjson
from google.protobuf.message import DecodeError

from mgpu.model.errors import RetryLater
from proto import deviceplugin_pb2, podresources_pb2_grpc
from proto import podresources_pb2 as api

log = logging.getLogger(__name__)

_QUERY_SECONDS = 2.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class Owner:
    """A container that holds `ids` of a resource. By PodResources: namespace and name; by the checkpoint: the UID.

    cdi, env: the CDI devices and the environment that Allocate answered for it (the checkpoint alone knows).
    """

    container: str
    ids: frozenset[str]
    namespace: str = ""
    name: str = ""
    uid: str = ""
    cdi: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


class PodResources:
    """One query at a time (the kubelet answers 100 a second), shared by all who asked before it began."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: Any = None
        self._lock = asyncio.Lock()
        self._began = 0.0
        self._answer: api.ListPodResourcesResponse | None = None

    async def owners(self, resource: str) -> list[Owner]:
        """All containers that hold ids of `resource`. Raises RetryLater where the kubelet does not answer."""
        return [
            Owner(container.name, frozenset(ids), pod.namespace, pod.name)
            for pod in (await self._list()).pod_resources
            for container in pod.containers
            if (ids := [i for d in container.devices if d.resource_name == resource for i in d.device_ids])
        ]

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _list(self) -> api.ListPodResourcesResponse:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._lock:
            if self._answer is None or self._began < asked:
                self._began = loop.time()
                self._answer = await self._query()
            return self._answer

    async def _query(self) -> api.ListPodResourcesResponse:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        stub = podresources_pb2_grpc.PodResourcesListerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            answer: api.ListPodResourcesResponse = await stub.List(
                api.ListPodResourcesRequest(), timeout=_QUERY_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise RetryLater(f"PodResources: {error.code().name}: {error.details()}") from error
        return answer


def read_checkpoint(file: Path, resource: str) -> list[Owner]:
    """The owners of a resource's ids by the device manager's checkpoint; none where it cannot be read."""
    try:
        data = orjson.loads(file.read_bytes())["Data"]
        return [_entry(row) for row in data["PodDeviceEntries"] or () if row["ResourceName"] == resource]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DecodeError) as error:
        log.warning("the kubelet's checkpoint %s is not readable: %r", file, error)
        return []


def _entry(row: dict[str, Any]) -> Owner:
    """`DeviceIDs` are by NUMA node, `AllocResp` is the answer to Allocate: protobuf, as base64."""
    ids: Sequence[Sequence[str]] = list(row["DeviceIDs"].values())
    try:
        response = deviceplugin_pb2.ContainerAllocateResponse.FromString(base64.b64decode(row["AllocResp"] or ""))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    return Owner(
        container=row["ContainerName"],
        ids=frozenset(i for part in ids for i in part),
        uid=row["PodUID"],
        cdi=tuple(device.name for device in response.cdi_devices),
        env=dict(response.envs),
    )
