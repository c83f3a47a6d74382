"""A client of one DRA driver: its gRPC calls, the state of its connection, and its stream of health reports.

`drivers` creates a `DriverClient` for each plugin of a driver that registers.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from playground.kubelet.device_health import DeviceHealth
from playground.kubelet.pod_claims import ClaimError
from playground.kubelet.services import rpc_message
from proto import dra_health_pb2 as health_api
from proto import dra_health_pb2_grpc as health_services
from proto import dra_pb2 as api
from proto import dra_pb2_grpc as services

log = logging.getLogger(__name__)

_STREAM_SECONDS = 5.0
"""The time between two attempts to follow the health of the devices."""


class DriverClient:
    """Calls the plugin of a DRA driver. It implements `claim_manager.Driver`.

    As in the kubelet, the connection is made at once and made again when it breaks, so that `connected` shows whether
    the plugin is there.

    Args:
        name: The name of the driver.
        endpoint: The path of the socket on which the plugin serves.
        seconds: The time limit for each call.
        health: Gets the health reports.

    Attributes:
        connected: Whether there was a connection at the last call of `connect`.
    """

    def __init__(self, name: str, endpoint: str, seconds: float, health: DeviceHealth) -> None:
        self.name = name
        self.endpoint = endpoint
        self.connected = False
        self._seconds = seconds
        self._health = health
        self._lock = threading.Lock()  # is held while the channel is closed, and while its state is read
        self._stopped = threading.Event()
        self._channel = grpc.insecure_channel(
            f"unix:{endpoint}", options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        )
        self._stub = services.DRAPluginStub(self._channel)  # type: ignore[no-untyped-call]
        self._health_stub = health_services.DRAResourceHealthStub(self._channel)  # type: ignore[no-untyped-call]
        self._follower = threading.Thread(target=self._follow, name=f"health {name}", daemon=True)

    def start(self) -> None:
        """Connect, and begin to follow the health of the devices."""
        self.connect()
        self._follower.start()

    def stop(self) -> None:
        """Close the connection. Later calls raise ClaimError."""
        with self._lock:
            self._stopped.set()
            self._channel.close()
        self._follower.join(timeout=5)

    def connect(self) -> None:
        """Set `connected`, and let gRPC connect if the connection has broken. Do not wait for that.

        This asks gRPC's inner channel, because the thread behind the public `subscribe` fails with an exception when
        the channel is closed.
        """
        with self._lock:
            if not self._stopped.is_set():
                state = self._channel._channel.check_connectivity_state(True)
                self.connected = state == grpc.ChannelConnectivity.READY.value[0]

    def prepare(self, claims: Sequence[api.Claim]) -> Mapping[str, api.NodePrepareResourceResponse]:
        """Call NodePrepareResources, and return the answer for each claim by its UID. Raises ClaimError."""
        request = api.NodePrepareResourcesRequest(claims=claims)
        answers: Mapping[str, api.NodePrepareResourceResponse] = self._call("NodePrepareResources", request).claims
        return answers

    def unprepare(self, claims: Sequence[api.Claim]) -> Mapping[str, api.NodeUnprepareResourceResponse]:
        """Call NodeUnprepareResources, and return the answer for each claim by its UID. Raises ClaimError."""
        request = api.NodeUnprepareResourcesRequest(claims=claims)
        answers: Mapping[str, api.NodeUnprepareResourceResponse] = self._call("NodeUnprepareResources", request).claims
        return answers

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self._seconds)
        except grpc.RpcError as error:
            raise ClaimError(f"{method}: {rpc_message(error)}") from error
        except ValueError as error:  # gRPC raises it for a call on a channel that has just been closed
            closing = "rpc error: code = Canceled desc = grpc: the client connection is closing"
            raise ClaimError(f"{method}: {closing}") from error

    def _follow(self) -> None:
        """Pass the health reports of the plugin on, and call it again when the stream has ended."""
        while not self._stopped.is_set():
            try:
                for response in self._health_stub.NodeWatchResources(health_api.NodeWatchResourcesRequest()):
                    self._health.update(self.name, response.devices)
            except grpc.RpcError as error:
                log.debug("the health stream of %s ended: %s", self.name, error)
            except ValueError:
                return  # the channel has been closed
            self._health.clear(self.name)
            self._stopped.wait(_STREAM_SECONDS)
