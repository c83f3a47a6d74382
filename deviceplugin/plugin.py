"""The DevicePlugin service (v1beta1) of one resource, on grpc.aio."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import grpc

from deviceplugin import metrics
from deviceplugin.allocation import Allocations, Answer
from deviceplugin.cdi import PERMISSIONS
from deviceplugin.identity import VISIBLE, VOID, Refused
from deviceplugin.wakeup import Wakeup
from proto import deviceplugin_pb2 as api

log = logging.getLogger(__name__)

OPTIONS = api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)


class Plugin:
    """`devices`: what is offered. `streams`: how many ListAndWatch streams are open now.

    `opened`: how many were since `open`. `silent`: nothing more is sent; ending the stream would disconnect the plugin
    that serves the resource now (`deviceplugin.registration`). One loop only.
    """

    def __init__(self, resource: str, allocations: Allocations) -> None:
        self.resource, self._allocations = resource, allocations
        self.devices: dict[str, bool] = {}
        self.silent = False
        self._ended = False
        self._turn = 0
        self._changed = Wakeup()
        self.streams = self.opened = 0
        self.stream_ended = Wakeup()

    def open(self) -> None:
        """From here on streams are served; called on the loop."""
        self._ended, self.opened = False, 0
        self._changed.bind()
        self.stream_ended.bind()

    def end_streams(self) -> None:
        """Streams end by themselves, the kubelet sees them out before anything else is served."""
        self._ended = True
        self._changed.wake()

    def offer(self, devices: Mapping[str, bool]) -> None:
        """The device ids from now on, and whether each is healthy; sent to the kubelet where they changed."""
        self.devices = dict(devices)
        self._changed.wake()

    def resend(self) -> None:
        """Send the list once more: with every list the kubelet writes its checkpoint."""
        self._turn += 1
        self._changed.wake()

    async def GetDevicePluginOptions(self, request: api.Empty, context: Any) -> api.DevicePluginOptions:  # noqa: N802, ARG002
        return OPTIONS

    async def ListAndWatch(self, request: api.Empty, context: Any) -> Any:  # noqa: N802, ARG002
        self.streams += 1
        self.opened += 1
        try:
            sent: tuple[int, dict[str, bool]] | None = None
            while not self._ended:
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
        began, result = time.perf_counter(), "refused"
        try:
            response = await self._allocate(request, context)
            void = any(row.envs.get(VISIBLE) == VOID[VISIBLE] for row in response.container_responses)
            result = "void" if void else "granted"
        finally:
            metrics.ALLOCATE.labels(result).observe(time.perf_counter() - began)
        return response

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
        began, result = time.perf_counter(), "refused"
        try:
            response = await self._pre_start(request, context)
            result = "granted"
        finally:
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
