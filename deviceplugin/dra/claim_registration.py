"""Registers the agent with the kubelet as a plugin of the DRA driver, and serves on the sockets that this needs.

The kubelet finds a plugin by a socket in its folder `plugins_registry`, on which it asks for the socket of the services
(pkg/kubelet/pluginmanager). It follows several plugins of one driver, and calls the one that registered last and is
connected (pkg/kubelet/cm/dra/plugin). So two agents can serve at the same time while one takes over from the other, if
each of them has sockets of its own. A socket that a killed agent has left is removed when the next agent starts.

The kubelet registers all plugins again when it starts. If it does not, or if it refuses, the agent starts servers on
new sockets.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from deviceplugin.dra.claim_service import VERSIONS, ClaimService
from deviceplugin.dra.prepared_claims import plugin_folder
from deviceplugin.event_loop import Wakeup
from deviceplugin.unix_sockets import FileStamp, file_stamp, is_listening, listen, new_server, stop_server
from mgpu.model.resource_claims import DRIVER
from proto import pluginregistration_pb2 as api
from proto import pluginregistration_pb2_grpc as services

log = logging.getLogger(__name__)

_CHECK_SECONDS = 0.5
_REGISTER_SECONDS = 15.0
"""How long the kubelet may take to register a plugin. It looks at new sockets at once, and repeats failures."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_INSTANCE = "00000000"


def service_socket(kubelet_dir: Path, instance: str = _INSTANCE) -> Path:
    return plugin_folder(kubelet_dir) / f"{instance}.sock"


def registration_socket(kubelet_dir: Path, instance: str = _INSTANCE) -> Path:
    return kubelet_dir / "plugins_registry" / f"{DRIVER}-{instance}-reg.sock"


def remove_leftovers(kubelet_dir: Path) -> None:
    """Remove the sockets on which no process listens. A failure is logged."""
    registrations = (kubelet_dir / "plugins_registry").glob(f"{DRIVER}-*-reg.sock")
    for path in (*registrations, *plugin_folder(kubelet_dir).glob("*.sock")):
        if not is_listening(path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("socket %s cannot be removed: %s", path, error)


class ClaimRegistration:
    """The servers of the plugin, and its registration. Use it on one event loop; any thread may read `problem`.

    Attributes:
        problem: The reason why the kubelet has not registered the plugin; None if it has.
    """

    def __init__(self, kubelet_dir: Path, service: ClaimService, kubelet_socket: Path) -> None:
        self._kubelet_dir = kubelet_dir
        self._service = service
        self._kubelet = kubelet_socket
        self._answered = Wakeup()
        self._instance = ""
        self._refusal: str | None = None
        self._registered = False
        self._registered_with: FileStamp | None = None
        self.problem: str | None = "not registered with the kubelet as a DRA plugin yet"

    def other_socket(self) -> Path | None:
        """Return the socket on which another agent serves the driver; the newest if there are several, or None."""
        own = service_socket(self._kubelet_dir, self._instance)
        others = [path for path in plugin_folder(self._kubelet_dir).glob("*.sock") if path != own]
        found = [(stamp[2], path) for path in others if (stamp := file_stamp(path)) is not None and is_listening(path)]
        return max(found)[1] if found else None

    async def run(self) -> None:
        """Serve and stay registered until cancelled. After each failure, the pause before the next one is longer."""
        self._answered.bind()
        pause = _FIRST_PAUSE
        while True:
            try:
                remove_leftovers(self._kubelet_dir)
                async with self._servers():
                    self._set_problem(await self._until_lost())
                    if self._registered:
                        pause = _FIRST_PAUSE
            except OSError as error:
                self._set_problem(f"the sockets of the DRA plugin cannot be created: {error}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def GetInfo(self, request: api.InfoRequest, context: Any) -> api.PluginInfo:  # noqa: N802, ARG002
        endpoint = str(service_socket(self._kubelet_dir, self._instance))
        return api.PluginInfo(type="DRAPlugin", name=DRIVER, endpoint=endpoint, supported_versions=VERSIONS)

    async def NotifyRegistrationStatus(  # noqa: N802
        self,
        request: api.RegistrationStatus,
        context: Any,  # noqa: ARG002
    ) -> api.RegistrationStatusResponse:
        self._registered = request.plugin_registered
        self._refusal = None if request.plugin_registered else request.error or "no reason given"
        self._registered_with = file_stamp(self._kubelet)
        self._answered.wake()
        if self._registered:
            self.problem = None
            log.info("registered with the kubelet as a DRA plugin", extra={"instance": self._instance})
        return api.RegistrationStatusResponse()

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[None]:
        """Serve on sockets with new names. The kubelet does not accept a name again that it knows."""
        self._instance = secrets.token_hex(4)
        self._registered = False
        self._refusal = None
        main = new_server()
        registration = new_server()
        self._service.open(main)
        services.add_RegistrationServicer_to_server(self, registration)  # type: ignore[no-untyped-call]
        sockets = (
            service_socket(self._kubelet_dir, self._instance),
            registration_socket(self._kubelet_dir, self._instance),
        )
        try:
            # The kubelet finds the second socket, and then connects to the first one.
            for server, path in zip((main, registration), sockets, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                listen(server, path)
                await server.start()
            yield
        finally:
            # The kubelet forgets the plugin when the socket of its registration is gone.
            sockets[1].unlink(missing_ok=True)
            self._service.end_streams()
            await stop_server(registration)
            await stop_server(main)
            sockets[0].unlink(missing_ok=True)

    async def _until_lost(self) -> str:
        """Wait until the servers must start again, and return the reason."""
        loop = asyncio.get_running_loop()
        kubelet: FileStamp | None = file_stamp(self._kubelet)
        deadline = loop.time() + _REGISTER_SECONDS
        own = registration_socket(self._kubelet_dir, self._instance)
        while True:
            if not own.exists():
                return f"the socket {own} was removed"
            if self._refusal is not None:
                return f"the kubelet does not register the DRA plugin: {self._refusal}"
            now = file_stamp(self._kubelet)
            if now != kubelet and now == self._registered_with:
                kubelet = now  # The kubelet has restarted, and has registered the plugin already.
            elif now != kubelet:
                # A kubelet that has restarted registers the plugin again.
                kubelet = now
                self._registered = False
                self.problem = "the kubelet has restarted and has not registered the DRA plugin yet"
                deadline = loop.time() + _REGISTER_SECONDS
            if not self._registered and kubelet is not None and loop.time() > deadline:
                return f"the kubelet has not registered the DRA plugin for {_REGISTER_SECONDS:.0f} s"
            await self._answered.wait(_CHECK_SECONDS)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("%s", problem)
