"""The kubelet's device manager, which decides which device ids each container holds.

It reproduces the oddities of pkg/kubelet/cm/devicemanager of Kubernetes 1.36. docs/design/kubernetes.md ("Device
manager") lists what they mean for a plugin. This module opens no connections: `services` implements `Endpoint` over
gRPC. The other modules of the kubelet share one `DeviceManager`, which is thread-safe.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mgpu.model.quantities import whole_number
from playground.container_runtime import RunOptions
from playground.kubelet import device_checkpoint
from playground.kubelet.device_checkpoint import Entry
from playground.kubelet.pod_claims import backed_resources
from proto import deviceplugin_pb2 as api

Raw = Mapping[str, Any]


class PluginError(Exception):
    """A call to a plugin failed. The message reads like that of the real kubelet, which is written in Go."""


class AdmissionError(Exception):
    """The devices of a container cannot be allocated. At admission, the pod fails with UnexpectedAdmissionError."""


class Endpoint(Protocol):
    """A registered plugin. Its calls raise PluginError."""

    @property
    def pre_start_required(self) -> bool: ...

    def allocate(self, ids: Sequence[str]) -> api.ContainerAllocateResponse: ...

    def pre_start(self, ids: Sequence[str]) -> None: ...


class DeviceManager:
    """Keeps the device ids that each container holds of each resource.

    The class is thread-safe. `_lock` guards the state, and is not held while plugins, `active` or `changed` are called,
    because `active` and `changed` take the kubelet's lock.

    Args:
        file: The checkpoint file. It is read at the start, and written after an allocation, after each device list, and
            when a resource is removed.
        active: Returns the UIDs of the pods whose ids must be kept. The next allocation frees the ids of all other
            pods.
        rng: The source of random choices, which the real kubelet makes because Go walks maps in random order.
        grace: The seconds after which the resource of a disconnected plugin is removed.
        changed: Called when capacity or health may have changed.
        clock: A monotonic clock in seconds.

    Attributes:
        without_checkpoint: Whether there was no checkpoint file at the start.
    """

    def __init__(
        self,
        file: Path,
        active: Callable[[], Collection[str]],
        *,
        rng: random.Random,
        grace: float = 300.0,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._active = active
        self._rng = rng
        self._grace = grace
        self._changed = changed
        self._clock = clock
        self._lock = threading.RLock()
        self._endpoints: dict[str, Endpoint | None] = {}
        self._stopped: dict[str, float] = {}
        self._devices: dict[str, dict[str, bool]] = {}
        self._held: dict[tuple[str, str, str], Entry] = {}
        self._taken: dict[str, set[str]] = {}
        self._reusable: dict[str, set[str]] = {}
        self._reusable_of = ""
        restored = device_checkpoint.read(file)
        self.without_checkpoint = restored is None
        for entry in restored.entries if restored else ():
            self._held[entry.uid, entry.container, entry.resource] = entry
        for resource, _ in restored.registered if restored else ():
            # Until the plugin registers again, the capacity is 0 and PreStartContainer is not called.
            self._devices[resource] = {}
            self._endpoints[resource] = None
            self._stopped[resource] = self._clock()
        self._recount_taken()

    def connected(self, resource: str, endpoint: Endpoint) -> None:
        """Register a plugin, which replaces the earlier plugin of the resource."""
        with self._lock:
            self._endpoints[resource] = endpoint
            self._stopped.pop(resource, None)
            self._devices.setdefault(resource, {})
        self._changed()

    def disconnected(self, resource: str) -> None:
        """Mark all ids as unhealthy. The resource is removed after the grace period if no plugin connects again."""
        with self._lock:
            if resource in self._endpoints:
                self._devices[resource] = dict.fromkeys(self._devices.get(resource, {}), False)
                self._stopped[resource] = self._clock()
        self._changed()

    def update(self, resource: str, devices: Mapping[str, bool]) -> None:
        """Replace the device list of a resource by the one that ListAndWatch sent.

        Args:
            devices: The health of each device by its id.
        """
        with self._lock:
            self._devices[resource] = dict(devices)
            self._checkpoint()
        self._changed()

    def capacity(self) -> tuple[dict[str, int], dict[str, int], set[str]]:
        """Return the capacity and the allocatable amount of each resource, and the resources that this call removes.

        A resource is removed when the grace period after the disconnection of its plugin is over.
        """
        with self._lock:
            now = self._clock()
            removed = {r for r, since in self._stopped.items() if now - since >= self._grace}
            for resource in removed:
                del self._stopped[resource]
                del self._endpoints[resource]
                self._devices.pop(resource, None)
            if removed:
                self._checkpoint()
            total = {resource: len(ids) for resource, ids in self._devices.items()}
            healthy = {resource: sum(ids.values()) for resource, ids in self._devices.items()}
            return total, healthy, removed

    def allocate(self, pod: Raw, container: Raw, *, running: bool = False) -> None:
        """Allocate the devices of one container of `pod`. Raises AdmissionError if that is not possible.

        Args:
            running: Whether the container runs already, because it was started before the kubelet was restarted.
        """
        uid = pod["metadata"]["uid"]
        with self._lock:
            if self._reusable_of != uid:
                self._reusable_of = uid
                self._reusable = {}
        self._allocate(pod, container, running=running)
        # Later containers of the pod can reuse the ids of init containers, but not those of sidecars.
        inits = {c["name"]: c.get("restartPolicy") for c in pod["spec"].get("initContainers") or ()}
        lends = inits.get(container["name"], "Always") != "Always"
        with self._lock:
            for resource, ids in self.ids(uid, container["name"]).items():
                reusable = self._reusable.setdefault(resource, set())
                self._reusable[resource] = reusable | set(ids) if lends else reusable - set(ids)

    def run_options(self, pod: Raw, container: Raw) -> RunOptions:
        """Prepare the start of a container, and return the merged answers of its plugins to Allocate.

        This method must be called before every start of a container. It calls PreStartContainer of each plugin that
        asks for it, and allocates devices that the container should hold but does not.

        Raises:
            PluginError: PreStartContainer fails or cannot be called.
            AdmissionError: The missing devices cannot be allocated.
        """
        uid, name = pod["metadata"]["uid"], container["name"]
        missing = False
        for resource in self._resources(container):
            if self._knows(resource):
                self._pre_start(uid, name, resource)
                missing = missing or (uid, name, resource) not in self._held
        if missing:
            self._allocate(pod, container)
        with self._lock:
            entries = [e for (pod_uid, c, _), e in self._held.items() if (pod_uid, c) == (uid, name)]
        return self._merged(entries)

    def ids(self, uid: str, container: str) -> dict[str, tuple[str, ...]]:
        """Return the ids that a container holds, by resource."""
        with self._lock:
            return {r: e.ids for (pod, c, r), e in self._held.items() if (pod, c) == (uid, container)}

    def all_ids(self) -> dict[str, tuple[str, ...]]:
        """Return all ids in the device list of each resource, including the unhealthy ones."""
        with self._lock:
            return {resource: tuple(ids) for resource, ids in self._devices.items()}

    def entries(self) -> tuple[Entry, ...]:
        """Return the ids that all containers hold, including those of ended pods, which the next allocation frees."""
        with self._lock:
            return tuple(self._held.values())

    def held_amounts(self) -> dict[str, int]:
        """Return the number of ids that all pods hold, by resource."""
        with self._lock:
            return {resource: len(ids) for resource, ids in self._taken.items()}

    def health(self, resource: str, device: str) -> str:
        """Return `Healthy`, `Unhealthy`, or `Unknown` if the device is not in the device list of the resource."""
        with self._lock:
            healthy = self._devices.get(resource, {}).get(device)
        return {None: "Unknown", True: "Healthy", False: "Unhealthy"}[healthy]

    def _knows(self, resource: str) -> bool:
        with self._lock:
            return resource in self._devices or resource in self._taken

    def _resources(self, container: Raw) -> list[str]:
        """Return the extended resources in a container's limits in random order, as Go walks a map."""
        limits = (container.get("resources") or {}).get("limits") or {}
        names = sorted(name for name, amount in limits.items() if "/" in name and whole_number(amount))
        with self._lock:
            self._rng.shuffle(names)
        return names

    def _allocate(self, pod: Raw, container: Raw, *, running: bool = False) -> None:
        """Allocate the ids that the container should hold, except those of resources that a claim serves.

        PreStartContainer has no such exception: as in the kubelet, a plugin that wants this call for a resource makes
        the start of a container fail whose resource of this name is served by a claim.
        """
        uid, name = pod["metadata"]["uid"], container["name"]
        limits = (container.get("resources") or {}).get("limits") or {}
        claimed = backed_resources(pod, name)
        known = [r for r in self._resources(container) if r not in claimed and self._knows(r)]
        if known:
            self._release_ended(uid)
        allocated = False
        try:
            for resource in known:
                chosen = self._choose(uid, name, resource, whole_number(limits[resource]), running=running)
                if chosen:
                    self._call_allocate(uid, name, resource, chosen)
                    allocated = True
        except AdmissionError:
            with self._lock:
                self._recount_taken()
            raise
        if allocated:
            with self._lock:
                self._checkpoint()

    def _call_allocate(self, uid: str, name: str, resource: str, ids: tuple[str, ...]) -> None:
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise AdmissionError(f"unknown Device Plugin {resource}")
        try:
            response = endpoint.allocate(ids)
        except PluginError as error:
            raise AdmissionError(str(error)) from error
        with self._lock:
            entry = Entry(uid, name, resource, ids, response.SerializeToString())
            self._held[uid, name, resource] = entry

    def _choose(self, uid: str, name: str, resource: str, wanted: int, *, running: bool) -> tuple[str, ...]:
        """Return the ids to allocate, or () if the container runs or holds its ids already. Raises AdmissionError."""
        with self._lock:
            held = self._held.get((uid, name, resource))
            if held and len(held.ids) != wanted:
                raise AdmissionError(
                    f'pod "{uid}" container "{name}" changed request for resource "{resource}" '
                    f"from {len(held.ids)} to {wanted}"
                )
            if running:
                return ()
            healthy = {device for device, well in self._devices.get(resource, {}).items() if well}
            if resource not in self._devices:
                raise AdmissionError(f"cannot allocate unregistered device {resource}")
            if not healthy:
                raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
            if held and not healthy.issuperset(held.ids):
                raise AdmissionError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
            if held:
                return ()
            taken = self._taken.setdefault(resource, set())
            reused = sorted(self._reusable.get(resource, ()))
            chosen = self._rng.sample(reused, min(wanted, len(reused)))
            free = sorted(healthy - taken)
            needed = wanted - len(chosen)
            if needed > len(free):
                raise AdmissionError(
                    f"requested number of devices unavailable for {resource}. Requested: {needed}, "
                    f"Available: {len(free)}"
                )
            chosen += self._rng.sample(free, needed)
            taken.update(chosen)
            return tuple(chosen)

    def _pre_start(self, uid: str, name: str, resource: str) -> None:
        with self._lock:
            endpoint, held = self._endpoints.get(resource), self._held.get((uid, name, resource))
            if resource not in self._endpoints:
                raise PluginError(f"endpoint not found in cache for a registered resource: {resource}")
        if endpoint is None or not endpoint.pre_start_required:
            return
        if held is None:
            raise PluginError(
                f"no devices found allocated in local cache for pod {uid}, container {name}, resource {resource}"
            )
        endpoint.pre_start(held.ids)

    def _merged(self, entries: Sequence[Entry]) -> RunOptions:
        """Return the merged answers of all plugins. As in the kubelet, a random one of conflicting settings wins."""
        with self._lock:
            order = self._rng.sample(list(entries), len(entries))
        env: dict[str, str] = {}
        mounts: dict[str, str] = {}
        cdi: dict[str, None] = {}
        nodes: dict[str, None] = {}
        for entry in order:
            response = api.ContainerAllocateResponse.FromString(entry.response)
            for key, value in response.envs.items():
                env.setdefault(key, value)
            for mount in response.mounts:
                mounts.setdefault(mount.container_path, mount.host_path)
            nodes.update(dict.fromkeys(device.container_path for device in response.devices))
            cdi.update(dict.fromkeys(device.name for device in response.cdi_devices))
        return RunOptions(tuple(env.items()), tuple(cdi), tuple(nodes), tuple(mounts.items()))

    def _release_ended(self, admitting: str) -> None:
        """Free the ids of the pods that have ended, except those of the pod that is being admitted."""
        active = {*self._active(), admitting}
        with self._lock:
            self._held = {key: entry for key, entry in self._held.items() if key[0] in active}
            self._recount_taken()

    def _recount_taken(self) -> None:
        self._taken = {}
        for (_, _, resource), entry in self._held.items():
            self._taken.setdefault(resource, set()).update(entry.ids)

    def _checkpoint(self) -> None:
        registered = {r: [d for d, healthy in ids.items() if healthy] for r, ids in self._devices.items()}
        device_checkpoint.write(self._file, self._held.values(), registered)
