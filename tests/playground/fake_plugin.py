"""A device plugin over gRPC for tests of the kubelet: it records its calls, and can refuse or delay them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

CORE = "example.com/core"


class Plugin(services.DevicePluginServicer):
    """Serves `resource` with `ids` on `<folder>/<socket>`; `register()` makes the kubelet dial it.

    pre_start: whether the kubelet must call PreStartContainer. streams: the number of ListAndWatch calls so far.
    """

    def __init__(
        self, folder: Path, ids: int = 8, resource: str = CORE, socket: str = "p.sock", *, pre_start: bool = True
    ) -> None:
        self.folder, self.resource, self.socket = folder, resource, socket
        self.pre_start = pre_start
        self.devices = {f"id-{i}": True for i in range(ids)}
        self.allocated: list[list[str]] = []
        self.started: list[list[str]] = []
        self.refuse_allocate = self.refuse_start = ""
        self.refuse_options = False
        self.hold_start = threading.Event()
        self.hold_start.set()
        self._changed = threading.Condition()
        self._version = 0
        self.streams = self._ended = 0
        self._server = grpc.server(ThreadPoolExecutor(8))
        services.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        (folder / socket).unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{folder / socket}")
        self._server.start()

    def register(self, version: str = "v1beta1") -> None:
        with grpc.insecure_channel(
            f"unix:{self.folder / 'kubelet.sock'}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            request = api.RegisterRequest(version=version, endpoint=self.socket, resource_name=self.resource)
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            stub.Register(request, timeout=10, wait_for_ready=True)

    def set_health(self, device: str, *, healthy: bool) -> None:
        with self._changed:
            self.devices[device] = healthy
            self._version += 1
            self._changed.notify_all()

    def end_streams(self) -> None:
        """End every ListAndWatch call; the server stays."""
        with self._changed:
            self._ended = self.streams
            self._changed.notify_all()

    def stop(self) -> None:
        self.hold_start.set()
        self.end_streams()
        self._server.stop(None).wait()

    def GetDevicePluginOptions(self, request: Any, context: Any) -> api.DevicePluginOptions:  # noqa: N802, ARG002
        if self.refuse_options:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return api.DevicePluginOptions(pre_start_required=self.pre_start)

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[api.ListAndWatchResponse]:  # noqa: N802, ARG002
        with self._changed:
            self.streams += 1
            own, seen = self.streams, -1
        while own > self._ended and context.is_active():
            with self._changed:
                if self._version == seen:
                    self._changed.wait(timeout=0.2)
                    continue
                seen = self._version
                devices = [
                    api.Device(ID=i, health="Healthy" if healthy else "Unhealthy")
                    for i, healthy in self.devices.items()
                ]
            yield api.ListAndWatchResponse(devices=devices)

    def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:  # noqa: N802
        if self.refuse_allocate:
            context.abort(grpc.StatusCode.INTERNAL, self.refuse_allocate)
        ids = list(request.container_requests[0].devices_ids)
        self.allocated.append(ids)
        answer = api.ContainerAllocateResponse(envs={"IDS": ",".join(sorted(ids))})
        return api.AllocateResponse(container_responses=[answer])

    def PreStartContainer(self, request: Any, context: Any) -> api.PreStartContainerResponse:  # noqa: N802
        self.started.append(list(request.devices_ids))
        self.hold_start.wait(20)
        if self.refuse_start:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse_start)
        return api.PreStartContainerResponse()
