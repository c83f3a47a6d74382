"""The kubelet's side of the device plugin API over gRPC: the Registration service, and a client per plugin."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from playground.kubelet.checkpoint import FILE
from playground.kubelet.devices import DeviceManager, PluginError
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

MAX_MESSAGE = 4 << 20
"""gRPC's default in Go, which the kubelet does not raise: a longer device list ends the stream."""
PRE_START_SECONDS = 30.0
_DIAL_SECONDS = 10.0
_VERSION = "v1beta1"


class Plugin:
    """One registered plugin of one resource, as the kubelet sees it; an `Endpoint` of the device manager.

    Raises PluginError where the plugin's socket cannot be dialled or does not say its options.
    """

    def __init__(self, resource: str, socket: Path, max_message: int = MAX_MESSAGE) -> None:
        self.resource, self._stopped = resource, False
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=[
                ("grpc.max_receive_message_length", max_message),
                # A plugin that comes back on the same path is a new one: not to wait out the old one's back-off.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._stub = services.DevicePluginStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream: Any = None
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_DIAL_SECONDS)
            options = self._stub.GetDevicePluginOptions(api.Empty(), timeout=_DIAL_SECONDS)
        except grpc.FutureTimeoutError as error:
            self.stop()
            raise PluginError(f"failed to dial device plugin: {socket} does not answer") from error
        except grpc.RpcError as error:
            self.stop()
            raise _plugin_error(error) from error
        self.pre_start_required = bool(options.pre_start_required)

    def follow(self, devices: DeviceManager) -> None:
        """Hand every device list over until the stream ends, whoever ends it."""
        try:
            self._stream = self._stub.ListAndWatch(api.Empty())
            for response in self._stream:
                devices.update(self.resource, {device.ID: device.health == "Healthy" for device in response.devices})
        except grpc.RpcError as error:
            log.info("ListAndWatch of %s ended: %s", self.resource, _plugin_error(error))
        except ValueError:  # what gRPC raises for a call on a channel that was just closed
            log.info("ListAndWatch of %s did not begin: the connection is closed", self.resource)

    def allocate(self, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Without a time limit, as in the kubelet."""
        request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids)])
        response = self._call(self._stub.Allocate, request, None)
        if not response.container_responses:
            raise PluginError(f"no containers return in allocation response {response}")
        answer: api.ContainerAllocateResponse = response.container_responses[0]
        return answer

    def pre_start(self, ids: Sequence[str]) -> None:
        request = api.PreStartContainerRequest(devices_ids=ids)
        try:
            self._call(self._stub.PreStartContainer, request, PRE_START_SECONDS)
        except PluginError as error:
            raise PluginError(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    def stop(self) -> None:
        self._stopped = True
        self._channel.close()

    def _call(self, method: Any, request: Any, seconds: float | None) -> Any:
        if self._stopped:
            raise PluginError(f"endpoint of {self.resource} has been stopped")
        try:
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            raise _plugin_error(error) from error
        except ValueError as error:
            raise PluginError(f"endpoint of {self.resource} has been stopped") from error


class Registry(services.RegistrationServicer):
    """The Registration service on `<folder>/kubelet.sock`, and the clients of all plugins that registered."""

    def __init__(self, folder: Path, devices: DeviceManager, max_message: int = MAX_MESSAGE) -> None:
        self._folder, self._devices, self._max_message = folder, devices, max_message
        self._lock = threading.Lock()
        self._clients: dict[str, Plugin] = {}
        self._followers: list[tuple[Plugin, threading.Thread]] = []
        self._server: Any = None
        self._closing = False

    def start(self) -> None:
        """Every socket of the folder goes first: plugins notice by that that they have to register again."""
        for path in self._folder.iterdir():
            if path.name != FILE and path.is_socket():
                path.unlink()
        self._server = grpc.server(ThreadPoolExecutor(8, "registration"), options=[("grpc.so_reuseport", 0)])
        services.add_RegistrationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._folder / 'kubelet.sock'}")
        self._server.start()

    def stop(self) -> None:
        with self._lock:
            self._closing = True
        self._server.stop(None).wait()
        for client, follower in self._followers:
            client.stop()
            follower.join(timeout=5)

    def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:  # noqa: N802
        """Dials the plugin before it answers. A client that was registered for the resource stays connected.

        As server.go, `connectClient`: the new client is noted first, and where it cannot be connected no client is
        noted any more, be it that one's predecessor, which still serves.
        """
        if request.version != _VERSION:
            context.abort(grpc.StatusCode.UNKNOWN, f"unsupported device plugin API version: {request.version}")
        if "/" not in request.resource_name:
            context.abort(grpc.StatusCode.UNKNOWN, f"invalid extended resource name: {request.resource_name}")
        try:
            client = Plugin(request.resource_name, self._folder / request.endpoint, self._max_message)
        except PluginError as error:
            with self._lock:
                self._clients.pop(request.resource_name, None)
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
        with self._lock:
            self._clients[client.resource] = client
        self._devices.connected(client.resource, client)
        follower = threading.Thread(target=self._follow, args=(client,), name=f"plugin {client.resource}", daemon=True)
        self._followers.append((client, follower))
        follower.start()
        return api.Empty()

    def _follow(self, client: Plugin) -> None:
        """As the kubelet: when a stream ends, the client noted *now* is disconnected, be it another one or none.

        A client that is not noted keeps its connection, and calls go there while it is the resource's endpoint.
        """
        client.follow(self._devices)
        with self._lock:
            current = None if self._closing else self._clients.pop(client.resource, None)
        if current is not None:
            current.stop()
            self._devices.disconnected(current.resource)


def _plugin_error(error: Any) -> PluginError:
    code = error.code().name.title().replace("_", "")
    return PluginError(f"rpc error: code = {code} desc = {error.details()}")
