"""A DRA driver over gRPC for tests of the kubelet: it records its calls, and can refuse or delay them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from proto import dra_health_pb2 as health_api
from proto import dra_health_pb2_grpc as health_services
from proto import dra_pb2 as api
from proto import dra_pb2_grpc as services
from proto import pluginregistration_pb2 as registration
from proto import pluginregistration_pb2_grpc as registration_services

DRIVER = "gpu.mgpu.io"


class Driver(
    services.DRAPluginServicer, health_services.DRAResourceHealthServicer, registration_services.RegistrationServicer
):
    """Serves on `<root>/plugins/<instance>.sock`, and registers by `<root>/plugins_registry/<instance>-reg.sock`.

    devices: what Prepare answers for the claims by their names. prepared, unprepared: the claims' names, in the order
    of the calls. statuses: what the kubelet has said of the registration.
    """

    def __init__(self, root: Path, instance: str = "d", versions: tuple[str, ...] = ("v1.DRAPlugin",)) -> None:
        self.root = root
        self.instance = instance
        self.versions = versions
        self.devices: dict[str, list[api.Device]] = {}
        self.prepared: list[str] = []
        self.unprepared: list[str] = []
        self.statuses: list[registration.RegistrationStatus] = []
        self.refuse_prepare = ""
        self.refuse_unprepare = ""
        self.hold_prepare = threading.Event()
        self.hold_prepare.set()
        self._health: dict[str, int] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._socket = root / "plugins" / f"{instance}.sock"
        self._registration_socket = root / "plugins_registry" / f"{instance}-reg.sock"
        self._socket.parent.mkdir(exist_ok=True)
        self._server = self._serve(self._socket)
        self._registration = self._serve(self._registration_socket)

    def _serve(self, socket: Path) -> Any:
        server = grpc.server(ThreadPoolExecutor(8))
        services.add_DRAPluginServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        health_services.add_DRAResourceHealthServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        registration_services.add_RegistrationServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        return server

    @property
    def registered(self) -> bool:
        return bool(self.statuses) and self.statuses[-1].plugin_registered

    def set_health(self, device: str, health: int) -> None:
        with self._changed:
            self._health = {**self._health, device: health}
            self._changed.notify_all()

    def crash(self) -> None:
        """End all connections, but leave the socket of the registration there."""
        self._stop(self._server)

    def stop(self) -> None:
        """End all connections, and remove the sockets."""
        self._stop(self._server)
        self._stop(self._registration)
        self._registration_socket.unlink(missing_ok=True)

    def _stop(self, server: Any) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.hold_prepare.set()
        server.stop(None).wait()

    def GetInfo(self, request: Any, context: Any) -> registration.PluginInfo:  # noqa: N802, ARG002
        return registration.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._socket), supported_versions=self.versions
        )

    def NotifyRegistrationStatus(self, request: Any, context: Any) -> registration.RegistrationStatusResponse:  # noqa: N802, ARG002
        self.statuses.append(request)
        return registration.RegistrationStatusResponse()

    def NodePrepareResources(self, request: Any, context: Any) -> api.NodePrepareResourcesResponse:  # noqa: N802, ARG002
        self.prepared += [claim.name for claim in request.claims]
        self.hold_prepare.wait(20)
        return api.NodePrepareResourcesResponse(
            claims={
                claim.uid: api.NodePrepareResourceResponse(error=self.refuse_prepare)
                if self.refuse_prepare
                else api.NodePrepareResourceResponse(devices=self.devices.get(claim.name, ()))
                for claim in request.claims
            }
        )

    def NodeUnprepareResources(self, request: Any, context: Any) -> api.NodeUnprepareResourcesResponse:  # noqa: N802, ARG002
        self.unprepared += [claim.name for claim in request.claims]
        answer = api.NodeUnprepareResourceResponse(error=self.refuse_unprepare)
        return api.NodeUnprepareResourcesResponse(claims={claim.uid: answer for claim in request.claims})

    def NodeWatchResources(self, request: Any, context: Any) -> Iterator[health_api.NodeWatchResourcesResponse]:  # noqa: N802, ARG002
        sent: dict[str, int] | None = None
        while context.is_active() and not self._stopped:
            with self._changed:
                if sent == self._health:
                    self._changed.wait(timeout=0.2)
                    continue
                sent = self._health
            rows = [
                health_api.DeviceHealth(
                    device=health_api.DeviceIdentifier(pool_name="n1", device_name=name),
                    health=health,  # type: ignore[arg-type]
                    last_updated_time=int(time.time()),
                )
                for name, health in sent.items()
            ]
            yield health_api.NodeWatchResourcesResponse(devices=rows)
