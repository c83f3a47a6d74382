"""Simulates NVIDIA's own device plugin, which offers whole cards by their UUIDs.

`playground.cluster` starts it on nodes with `NodeSpec.nvidia_plugin`, in addition to mgpu's node agent.
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
_SECONDS = 10.0  # the time limit of the registration


class NvidiaPlugin(services.DevicePluginServicer):
    """The device plugin of one node. A container gets exactly the cards that the kubelet has chosen.

    Args:
        folder: The kubelet's folder for the sockets of device plugins.
        uuids: The UUIDs of the cards to offer.
    """

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._folder = folder
        self._uuids = tuple(uuids)
        self._ended = threading.Event()
        self._server: Any = None

    def start(self) -> None:
        """Start the server and register with the kubelet. Raises grpc.RpcError if the registration fails.

        Unlike the real plugin, it does not register again after a restart of the kubelet.
        """
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
