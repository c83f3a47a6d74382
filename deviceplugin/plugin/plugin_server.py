"""The DevicePlugin service (v1beta1) of one resource, on grpc.aio."""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from deviceplugin import metrics
from deviceplugin.allocation.allocator import Allocations, Answer
from deviceplugin.delivery.cdi import PERMISSIONS
from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.identity import VISIBLE, VOID, Refused
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
"""Of a channel to a socket: another process may listen there since the last one."""
OPTIONS = api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)


class Plugin:
    """`devices`: what is offered. `streams`: how many ListAndWatch streams are open now.

    `opened`: how many were since `open`. `silent`: nothing more is sent; ending the stream would disconnect the plugin
    that serves the resource now (`deviceplugin.plugin.registration`). One loop only.
    `held_calls`: how many calls wait for the agent that takes over, or for its answer.
    `withdrawing`: no options are told, so that the kubelet takes its registration back
    (`deviceplugin.handover.takeover`).
    """

    def __init__(self, resource: str, allocations: Allocations) -> None:
        self.resource, self._allocations = resource, allocations
        self.devices: dict[str, bool] = {}
        self.silent = False
        self.withdrawing = False
        self._ended = False
        self._generation = 0
        self._busy = 0
        self.held_calls = 0
        self._idle = Wakeup()
        self._successor: asyncio.Future[Path | None] | None = None
        self._turn = 0
        self._changed = Wakeup()
        self.streams = self.opened = 0
        self.stream_ended = Wakeup()

    def open(self) -> None:
        """From here on streams are served; called on the loop."""
        self._ended, self.opened = False, 0
        self._changed.bind()
        self.stream_ended.bind()
        self._idle.bind()

    def end_streams(self) -> None:
        """Streams end by themselves, the kubelet sees them out before anything else is served."""
        self._ended = True
        self._changed.wake()

    @property
    def ended(self) -> bool:
        """Whether every stream ends at once, until `open`."""
        return self._ended

    def renew_streams(self) -> None:
        """End the streams that are open now, and serve those that come."""
        self._generation += 1
        self._changed.wake()

    async def hold(self) -> None:
        """Hold new calls back from now on, and return once those before are answered.

        What `PreStartContainer` waits for has a limit of its own (`allocation.WAIT_SECONDS`).
        """
        self._successor = asyncio.get_running_loop().create_future()
        while self._busy:
            await self._idle.wait(1.0)

    def hand_on(self, socket: Path | None) -> None:
        """Let another agent answer the calls that were held back, and all that come; None: nobody can."""
        if self._successor is not None and not self._successor.done():
            self._successor.set_result(socket)

    def offer(self, devices: Mapping[str, bool]) -> None:
        """The device ids from now on, and whether each is healthy; sent to the kubelet where they changed."""
        self.devices = dict(devices)
        self._changed.wake()

    def resend(self) -> None:
        """Send the list once more: with every list the kubelet writes its checkpoint."""
        self._turn += 1
        self._changed.wake()

    async def GetDevicePluginOptions(self, request: api.Empty, context: Any) -> api.DevicePluginOptions:  # noqa: N802, ARG002
        if self.withdrawing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the registration is withdrawn for a moment")
        return OPTIONS

    async def ListAndWatch(self, request: api.Empty, context: Any) -> Any:  # noqa: N802, ARG002
        self.streams += 1
        self.opened += 1
        try:
            sent: tuple[int, dict[str, bool]] | None = None
            generation = self._generation
            while not self._ended and generation == self._generation:
                if not self.silent and (self._turn, self.devices) != sent:
                    sent = self._turn, self.devices
                    yield _list(self.devices)
                else:
                    await self._changed.wait()
        finally:
            self.streams -= 1
            self.stream_ended.wake()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not offered: ids stand for no card")

    async def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:  # noqa: N802
        if self._successor is not None:
            forwarded: api.AllocateResponse = await self._forwarded("Allocate", request, context)
            return forwarded
        began, result = time.perf_counter(), "refused"
        self._busy += 1
        try:
            response = await self._allocate(request, context)
            void = any(row.envs.get(VISIBLE) == VOID[VISIBLE] for row in response.container_responses)
            result = "void" if void else "granted"
        finally:
            self._done()
            metrics.ALLOCATE.labels(result).observe(time.perf_counter() - began)
        return response

    def _done(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._idle.wake()

    async def _forwarded(self, method: str, request: Any, context: Any) -> Any:
        """The answer of the agent that takes over."""
        assert self._successor is not None
        self.held_calls += 1
        try:
            socket = await asyncio.shield(self._successor)
            if socket is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the agent of this node is being replaced")
            return await self._asked_elsewhere(f"unix:{socket}", method, request, context)
        finally:
            self.held_calls -= 1

    async def _asked_elsewhere(self, target: str, method: str, request: Any, context: Any) -> Any:
        async with grpc.aio.insecure_channel(target, options=CHANNEL) as channel:
            stub = services.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
            try:
                return await getattr(stub, method)(request)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())

    async def _allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:
        response = api.AllocateResponse()
        for asked in request.container_requests:
            try:
                answer = await self._allocations.allocate(asked.devices_ids)
            except Refused as error:
                log.warning("allocation refused: %s", error, extra={"resource": self.resource, "pod": error.uid})
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                raise
            response.container_responses.append(_response(answer))
        return response

    async def PreStartContainer(  # noqa: N802
        self, request: api.PreStartContainerRequest, context: Any
    ) -> api.PreStartContainerResponse:
        if self._successor is not None:
            forwarded: api.PreStartContainerResponse = await self._forwarded("PreStartContainer", request, context)
            return forwarded
        began, result = time.perf_counter(), "refused"
        self._busy += 1
        try:
            response = await self._pre_start(request, context)
            result = "granted"
        finally:
            self._done()
            metrics.PRESTART.labels(result).observe(time.perf_counter() - began)
        return response

    async def _pre_start(self, request: api.PreStartContainerRequest, context: Any) -> api.PreStartContainerResponse:
        try:
            known = await self._allocations.pre_start(request.devices_ids)
        except Refused as error:
            log.warning("start refused: %s", error, extra={"resource": self.resource, "pod": error.uid})
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        log.info("start granted", extra={"pod": known.pod.uid, "resource": self.resource})
        return api.PreStartContainerResponse()


def _response(answer: Answer) -> api.ContainerAllocateResponse:
    return api.ContainerAllocateResponse(
        envs=answer.env,
        mounts=[api.Mount(host_path=at, container_path=to) for at, to in answer.mounts],
        devices=[api.DeviceSpec(host_path=n, container_path=n, permissions=PERMISSIONS) for n in answer.nodes],
        annotations=answer.annotations,
        cdi_devices=[api.CDIDevice(name=name) for name in answer.cdi],
    )


def _list(devices: Mapping[str, bool]) -> api.ListAndWatchResponse:
    """No topology: an id stands for no card."""
    rows = [api.Device(ID=i, health="Healthy" if healthy else "Unhealthy") for i, healthy in devices.items()]
    return api.ListAndWatchResponse(devices=rows)
