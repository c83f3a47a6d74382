"""Keeps one plugin registered with the kubelet, also after the kubelet has restarted.

The kubelet removes all sockets in its folder when it starts. A device list is a stream that the plugin sends
(ListAndWatch). When a device list ends, the kubelet disconnects the plugin that is registered for the resource at that
time, even if the list came from another plugin
(docs/design/kubernetes.md, "Device manager"). So whenever the kubelet's socket is new or the plugin's own socket is
gone, `Registration.run` ends the streams, starts a new server and registers it. If only a device list has ended, `run`
first tries once to register the same server again, which is faster.

`advertised_resources` and `partitioning.slice_plugins` create the registrations. `handover.node_ownership` withdraws,
renews and retires them when another agent takes over.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from deviceplugin.event_loop import Wakeup
from deviceplugin.plugin.plugin_server import OPTIONS, Plugin
from deviceplugin.unix_sockets import CHANNEL, FileStamp, file_stamp, is_listening, listen, new_server, stop_server
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
_POLL_SECONDS = 0.1
"""The interval at which the agent looks for a new socket of the kubelet. It is short: a starting kubelet (1.36) fails
the pods that were bound in the meantime unless the plugin registers within 0.4 s after the socket was created."""
_REGISTER_SECONDS = 15.0
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0
_STABLE_SECONDS = 10.0
"""If the attempt to register and the registration together lasted longer than this, the next pause is `_FIRST_PAUSE`.
If a device list ends sooner than this after `run` registered the same server again, `run` starts a new server."""
_GRACE_SECONDS = 1.0
_SETTLE_SECONDS = 0.5
"""The time that the kubelet gets to notice the end of a stream before the plugin registers again."""


def socket_name(resource: str, *, second: bool = False) -> str:
    """Return the file name of a resource's plugin socket, such as `mgpu-core.sock` or `mgpu-gpu-mem.sock`.

    Args:
        second: Whether to return the second of the two names. An agent uses the second name if its predecessor still
            serves on the first one.
    """
    name = resource.rpartition("/")[2]
    prefix = "" if name.startswith("mgpu-") else "mgpu-"
    suffix = ".2" if second else ""
    return f"{prefix}{name}{suffix}.sock"


class Registration:
    """The registration of one plugin. Use it on one event loop; any thread may read its attributes and properties.

    Args:
        folder: The kubelet's device-plugins folder.
        check_seconds: The interval at which the sockets are checked.
        not_served_reason: A function that returns why this agent does not serve the resource now, or None. While it
            returns a reason, the plugin does not register again, but an open device list stays open.
        changed: A signal that is sent when the result of `not_served_reason` may have changed.

    Attributes:
        problem: The reason why the plugin is not registered; None if it is registered.
    """

    def __init__(
        self,
        folder: Path,
        plugin: Plugin,
        check_seconds: float = CHECK_SECONDS,
        not_served_reason: Callable[[], str | None] = lambda: None,
        changed: Wakeup | None = None,
    ) -> None:
        self._plugin = plugin
        self._check_seconds = check_seconds
        self.not_served_reason = not_served_reason
        self._changed = changed or Wakeup()
        self._kubelet = folder / "kubelet.sock"
        self._sockets = tuple(folder / socket_name(plugin.resource, second=second) for second in (False, True))
        self._socket = self._sockets[0]
        self._renewing = False
        self._retired = False
        self._needs_restart = False
        self.problem: str | None = "not registered yet"

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet follows the plugin's device list now."""
        return self.problem is None and (self._plugin.streams > 0 or self._renewing)

    @property
    def resource(self) -> str:
        return self._plugin.resource

    @property
    def socket(self) -> str:
        """The file name of the plugin's socket."""
        return self._socket.name

    def retire(self) -> None:
        """Leave the resource to another agent: never register again, even if a stream or the kubelet ends."""
        self._retired = True

    async def withdraw(self) -> None:
        """Make the kubelet forget which plugin it would disconnect when a device list ends.

        This is step 4 of `handover.takeover`.

        When a plugin registers, the kubelet asks the plugin for its options. If the plugin refuses, the kubelet drops
        only its entry for the registered client. It still calls this plugin, and the devices stay healthy.
        """
        self._plugin.withdrawing = True
        try:
            error = await self._ask_to_register()
        finally:
            self._plugin.withdrawing = False
        if error is None:
            log.warning("the kubelet did not withdraw the registration", extra={"resource": self.resource})

    async def renew(self) -> None:
        """End the device list after `withdraw`, and register again. The kubelet then notices when the plugin ends.

        The kubelet may refuse, or end before it opens the new stream. In that case `run` starts a new server.
        """
        loop = asyncio.get_running_loop()
        self._renewing = True
        try:
            self._plugin.renew_streams()
            while self._plugin.streams:
                await self._plugin.stream_ended.wait(_POLL_SECONDS)
            await asyncio.sleep(_SETTLE_SECONDS)
            self._plugin.opened = 0
            kubelet = file_stamp(self._kubelet)
            deadline = loop.time() + _REGISTER_SECONDS
            if await self._register():
                while not self._plugin.opened and file_stamp(self._kubelet) == kubelet and loop.time() < deadline:
                    await asyncio.sleep(_POLL_SECONDS / 10)
            self._needs_restart = not self._plugin.opened
        finally:
            self._renewing = False

    async def run(self) -> None:
        """Keep the plugin registered until cancelled. After each failure, the pause before the next attempt is longer.

        After `retire`, a server that is registered goes on serving until this coroutine is cancelled. If none is
        registered, the method returns.
        """
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        while not self._retired:
            kubelet = await self._kubelet_socket()
            if reason := self.not_served_reason():
                self._set_problem(reason)
                await self._changed.wait(self._check_seconds)
                continue
            began = loop.time()
            try:
                async with self._server():
                    if await self._register():
                        self._set_problem(await self._until_lost(kubelet))
            except OSError as error:
                self._set_problem(f"cannot create or remove the socket {self._socket}: {error}")
            if loop.time() - began > _STABLE_SECONDS:
                pause = _FIRST_PAUSE
            another = await self._another_kubelet(kubelet, pause)
            pause = _FIRST_PAUSE if another else min(pause * 2, _LONGEST_PAUSE)

    async def _kubelet_socket(self) -> FileStamp:
        while (stamp := file_stamp(self._kubelet)) is None:
            self._set_problem(f"waiting for the kubelet's socket {self._kubelet}")
            await asyncio.sleep(_POLL_SECONDS)
        return stamp

    async def _another_kubelet(self, kubelet: FileStamp, seconds: float) -> bool:
        """Wait up to `seconds`. Return True as soon as the kubelet's socket is replaced or removed, and else False.

        The identity of the file is compared, because a kubelet that is killed leaves its socket behind.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while file_stamp(self._kubelet) == kubelet:
            if (remaining := deadline - loop.time()) <= 0:
                return False
            await asyncio.sleep(min(remaining, _POLL_SECONDS))
        return True

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[None]:
        self._socket = next((path for path in self._sockets if not is_listening(path)), self._sockets[0])
        self._socket.unlink(missing_ok=True)
        server = new_server()
        services.add_DevicePluginServicer_to_server(self._plugin, server)  # type: ignore[no-untyped-call]
        listen(server, self._socket)
        self._plugin.open()
        await server.start()
        own = file_stamp(self._socket)
        try:
            yield
        finally:
            self._plugin.end_streams()
            await stop_server(server, _GRACE_SECONDS)
            if own is not None and file_stamp(self._socket) == own:
                self._socket.unlink(missing_ok=True)

    async def _ask_to_register(self) -> grpc.aio.AioRpcError | None:
        """Ask the kubelet to register the plugin. Return the error of the call, or None if the kubelet agrees."""
        request = api.RegisterRequest(
            version="v1beta1", endpoint=self._socket.name, resource_name=self._plugin.resource, options=OPTIONS
        )
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}", options=CHANNEL) as channel:
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=_REGISTER_SECONDS)
            except grpc.aio.AioRpcError as error:
                return error
        return None

    async def _register(self) -> bool:
        error = await self._ask_to_register()
        if error is not None:
            self._set_problem(f"not registered with the kubelet: {error.code().name}: {error.details()}")
            return False
        self.problem = None
        log.info("registered with the kubelet", extra={"resource": self._plugin.resource})
        return True

    async def _until_lost(self, kubelet: FileStamp) -> str:
        """Wait until the plugin must register again, and return the reason.

        The kubelet opens the stream only after it has answered the registration, so a missing stream is a reason only
        after `_REGISTER_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        own = file_stamp(self._socket)
        deadline = loop.time() + _REGISTER_SECONDS
        repaired = -_STABLE_SECONDS
        self._needs_restart = False
        while True:
            if self._renewing or self._retired:
                await self._plugin.stream_ended.wait(_POLL_SECONDS)
                continue
            if self._needs_restart:
                return "the registration was not renewed"
            if file_stamp(self._kubelet) != kubelet:
                return "the kubelet has a new socket"
            if own is None or file_stamp(self._socket) != own:
                return f"the plugin's socket {self._socket} was removed"
            if self._plugin.opened and not self._plugin.streams:
                # Without a device list the kubelet fails every pod that requests the resource, so register at once, on
                # the same socket. If the next stream ends soon after that, `run` pauses before it registers again.
                has_just_registered = loop.time() - repaired < _STABLE_SECONDS
                self._plugin.opened = 0
                if (
                    has_just_registered
                    or self._plugin.has_ended
                    or self.not_served_reason()
                    or not await self._register()
                ):
                    return "the kubelet ended the stream"
                repaired = loop.time()
                deadline = repaired + _REGISTER_SECONDS
                continue
            if not self._plugin.opened and loop.time() > deadline:
                return "the kubelet registered the plugin, but has not asked for its device ids"
            await self._plugin.stream_ended.wait(self._check_seconds)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("%s", problem, extra={"resource": self._plugin.resource})
