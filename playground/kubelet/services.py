"""The kubelet's gRPC services: the registration of device plugins, a client for each plugin, and PodResources.

The services translate between gRPC and the `DeviceManager`, which makes the decisions. `kubelet` starts the services.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from playground.kubelet.device_checkpoint import FILE
from playground.kubelet.device_manager import DeviceManager, PluginError
from proto import deviceplugin_pb2 as api
from proto import deviceplugin_pb2_grpc as services
from proto import podresources_pb2 as listing
from proto import podresources_pb2_grpc as listing_services

log = logging.getLogger(__name__)

MAX_MESSAGE = 4 << 20
"""The most bytes of a message, which is the default of gRPC for Go. The kubelet does not raise this limit, so a longer
device list ends the stream."""
PRE_START_SECONDS = 30.0
"""The kubelet's time limit for PreStartContainer."""
_DIAL_SECONDS = 10.0
_VERSION = "v1beta1"


class Plugin:
    """A client of one registered plugin. It implements `device_manager.Endpoint`.

    The constructor raises PluginError if it cannot connect to the plugin or the plugin does not return its options.

    Args:
        resource: The name of the resource.
        socket: The socket on which the plugin listens.
        max_message: The most bytes of a message that the client receives.

    Attributes:
        pre_start_required: Whether the plugin wants a call of PreStartContainer before each start of a container.
    """

    def __init__(self, resource: str, socket: Path, max_message: int = MAX_MESSAGE) -> None:
        self.resource = resource
        self._stopped = False
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=[
                ("grpc.max_receive_message_length", max_message),
                # A plugin that registers again on the same path must not wait for the back-off of the old channel.
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
        """Pass every device list of the plugin to the device manager, until the stream ends."""
        try:
            self._stream = self._stub.ListAndWatch(api.Empty())
            for response in self._stream:
                devices.update(self.resource, {device.ID: device.health == "Healthy" for device in response.devices})
        except grpc.RpcError as error:
            log.info("ListAndWatch of %s ended: %s", self.resource, _plugin_error(error))
        except ValueError:  # gRPC raises it for a call on a channel that has just been closed
            log.info("ListAndWatch of %s did not begin: the connection is closed", self.resource)

    def allocate(self, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Call Allocate, without a time limit as in the real kubelet. Raises PluginError."""
        request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids)])
        response = self._call(self._stub.Allocate, request, None)
        if not response.container_responses:
            raise PluginError(f"no containers return in allocation response {response}")
        answer: api.ContainerAllocateResponse = response.container_responses[0]
        return answer

    def pre_start(self, ids: Sequence[str]) -> None:
        """Call PreStartContainer. Raises PluginError if it fails or takes longer than `PRE_START_SECONDS`."""
        request = api.PreStartContainerRequest(devices_ids=ids)
        try:
            self._call(self._stub.PreStartContainer, request, PRE_START_SECONDS)
        except PluginError as error:
            raise PluginError(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    def stop(self) -> None:
        """Close the connection, which ends `follow`. Later calls raise PluginError."""
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
    """Serves Registration on `<folder>/kubelet.sock` and follows every plugin that registers."""

    def __init__(self, folder: Path, devices: DeviceManager, max_message: int = MAX_MESSAGE) -> None:
        self._folder = folder
        self._devices = devices
        self._max_message = max_message
        self._lock = threading.Lock()  # guards `_clients` and `_closing`
        self._clients: dict[str, Plugin] = {}
        self._followers: list[tuple[Plugin, threading.Thread]] = []
        self._server: Any = None
        self._closing = False

    def start(self) -> None:
        """Remove every socket in the folder and then serve. A plugin should register again when its socket is gone."""
        for path in self._folder.iterdir():
            if path.name != FILE and path.is_socket():
                path.unlink()
        self._server = grpc.server(ThreadPoolExecutor(8, "registration"), options=[("grpc.so_reuseport", 0)])
        services.add_RegistrationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._folder / 'kubelet.sock'}")
        self._server.start()

    def stop(self) -> None:
        """Stop serving, and close the connections to all plugins."""
        with self._lock:
            self._closing = True
        self._server.stop(None).wait()
        for client, follower in self._followers:
            client.stop()
            follower.join(timeout=5)

    def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:  # noqa: N802
        """Connect to the plugin, and then answer. The previous client for the resource stays connected.

        As in `connectClient` (server.go), the previous client is removed from `_clients` even if the connection to the
        new plugin fails. The device manager then continues to call the previous client.
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
        """Follow a client's stream. When it ends, disconnect the client that `_clients` then has for the resource.

        That may be another client, as in the real kubelet. A client that is not in `_clients` keeps its connection, and
        the device manager calls it as long as it is the endpoint of the resource.
        """
        client.follow(self._devices)
        with self._lock:
            current = None if self._closing else self._clients.pop(client.resource, None)
        if current is not None:
            current.stop()
            self._devices.disconnected(current.resource)


def rpc_message(error: Any) -> str:
    """Return the message that gRPC for Go prints for a failed call."""
    code = error.code().name.title().replace("_", "")
    return f"rpc error: code = {code} desc = {error.details()}"


def _plugin_error(error: Any) -> PluginError:
    return PluginError(rpc_message(error))


Raw = Mapping[str, Any]


class TokenBucket:
    """Limits calls to `rate` per second on average, and to `burst` at once. It is thread-safe."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._last = clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Return whether a call is allowed now, and count it if it is."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate)
            self._last = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


Claimed = Callable[[Raw, Raw], list[listing.DynamicResource]]


class PodResources(listing_services.PodResourcesListerServicer):
    """Serves the kubelet's PodResources API. Calls beyond the limit fail with RESOURCE_EXHAUSTED.

    Args:
        socket: The path of the Unix socket.
        devices: The device manager, which knows the device ids of each container.
        pods: Returns the pods to list.
        limit: The limit for calls of all methods together.
        claimed: Returns the devices that a container of a pod has by ResourceClaims.
    """

    def __init__(
        self,
        socket: Path,
        devices: DeviceManager,
        pods: Callable[[], Iterable[Raw]],
        limit: TokenBucket,
        claimed: Claimed = lambda _pod, _container: [],
    ) -> None:
        self._socket = socket
        self._devices = devices
        self._pods = pods
        self._limit = limit
        self._claimed = claimed
        self._server: Any = None

    def start(self) -> None:
        """Serve on the socket. A socket that an earlier process has left there is replaced."""
        self._socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(8, "pod-resources"), options=[("grpc.so_reuseport", 0)])
        listing_services.add_PodResourcesListerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def List(self, request: Any, context: Any) -> listing.ListPodResourcesResponse:  # noqa: N802, ARG002
        self._admit(context)
        held = self._held()
        return listing.ListPodResourcesResponse(pod_resources=[_pod(pod, held, self._claimed) for pod in self._pods()])

    def Get(self, request: Any, context: Any) -> listing.GetPodResourcesResponse:  # noqa: N802
        self._admit(context)
        wanted = (request.pod_namespace, request.pod_name)
        for pod in self._pods():
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == wanted:
                return listing.GetPodResourcesResponse(pod_resources=_pod(pod, self._held(), self._claimed))
        context.abort(grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found")
        raise AssertionError("abort does not return")

    def GetAllocatableResources(self, request: Any, context: Any) -> listing.AllocatableResourcesResponse:  # noqa: N802, ARG002
        self._admit(context)
        rows = sorted(self._devices.all_ids().items())
        devices = [device for resource, ids in rows for device in _one_by_one(resource, ids)]
        return listing.AllocatableResourcesResponse(devices=devices)

    def _admit(self, context: Any) -> None:
        if not self._limit.take():
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def _held(self) -> dict[tuple[str, str], list[listing.ContainerDevices]]:
        """Return the devices of each container, by the UID of the pod and the name of the container."""
        held: dict[tuple[str, str], list[listing.ContainerDevices]] = {}
        for e in self._devices.entries():
            held.setdefault((e.uid, e.container), []).extend(_one_by_one(e.resource, e.ids))
        return held


def _one_by_one(resource: str, ids: Iterable[str]) -> list[listing.ContainerDevices]:
    """Return an entry for each id, as the kubelet does for ids without topology."""
    return [listing.ContainerDevices(resource_name=resource, device_ids=[device]) for device in ids]


def _pod(
    pod: Raw, held: Mapping[tuple[str, str], list[listing.ContainerDevices]], claimed: Claimed
) -> listing.PodResources:
    """Return a pod with its app containers and sidecars. As in the kubelet, other init containers are not listed."""
    meta, spec = pod["metadata"], pod["spec"]
    sidecars = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    return listing.PodResources(
        name=meta["name"],
        namespace=meta["namespace"],
        containers=[
            listing.ContainerResources(
                name=c["name"],
                devices=held.get((meta["uid"], c["name"]), ()),
                dynamic_resources=claimed(pod, c),
            )
            for c in [*sidecars, *spec["containers"]]
        ],
    )
