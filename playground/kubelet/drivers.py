"""The registered plugins of DRA drivers, and the deletion of ResourceSlices whose driver is not available.

It reproduces pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go of Kubernetes 1.36. `plugin_watcher` registers plugins,
and `claim_manager` calls them.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.resource_claims import SLICES
from playground.kubelet.device_health import DeviceHealth
from playground.kubelet.driver_client import DriverClient
from playground.kubelet.pod_claims import ClaimError

log = logging.getLogger(__name__)

SERVICE = "v1.DRAPlugin"
"""The service that a plugin must implement. The real kubelet also accepts v1beta1."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 300.0


class Drivers:
    """Keeps the plugins of each driver in the order of their registration. It is thread-safe.

    When the kubelet starts, and when no plugin of a driver has been connected for `wipe_delay`, the node's
    ResourceSlices are deleted, because pods for which a slice was chosen could not start.

    Args:
        api: The client of the API server.
        node: The name of the node.
        call_seconds: The time limit for each call of a plugin.
        wipe_delay: The seconds until the ResourceSlices of a driver without a connected plugin are deleted.
        health: Gets the health reports of the plugins.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        api: Api,
        node: str,
        health: DeviceHealth,
        *,
        call_seconds: float,
        wipe_delay: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._node = node
        self._health = health
        self._call_seconds = call_seconds
        self._wipe_delay = wipe_delay
        self._clock = clock
        self._lock = threading.RLock()
        self._clients: dict[str, list[DriverClient]] = {}
        self._wipe_at: dict[str, float] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Delete the ResourceSlices of the node in the background, those of all drivers."""
        self._wipe("")

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            clients = [client for clients in self._clients.values() for client in clients]
            self._clients = {}
        for client in clients:
            client.stop()

    def get(self, driver: str) -> DriverClient:
        """Return the newest connected plugin of a driver, or the newest one. Raises ClaimError if there is none."""
        with self._lock:
            clients = self._clients.get(driver)
            if not clients:
                raise ClaimError(f"DRA driver {driver} is not registered")
            return next((client for client in reversed(clients) if client.connected), clients[-1])

    def refusal(self, driver: str, endpoint: str, services: Sequence[str]) -> str | None:
        """Return why a plugin cannot be registered, or None if it can be."""
        problem = f"none of services supported by the plugin ({list(services)}) are supported by the kubelet"
        if not services:
            problem = "empty list of supported gRPC services (aka supported versions)"
        if SERVICE in services:
            return None
        return f"invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}: {problem}"

    def add(self, driver: str, endpoint: str) -> None:
        """Register a plugin, and connect to it. Raises ClaimError if there is one on the same endpoint."""
        with self._lock:
            clients = self._clients.setdefault(driver, [])
            if any(client.endpoint == endpoint for client in clients):
                raise ClaimError(f"endpoint {endpoint} already registered for DRA driver plugin {driver}")
            client = DriverClient(driver, endpoint, self._call_seconds, self._health)
            clients.append(client)
            self._sync(driver)
        client.start()

    def remove(self, driver: str, endpoint: str) -> None:
        """Unregister a plugin, and close the connection to it."""
        with self._lock:
            clients = self._clients.get(driver, [])
            removed = [client for client in clients if client.endpoint == endpoint]
            self._clients[driver] = [client for client in clients if client.endpoint != endpoint]
            self._sync(driver)
        for client in removed:
            client.stop()

    def tick(self) -> None:
        """Watch and restore the connections, and delete ResourceSlices that are due. Call it again and again."""
        with self._lock:
            now = self._clock()
            for driver, clients in self._clients.items():
                before = [client.connected for client in clients]
                for client in clients:
                    client.connect()
                if before != [client.connected for client in clients]:
                    self._sync(driver)
            due = [driver for driver, at in self._wipe_at.items() if at <= now]
            for driver in due:
                del self._wipe_at[driver]
        for driver in due:
            self._wipe(driver)

    def pending_wipes(self) -> list[str]:
        """Return the drivers whose ResourceSlices will be deleted unless a plugin connects before."""
        with self._lock:
            return sorted(self._wipe_at)

    def _sync(self, driver: str) -> None:
        """Schedule the deletion of a driver's ResourceSlices, or cancel it if a plugin is connected."""
        with self._lock:
            if any(client.connected for client in self._clients.get(driver, ())):
                self._wipe_at.pop(driver, None)
            else:
                self._wipe_at.setdefault(driver, self._clock() + self._wipe_delay)

    def _wipe(self, driver: str) -> None:
        threading.Thread(target=self._delete_slices, args=(driver,), name=f"slices {self._node}", daemon=True).start()

    def _delete_slices(self, driver: str) -> None:
        """Delete the ResourceSlices of the node, only those of `driver` unless it is empty. Retry until it works."""
        selector = f"spec.nodeName={self._node}" + (f",spec.driver={driver}" if driver else "")
        pause = _FIRST_PAUSE
        while not self._stopped.is_set():
            try:
                self._api.delete(SLICES, fieldSelector=selector)
            except (ApiError, Unreachable) as error:
                if isinstance(error, ApiError) and error.status == 404:
                    return  # The API server does not have this kind of object.
                log.info("ResourceSlices of %s not deleted: %s", self._node, error)
            else:
                return
            self._stopped.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
