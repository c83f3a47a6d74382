"""The gRPC services with which the kubelet has claims prepared and watches the health of the cards.

`ClaimService` passes the calls to `claim_preparation`, and holds them back while another agent takes over
(`handover.takeover`). The kubelet repeats a failed call only after up to 77 s, so calls in progress are passed on to
the other agent, too. `claim_registration` starts the servers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc

from deviceplugin.dra.claim_preparation import WAIT_SECONDS
from deviceplugin.dra.claim_records import ClaimRecord
from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.identity import Refused
from deviceplugin.unix_sockets import CHANNEL
from mgpu.model.cards import Card
from mgpu.model.resource_claims import device_name
from proto import dra_health_pb2 as health_api
from proto import dra_health_pb2_grpc as health_services
from proto import dra_pb2 as api
from proto import dra_pb2_grpc as services

log = logging.getLogger(__name__)

VERSIONS = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
"""The services of this module, as the registration names them."""
_HEALTH_TIMEOUT = 60
"""The seconds after which the kubelet no longer knows the health of a card without a new report."""
_HEALTH_SECONDS = 20.0
"""The interval at which the health is reported again."""
_UNPREPARED = api.NodePrepareResourceResponse(error="the claim was unprepared meanwhile")
_POLL_SECONDS = 0.1
_LONGEST_HOLD = 10.0
"""How long a call waits for the agent that takes over. The registration of that agent takes about a second."""


class Preparation(Protocol):
    """The part of `ClaimPreparation` that answers the kubelet."""

    async def prepare(self, namespace: str, name: str, uid: str, deadline: float) -> ClaimRecord: ...
    def unprepare(self, uid: str) -> None: ...


class ClaimService:
    """The services `DRAPlugin` and `DRAResourceHealth`. Use it on one event loop.

    Args:
        cards: A function that returns the GPUs of the node.
        cards_changed: A signal that is sent when the cards have changed.
        instances: A function that returns the cards of MIG instances, by the names of the instances as devices.
        successor: A function that returns the socket of an agent that takes over, once it listens.
    """

    def __init__(
        self,
        node: str,
        preparation: Preparation,
        cards: Callable[[], Sequence[Card]],
        cards_changed: Wakeup,
        successor: Callable[[], Path | None] = lambda: None,
        wait_seconds: float | None = None,
        *,
        instances: Callable[[], Mapping[str, Card]] = dict,
    ) -> None:
        self._node = node
        self._preparation = preparation
        self._cards = cards
        self._cards_changed = cards_changed
        self._instances = instances
        self._successor = successor
        self._wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._handed_over = False
        self._ended = False
        self._calls: dict[asyncio.Task[Any], str] = {}

    def open(self, server: grpc.aio.Server) -> None:
        """Serve on this server, and allow streams of health."""
        self._ended = False
        services.add_DRAPluginServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        health_services.add_DRAResourceHealthServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer calls while the context is active. At its end, calls are held for the agent that takes over.

        A call in progress is cancelled, which is safe at any point (`claim_preparation`).
        """
        self._handed_over = False
        try:
            yield
        finally:
            self._handed_over = True
            calls = [*self._calls]
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls)

    def end_streams(self) -> None:
        """End the streams of health, so that the server can stop."""
        self._ended = True
        self._cards_changed.wake()

    async def NodePrepareResources(  # noqa: N802
        self, request: api.NodePrepareResourcesRequest, context: Any
    ) -> api.NodePrepareResourcesResponse:
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        work = {claim.uid: self._prepare(claim, deadline) for claim in request.claims}
        answers = await self._answers(work)
        if answers is None:
            forwarded: api.NodePrepareResourcesResponse = await self._forward("NodePrepareResources", request, context)
            return forwarded
        return api.NodePrepareResourcesResponse(claims=answers)

    async def NodeUnprepareResources(  # noqa: N802
        self, request: api.NodeUnprepareResourcesRequest, context: Any
    ) -> api.NodeUnprepareResourcesResponse:
        if self._handed_over:
            forwarded: api.NodeUnprepareResourcesResponse = await self._forward(
                "NodeUnprepareResources", request, context
            )
            return forwarded
        answers = {claim.uid: self._unprepare(claim) for claim in request.claims}
        return api.NodeUnprepareResourcesResponse(claims=answers)

    async def NodeWatchResources(  # noqa: N802
        self,
        request: health_api.NodeWatchResourcesRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[health_api.NodeWatchResourcesResponse]:
        while not self._ended:
            yield self._health()
            await self._cards_changed.wait(_HEALTH_SECONDS)

    async def _answers(
        self, work: dict[str, Coroutine[Any, Any, api.NodePrepareResourceResponse]]
    ) -> dict[str, api.NodePrepareResourceResponse] | None:
        """Return the results by the UID of the claim, or None if another agent has to answer."""
        if self._handed_over:
            for one in work.values():
                one.close()
            return None
        tasks = {uid: asyncio.create_task(one) for uid, one in work.items()}
        self._calls |= {task: uid for uid, task in tasks.items()}
        try:
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        finally:
            for task in tasks.values():
                task.cancel()  # The kubelet has given up, and repeats the call.
                self._calls.pop(task, None)
        is_cancelled = any(task.cancelled() for task in tasks.values())
        if is_cancelled and self._has_handed_over():
            return None
        return {uid: _UNPREPARED if task.cancelled() else task.result() for uid, task in tasks.items()}

    def _has_handed_over(self) -> bool:
        return self._handed_over

    async def _prepare(self, claim: api.Claim, deadline: float) -> api.NodePrepareResourceResponse:
        try:
            record = await self._preparation.prepare(claim.namespace, claim.name, claim.uid, deadline)
        except Refused as error:
            log.warning("claim refused: %s", error, extra={"claim": claim.uid})
            return api.NodePrepareResourceResponse(error=str(error))
        except Exception as error:
            # One claim must not keep the others of the call from their answers.
            log.exception("claim %s/%s is not prepared", claim.namespace, claim.name)
            return api.NodePrepareResourceResponse(error=f"unexpected error of the agent: {error!r}")
        return _response_of(record)

    def _unprepare(self, claim: api.Claim) -> api.NodeUnprepareResourceResponse:
        for task, uid in self._calls.items():
            if uid == claim.uid:
                task.cancel()
        try:
            self._preparation.unprepare(claim.uid)
        except OSError as error:
            log.warning("claim is not unprepared: %s", error, extra={"claim": claim.uid})
            return api.NodeUnprepareResourceResponse(error=f"the files of the claim are not removed: {error}")
        log.info("claim unprepared", extra={"claim": claim.uid})
        return api.NodeUnprepareResourceResponse()

    def _health(self) -> health_api.NodeWatchResourcesResponse:
        now = int(time.time())
        devices = {**{device_name(card.index): card for card in self._cards()}, **self._instances()}
        rows = [
            health_api.DeviceHealth(
                device=health_api.DeviceIdentifier(pool_name=self._node, device_name=name),
                health=health_api.HEALTHY if card.healthy else health_api.UNHEALTHY,
                last_updated_time=now,
                health_check_timeout_seconds=_HEALTH_TIMEOUT,
                message="" if card.healthy else f"card {card.index} ({card.uuid}) is unhealthy",
            )
            for name, card in devices.items()
        ]
        return health_api.NodeWatchResourcesResponse(devices=rows)

    async def _forward(self, method: str, request: Any, context: Any) -> Any:
        """Wait for the agent that takes over, and return its answer."""
        socket = await self._wait_for_successor()
        if socket is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the agent of this node is being replaced")
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL) as channel:
            stub = services.DRAPluginStub(channel)  # type: ignore[no-untyped-call]
            call: Callable[[Any], Awaitable[Any]] = getattr(stub, method)
            try:
                return await call(request)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())

    async def _wait_for_successor(self) -> Path | None:
        deadline = asyncio.get_running_loop().time() + _LONGEST_HOLD
        while (socket := self._successor()) is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return socket


def _response_of(record: ClaimRecord) -> api.NodePrepareResourceResponse:
    rows = [
        api.Device(
            request_names=[device.request],
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=device.cdi,
            share_id=device.share_id or None,
        )
        for device in record.devices
    ]
    return api.NodePrepareResourceResponse(devices=rows)
