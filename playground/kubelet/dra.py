"""Dynamic Resource Allocation in the kubelet: the parts for it, and their configuration.

`kubelet` starts a `Dra`, and `pod_worker` uses its parts. They are `claim_manager` for the claims of pods, `drivers`
and `driver_client` for the drivers, `plugin_watcher` for their registration, and `device_health` for the health of
devices. `pod_claims` says which claims a pod uses, and `claim_checkpoint` is the format of the checkpoint.

Drivers that have only the service v1beta1.DRAPlugin, the claims of PodGroups and the checkpoint of the health are not
implemented.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.resource_claims import claim_path
from playground.kubelet.claim_checkpoint import FILE
from playground.kubelet.claim_manager import ClaimManager
from playground.kubelet.device_health import DeviceHealth
from playground.kubelet.drivers import Drivers
from playground.kubelet.plugin_watcher import PluginWatcher
from playground.kubelet.pod_claims import ClaimError

Raw = Mapping[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraConfig:
    """The configuration of Dynamic Resource Allocation. All times are in seconds, and the defaults are the kubelet's.

    Attributes:
        registration_seconds: How often the kubelet looks for the sockets of drivers.
        call_seconds: The time limit for a call of a driver.
        prepare_retry_seconds: After what time the kubelet tries again to prepare the claims of a pod. A random time of
            up to half of it is added. A change of the pod's spec, labels or annotations makes it try at once.
        wipe_delay: After what time without a driver its ResourceSlices are deleted.
        reconcile_seconds: How often the kubelet releases the claims of pods that are gone.
        access_delay: For how long the claims of a new pod are refused to the kubelet with 403, because the Node
            authorizer of the API server does not know yet that the pod is on the node. With 0 they never are. On a real
            cluster it happens in bursts of new pods, for some milliseconds after the binding.
        seed: The seed for the random part of `prepare_retry_seconds`.
    """

    registration_seconds: float = 1.0
    call_seconds: float = 45.0
    prepare_retry_seconds: float = 60.0
    wipe_delay: float = 30.0
    reconcile_seconds: float = 60.0
    access_delay: float = 0.0
    seed: int = 0


class Dra:
    """The parts of one kubelet for Dynamic Resource Allocation. It can be started and stopped once.

    Args:
        root: The kubelet's folder, with the checkpoint and the folder `plugins_registry`.
        node: The name of the node.
        active: Returns the UIDs of the pods whose claims must be kept, or None while the pods are not known yet.
        changed: Called when the health of devices has changed.

    Attributes:
        claims: The claims of the node's pods.
        health: The health of the devices.
        drivers: The registered drivers.
    """

    def __init__(
        self,
        root: Path,
        node: str,
        api: Api,
        config: DraConfig,
        *,
        active: Callable[[], Collection[str] | None],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._active = active
        self.health = DeviceHealth(changed)
        self.drivers = Drivers(api, node, self.health, call_seconds=config.call_seconds, wipe_delay=config.wipe_delay)
        self.claims = ClaimManager(root / FILE, ClaimReader(api, node, config.access_delay).fetch, self.drivers.get)
        self._watcher = PluginWatcher(root / "plugins_registry", self.drivers, config.registration_seconds, self._tick)
        self._reconcile_at = time.monotonic() + config.reconcile_seconds
        self._rng = random.Random(config.seed)

    def start(self) -> None:
        self.drivers.start()
        self._watcher.start()

    def stop(self) -> None:
        self._watcher.stop()
        self.drivers.stop()

    def retry_seconds(self) -> float:
        """Return the time until the next attempt to prepare the claims of a pod (pod_workers.go, completeWork)."""
        return self._config.prepare_retry_seconds * self._rng.uniform(1.0, 1.5)

    def _tick(self) -> None:
        self.drivers.tick()
        active = self._active()
        if active is None or time.monotonic() < self._reconcile_at:
            return
        self._reconcile_at = time.monotonic() + self._config.reconcile_seconds
        for error in self.claims.release_inactive(active):
            log.info("claims of a pod that is gone not released: %s", error)


class ClaimReader:
    """Reads the claims of pods with the kubelet's identity, and imitates the race of the Node authorizer.

    Args:
        delay: For how long the claims of a pod are refused, from the first request on.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, api: Api, node: str, delay: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._node = node
        self._delay = delay
        self._clock = clock
        self._lock = threading.Lock()
        self._first: dict[str, float] = {}

    def fetch(self, pod: Raw, name: str) -> Raw:
        """Return a ResourceClaim that the pod uses. Raises ClaimError."""
        namespace = pod["metadata"]["namespace"]
        try:
            if self._refused(pod["metadata"]["uid"]):
                raise ClaimError(f"fetch ResourceClaim {name}: {self._refusal(namespace, name)}")
            return self._api.get(claim_path(namespace, name))
        except ApiError as error:
            raise ClaimError(f"fetch ResourceClaim {name}: {error.message}") from error
        except Unreachable as error:
            raise ClaimError(f"fetch ResourceClaim {name}: {error}") from error

    def _refused(self, uid: str) -> bool:
        if not self._delay:
            return False
        with self._lock:
            first = self._first.setdefault(uid, self._clock())
        return self._clock() - first < self._delay

    def _refusal(self, namespace: str, name: str) -> str:
        return (
            f'resourceclaims.resource.k8s.io "{name}" is forbidden: User "system:node:{self._node}" cannot get '
            f'resource "resourceclaims" in API group "resource.k8s.io" in the namespace "{namespace}": no relationship '
            f"found between node '{self._node}' and this object"
        )
