"""Simulates NVIDIA's own device plugin, which offers whole cards by UUID and answers Allocate by itself.

`cluster` starts it on nodes with `nvidia_plugin`; tests of the node agent run it together with the agent.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

RESOURCE = "nvidia.com/gpu"
_SOCKET = "nvidia-gpu.sock"
_SECONDS = 10.0


class NvidiaPlugin(services.DevicePluginServicer):
    """Serves `uuids` to the kubelet whose plugin folder is `folder`. The kubelet's choice of cards stands."""

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._folder = folder
        self._uuids = tuple(uuids)
        self._ended = threading.Event()
        self._server: Any = None

    def start(self) -> None:
        """Serve and register, once: after a restart of the kubelet it is unknown. Raises grpc.RpcError."""
        self._server = grpc.server(ThreadPoolExecutor(4, "nvidia-plugin"), options=[("grpc.so_reuseport", 0)])
        services.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._folder / _SOCKET}")
        self._server.start()
        with grpc.insecure_channel(f"unix:{self._folder / 'kubelet.sock'}") as channel:
            request = api.RegisterRequest(version="v1beta1", endpoint=_SOCKET, resource_name=RESOURCE)
            services.RegistrationStub(channel).Register(  # type: ignore[no-untyped-call]
                request, timeout=_SECONDS, wait_for_ready=True
            )

    def stop(self) -> None:
        self._ended.set()
        self._server.stop(None).wait()

    def GetDevicePluginOptions(self, request: Any, context: Any) -> api.DevicePluginOptions:  # noqa: N802, ARG002
        return api.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[api.ListAndWatchResponse]:  # noqa: N802, ARG002
        yield api.ListAndWatchResponse(devices=[api.Device(ID=uuid, health="Healthy") for uuid in self._uuids])
        self._ended.wait()

    def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:  # noqa: N802, ARG002
        responses = [
            api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(container.devices_ids))})
            for container in request.container_requests
        ]
        return api.AllocateResponse(container_responses=responses)
