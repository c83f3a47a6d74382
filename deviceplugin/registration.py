"""Keeps one plugin registered with the kubelet, whatever happens to either of them.

The kubelet removes every socket of its folder when it starts, and when an old stream ends it disconnects whichever
plugin of that resource is registered then. So nothing is patched up: whenever the kubelet's socket is another one, our
own is gone or a stream has ended, the streams are ended, a new server takes the old one's place, and it registers.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from deviceplugin.plugin import OPTIONS, Plugin
from deviceplugin.wakeup import Wakeup
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


def socket_name(resource: str) -> str:
    """The file name of a resource's plugin socket: `mgpu-core.sock`, `mgpu-gpu-mem.sock`."""
    name = resource.rpartition("/")[2]
    return f"{name if name.startswith('mgpu-') else f'mgpu-{name}'}.sock"


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
        self._socket = folder / socket_name(plugin.resource)
        self.state = "not registered yet"

    @property
    def registered(self) -> bool:
        """Whether the kubelet follows our device list now."""
        return self.state == "" and self._plugin.streams > 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        while True:
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

    async def _register(self) -> bool:
        request = api.RegisterRequest(
            version="v1beta1", endpoint=self._socket.name, resource_name=self._plugin.resource, options=OPTIONS
        )
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}", options=options) as channel:
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=_REGISTER_SECONDS)
            except grpc.aio.AioRpcError as error:
                self._say(f"not registered with the kubelet: {error.code().name}: {error.details()}")
                return False
        self.state = ""
        log.info("registered with the kubelet", extra={"resource": self._plugin.resource})
        return True

    async def _until_lost(self, kubelet: Stamp) -> str:
        """Why it has to register again. The stream opens only after the registration is answered."""
        loop = asyncio.get_running_loop()
        own, deadline = _stamp(self._socket), loop.time() + _REGISTER_SECONDS
        while True:
            if _stamp(self._kubelet) != kubelet:
                return "the kubelet's socket is another one"
            if own is None or _stamp(self._socket) != own:
                return f"our socket {self._socket} was removed"
            if self._plugin.opened and not self._plugin.streams:
                return "the kubelet ended the stream"
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


def _stamp(path: Path) -> Stamp | None:
    """What tells a file from another one that took its place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
