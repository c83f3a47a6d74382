"""The DevicePlugin service (v1beta1) of one resource, on grpc.aio.

The client is the kubelet, or an earlier agent that forwards the kubelet's calls. `Plugin` passes the calls to the
resource's allocator, and holds them back while another agent takes over (`handover.takeover`). `DeviceList` contains
the device ids that the kubelet reads by ListAndWatch. `plugin.registration` starts the gRPC server.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from deviceplugin import metrics
from deviceplugin.allocation.allocator import Answer
from deviceplugin.delivery.cdi import PERMISSIONS
from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import VISIBLE, VOID, Refused
from deviceplugin.unix_sockets import CHANNEL
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

_DURATIONS = {"Allocate": metrics.ALLOCATE, "PreStartContainer": metrics.PRESTART}
OPTIONS = api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)


class Allocator(Protocol):
    """The part of `allocation.allocator.Allocator` that answers the kubelet."""

    async def allocate(self, ids: Sequence[str]) -> Answer: ...
    async def pre_start(self, ids: Sequence[str]) -> GpuPod: ...


class DeviceList:
    """The device ids of a resource that are offered to the kubelet. Use it on one event loop.

    Attributes:
        ids: Whether a device id is healthy, by id.
        silent: Whether to send nothing, as long as another plugin may serve the resource. If the stream ended instead,
            the kubelet would disconnect that plugin (`plugin.registration`).
        changed: A signal that wakes the streams.
    """

    def __init__(self) -> None:
        self.ids: dict[str, bool] = {}
        self.silent = False
        self.changed = Wakeup()
        self._resends = 0

    @property
    def version(self) -> tuple[int, dict[str, bool]]:
        """A value that changes whenever the streams must send the list again."""
        return self._resends, self.ids

    def offer(self, ids: Mapping[str, bool]) -> None:
        """Replace the ids, and send them if they or their health have changed."""
        self.ids = dict(ids)
        self.changed.wake()

    def resend(self) -> None:
        """Send the list again. The kubelet writes its checkpoint after every list that it receives."""
        self._resends += 1
        self.changed.wake()


class Plugin:
    """The service of one resource. Use it on one event loop.

    Attributes:
        streams: The number of ListAndWatch streams that are open now.
        opened: The number of streams that were opened since the last registration. `open` sets it to 0, and
            `Registration` does so before it registers the same server again.
        stream_ended: A signal that is sent whenever a stream has ended.
        withdrawing: Whether to refuse to report the options, so that the kubelet drops the registration
            (`handover.takeover`).
        held_calls: The number of calls that wait for the successor or for its answer.
    """

    def __init__(self, resource: str, allocator: Allocator, device_list: DeviceList) -> None:
        self.resource = resource
        self.device_list = device_list
        self._allocator = allocator
        self._ended = False
        self._generation = 0
        self._calls = 0
        self._idle = Wakeup()
        self._successor: asyncio.Future[Path | None] | None = None
        self.streams = 0
        self.opened = 0
        self.stream_ended = Wakeup()
        self.withdrawing = False
        self.held_calls = 0

    def open(self) -> None:
        """Allow ListAndWatch streams, and bind the signals to the running event loop."""
        self._ended = False
        self.opened = 0
        for wakeup in (self.device_list.changed, self.stream_ended, self._idle):
            wakeup.bind()

    def end_streams(self) -> None:
        """End all streams. Until `open` is called, new streams end at once too."""
        self._ended = True
        self.device_list.changed.wake()

    @property
    def has_ended(self) -> bool:
        """Whether `end_streams` was called since `open`."""
        return self._ended

    def renew_streams(self) -> None:
        """End the open streams. New streams are still allowed."""
        self._generation += 1
        self.device_list.changed.wake()

    async def hold_calls(self) -> None:
        """Hold back new calls, and wait until the calls in progress are answered."""
        self._successor = asyncio.get_running_loop().create_future()
        while self._calls:
            await self._idle.wait(1.0)

    def forward_calls_to(self, socket: Path | None) -> None:
        """Forward held calls and all later ones to the successor's socket. If the socket is None, the calls fail."""
        if self._successor is not None and not self._successor.done():
            self._successor.set_result(socket)

    async def GetDevicePluginOptions(self, request: api.Empty, context: Any) -> api.DevicePluginOptions:  # noqa: N802, ARG002
        if self.withdrawing:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the agent withdraws this registration to take over the node"
            )
        return OPTIONS

    async def ListAndWatch(self, request: api.Empty, context: Any) -> AsyncIterator[api.ListAndWatchResponse]:  # noqa: N802, ARG002
        self.streams += 1
        self.opened += 1
        try:
            sent: tuple[int, dict[str, bool]] | None = None
            generation = self._generation
            while not self._ended and generation == self._generation:
                if not self.device_list.silent and self.device_list.version != sent:
                    sent = self.device_list.version
                    yield _response_of_list(self.device_list.ids)
                else:
                    await self.device_list.changed.wait()
        finally:
            self.streams -= 1
            self.stream_ended.wake()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not implemented: device ids stand for no particular card")

    async def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:  # noqa: N802
        response: api.AllocateResponse = await self._answer("Allocate", self._allocate, request, context)
        return response

    async def PreStartContainer(  # noqa: N802
        self, request: api.PreStartContainerRequest, context: Any
    ) -> api.PreStartContainerResponse:
        answer = self._answer("PreStartContainer", self._pre_start, request, context)
        response: api.PreStartContainerResponse = await answer
        return response

    async def _answer(
        self, method: str, work: Callable[[Any, Any], Coroutine[Any, Any, tuple[Any, str]]], request: Any, context: Any
    ) -> Any:
        """Return the response of `work`, and record its result and duration in the metrics.

        If another agent takes over, the call is forwarded to that agent instead.
        """
        if self._successor is not None:
            return await self._forward(method, request, context)
        began = time.perf_counter()
        result = "refused"
        self._calls += 1
        try:
            response, result = await work(request, context)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.wake()
            _DURATIONS[method].labels(result).observe(time.perf_counter() - began)
        return response

    async def _allocate(self, request: api.AllocateRequest, context: Any) -> tuple[api.AllocateResponse, str]:
        response = api.AllocateResponse()
        for container in request.container_requests:
            try:
                answer = await self._allocator.allocate(container.devices_ids)
            except Refused as error:
                log.warning("allocation refused: %s", error, extra={"resource": self.resource, "pod": error.uid})
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                raise
            response.container_responses.append(_response_of(answer))
        is_void = any(row.envs.get(VISIBLE) == VOID[VISIBLE] for row in response.container_responses)
        return response, "void" if is_void else "granted"

    async def _pre_start(
        self, request: api.PreStartContainerRequest, context: Any
    ) -> tuple[api.PreStartContainerResponse, str]:
        try:
            gpu_pod = await self._allocator.pre_start(request.devices_ids)
        except Refused as error:
            log.warning("start refused: %s", error, extra={"resource": self.resource, "pod": error.uid})
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        log.info("start granted", extra={"pod": gpu_pod.pod.uid, "resource": self.resource})
        return api.PreStartContainerResponse(), "granted"

    async def _forward(self, method: str, request: Any, context: Any) -> Any:
        """Wait until the successor is known (`forward_calls_to`), and return its answer.

        The kubelet does not repeat Allocate, so an error would fail the pod for good.
        """
        assert self._successor is not None
        self.held_calls += 1
        try:
            socket = await asyncio.shield(self._successor)
            if socket is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the agent of this node is being replaced")
            async with grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL) as channel:
                stub = services.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
                try:
                    return await getattr(stub, method)(request)
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details())
        finally:
            self.held_calls -= 1


def _response_of(answer: Answer) -> api.ContainerAllocateResponse:
    return api.ContainerAllocateResponse(
        envs=answer.env,
        mounts=[
            api.Mount(host_path=mount.source, container_path=mount.target, read_only=mount.read_only)
            for mount in answer.mounts
        ],
        devices=[api.DeviceSpec(host_path=n, container_path=n, permissions=PERMISSIONS) for n in answer.nodes],
        annotations=answer.annotations,
        cdi_devices=[api.CDIDevice(name=name) for name in answer.cdi],
    )


def _response_of_list(ids: Mapping[str, bool]) -> api.ListAndWatchResponse:
    """Return the message. Its devices have no topology, because an id stands for no particular card."""
    rows = [api.Device(ID=i, health="Healthy" if healthy else "Unhealthy") for i, healthy in ids.items()]
    return api.ListAndWatchResponse(devices=rows)
