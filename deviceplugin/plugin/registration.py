"""Keeps one plugin registered with the kubelet, whatever happens to either of them.

The kubelet removes every socket of its folder when it starts, and when an old stream ends it disconnects whichever
plugin of that resource is registered then. So nothing is patched up: whenever the kubelet's socket is another one, our
own is gone or a stream has ended, the streams are ended, a new server takes the old one's place, and it registers.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from deviceplugin.event_loop import Wakeup
from deviceplugin.plugin.plugin_server import CHANNEL, OPTIONS, Plugin
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
_LOOK_SECONDS = 0.1
"""A kubelet (1.36) that starts again fails the pods that were bound meanwhile 0.4 s after it has made its socket, if
nobody has registered by then."""
_REGISTER_SECONDS = 15.0
_FIRST_PAUSE, _LONGEST_PAUSE, _STABLE_SECONDS = 0.2, 10.0, 10.0
_GRACE_SECONDS = 1.0

Stamp = tuple[int, int, int]


_SETTLE_SECONDS = 0.5
"""After the end of a stream, for the kubelet to see it before the plugin registers anew."""


def socket_name(resource: str, *, second: bool = False) -> str:
    """The file name of a resource's plugin socket: `mgpu-core.sock`, `mgpu-gpu-mem.sock`.

    second: the name for an agent that takes over from one which still serves on the first.
    """
    name = resource.rpartition("/")[2]
    return f"{name if name.startswith('mgpu-') else f'mgpu-{name}'}{'.2' if second else ''}.sock"


class Registration:
    """`run` until cancelled. `folder`: the kubelet's device-plugins folder.

    left: why the resource is another plugin's to serve now, "" where it is not: then nothing is begun anew.
    changed: wakes when `left` may say something else.
    """

    def __init__(
        self,
        folder: Path,
        plugin: Plugin,
        check_seconds: float = CHECK_SECONDS,
        left: Callable[[], str] = lambda: "",
        changed: Wakeup | None = None,
    ) -> None:
        self._plugin, self._check, self.left = plugin, check_seconds, left
        self._changed = changed or Wakeup()
        self._kubelet = folder / "kubelet.sock"
        self._sockets = tuple(folder / socket_name(plugin.resource, second=second) for second in (False, True))
        self._socket = self._sockets[0]
        self._renewing = self._retired = self._must_begin_anew = False
        self.state = "not registered yet"

    @property
    def registered(self) -> bool:
        """Whether the kubelet follows our device list now."""
        return self.state == "" and (self._plugin.streams > 0 or self._renewing)

    @property
    def resource(self) -> str:
        return self._plugin.resource

    @property
    def socket(self) -> str:
        """The name of the socket that the resource is served on."""
        return self._socket.name

    def retire(self) -> None:
        """From now on another agent registers this resource: whatever ends, begin nothing anew."""
        self._retired = True

    async def withdraw(self) -> None:
        """Make the kubelet forget whom it would disconnect when a device list ends (`deviceplugin.handover.takeover`).

        It dials the plugin, which refuses to tell its options: so it drops its note of the registered client, and only
        that. Calls still come here, and devices stay healthy.
        """
        self._plugin.withdrawing = True
        try:
            error = await self._ask_to_register()
        finally:
            self._plugin.withdrawing = False
        if error is None:
            log.warning("the kubelet did not withdraw the registration", extra={"resource": self.resource})

    async def renew(self) -> None:
        """End the own device list while that has no effect, and register anew, so that the kubelet notices the end of
        this agent.

        A kubelet may refuse, or end after it has agreed and before it asks for the list. Then `run` begins anew.
        """
        loop = asyncio.get_running_loop()
        self._renewing = True
        try:
            self._plugin.renew_streams()
            while self._plugin.streams:
                await self._plugin.stream_ended.wait(_LOOK_SECONDS)
            await asyncio.sleep(_SETTLE_SECONDS)
            self._plugin.opened = 0
            kubelet, deadline = _stamp(self._kubelet), loop.time() + _REGISTER_SECONDS
            if await self._register():
                while not self._plugin.opened and _stamp(self._kubelet) == kubelet and loop.time() < deadline:
                    await asyncio.sleep(_LOOK_SECONDS / 10)
            self._must_begin_anew = not self._plugin.opened
        finally:
            self._renewing = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        while not self._retired:
            kubelet = await self._kubelet_there()
            if why := self.left():
                self._say(why)
                await self._changed.wait(self._check)
                continue
            began = loop.time()
            try:
                async with self._server():
                    if await self._register():
                        why = await self._until_lost(kubelet)
                        self._say(why)
            except OSError as error:
                self._say(f"no socket can be made or removed at {self._socket}: {error}")
            if loop.time() - began > _STABLE_SECONDS:
                pause = _FIRST_PAUSE
            another = await self._another_kubelet(kubelet, pause)
            pause = _FIRST_PAUSE if another else min(pause * 2, _LONGEST_PAUSE)

    async def _kubelet_there(self) -> Stamp:
        while (stamp := _stamp(self._kubelet)) is None:
            self._say(f"waiting for the kubelet's socket {self._kubelet}")
            await asyncio.sleep(_LOOK_SECONDS)
        return stamp

    async def _another_kubelet(self, kubelet: Stamp, seconds: float) -> bool:
        """Whether the kubelet's socket is another one; asked for so long. One that was killed leaves its own behind."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while _stamp(self._kubelet) == kubelet:
            if (left := deadline - loop.time()) <= 0:
                return False
            await asyncio.sleep(min(left, _LOOK_SECONDS))
        return True

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[None]:
        self._socket = next((path for path in self._sockets if not _is_served(path)), self._sockets[0])
        self._socket.unlink(missing_ok=True)
        # Two servers on one path would share its calls without SO_REUSEPORT being off.
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        services.add_DevicePluginServicer_to_server(self._plugin, server)  # type: ignore[no-untyped-call]
        try:
            server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError as error:  # all that grpc says
            raise OSError(str(error)) from error
        self._plugin.open()
        await server.start()
        own = _stamp(self._socket)
        try:
            yield
        finally:
            self._plugin.end_streams()
            await _stop(server)
            if own is not None and _stamp(self._socket) == own:
                self._socket.unlink(missing_ok=True)

    async def _ask_to_register(self) -> grpc.aio.AioRpcError | None:
        """Ask the kubelet to register the plugin; return its refusal, None where it agrees."""
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
            self._say(f"not registered with the kubelet: {error.code().name}: {error.details()}")
            return False
        self.state = ""
        log.info("registered with the kubelet", extra={"resource": self._plugin.resource})
        return True

    async def _until_lost(self, kubelet: Stamp) -> str:
        """Why it has to register again. The stream opens only after the registration is answered."""
        loop = asyncio.get_running_loop()
        own, deadline = _stamp(self._socket), loop.time() + _REGISTER_SECONDS
        repaired = -_STABLE_SECONDS
        self._must_begin_anew = False
        while True:
            if self._renewing or self._retired:
                await self._plugin.stream_ended.wait(_LOOK_SECONDS)
                continue
            if self._must_begin_anew:
                return "the registration was not renewed"
            if _stamp(self._kubelet) != kubelet:
                return "the kubelet's socket is another one"
            if own is None or _stamp(self._socket) != own:
                return f"our socket {self._socket} was removed"
            if self._plugin.opened and not self._plugin.streams:
                # Until it has the list again it fails every pod: so at once, on the same socket. A kubelet that ends
                # stream after stream is given rest by the caller.
                lately = loop.time() - repaired < _STABLE_SECONDS
                self._plugin.opened = 0
                if lately or self._plugin.ended or self.left() or not await self._register():
                    return "the kubelet ended the stream"
                repaired = loop.time()
                deadline = repaired + _REGISTER_SECONDS
                continue
            if not self._plugin.opened and loop.time() > deadline:
                return "the kubelet did not ask for the devices"
            await self._plugin.stream_ended.wait(self._check)

    def _say(self, state: str) -> None:
        if state != self.state:
            self.state = state
            log.warning("%s", state, extra={"resource": self._plugin.resource})


async def _stop(server: grpc.aio.Server) -> None:
    """Ends what it began, even where it is cancelled meanwhile, and is cancelled then.

    `Server.stop` awaits Python 3.11's `wait_for`, which loses a cancellation that comes in the moment of its end: who
    awaited it directly would begin anew, for ever.
    """
    stopping = asyncio.create_task(server.stop(_GRACE_SECONDS))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await stopping
        raise


def _is_served(path: Path) -> bool:
    """Return whether a process listens on the socket; one that has ended leaves its file behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _stamp(path: Path) -> Stamp | None:
    """What tells a file from another one that took its place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
