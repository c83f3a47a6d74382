"""Reads and changes the MIG mode and the MIG instances of a node's cards through NVML.

In mgpu a pod gets a GPU instance together with one compute instance that takes all of it; this pair is called a MIG
instance. `NvmlMig` initializes and shuts down NVML in every call, so that the agent can use a driver that was updated
in the meantime. Mainly `partitioning.mig_partitioner` and the other modules of `deviceplugin.mig` call the driver.
`pods.lingering_processes` reads on which cards processes run.
"""

import ctypes
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml

from deviceplugin.mig import mig_nvml
from deviceplugin.mig.mig_nvml import NO_MIG, CardProfile, GpuInstance, Nvml
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, Profile

log = logging.getLogger(__name__)

_REFUSALS = {
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "NVML rejects the arguments",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the card does not support it",
    pynvml.NVML_ERROR_NO_PERMISSION: "the agent has no permission; it must run privileged",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "the card does not have enough free capacity",
    pynvml.NVML_ERROR_IN_USE: "it is in use",
}
"""Descriptions of the NVML errors that a retry alone cannot resolve. All other errors become RetryLater."""


class MigRefused(Exception):
    """NVML or the state of the card does not allow the call. A retry is useless until something else changes."""


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG instance that exists.

    Attributes:
        instance: The profile of the instance, and its place on the card.
        uuid: The UUID of the MIG device; "" if the instance is incomplete. Pods cannot use an incomplete instance,
            because no compute instance takes all of its GPU instance.
        busy: Whether processes run on the instance, or NVML does not list its processes.
    """

    instance: Instance
    uuid: str
    busy: bool


@dataclass(frozen=True, slots=True)
class MigCard:
    """A card, as NVML describes it.

    Attributes:
        capable: Whether the card supports MIG.
        current: Whether MIG mode is on.
        pending: Whether MIG mode will be on after the next reset.
        layout: The ways in which the card can be partitioned; None if the card does not support MIG.
        instances: The existing instances in ascending order, including those whose profile no pod can request, such as
            `1g.24gb+gfx`.
        busy: Whether processes run anywhere on the card, or NVML does not list its processes.
    """

    uuid: str
    capable: bool
    current: bool = False
    pending: bool = False
    layout: Layout | None = None
    instances: tuple[MigInstance, ...] = ()
    busy: bool = False


class MigDriver(Protocol):
    """Access to the MIG state of cards. It must be thread-safe.

    Every method may raise MigRefused, and RetryLater if a later call can succeed.
    """

    def read(self) -> tuple[MigCard, ...]:
        """Return the cards that answer, in NVML's order."""

    def create(self, uuid: str, instance: Instance) -> MigInstance:
        """Create an instance, or its compute instance if that is missing. A complete instance stays as it is."""

    def destroy(self, uuid: str, instance: Instance) -> None:
        """Destroy an instance, complete or not. Do nothing if it does not exist."""

    def set_mode(self, uuid: str, *, on: bool) -> str | None:
        """Switch the MIG mode. Return why the new mode is not in force yet, or None if it is."""


def existing_instances(card: MigCard) -> frozenset[Instance]:
    """Return all MIG instances of the card, including incomplete ones."""
    return frozenset(one.instance for one in card.instances)


def usable_instances(card: MigCard) -> frozenset[Instance]:
    """Return the complete MIG instances of the card, which pods can use."""
    return frozenset(one.instance for one in card.instances if one.uuid)


class NvmlMig:
    """The driver of real cards. The playground's simulated cards use it too, with a simulated `nvml`."""

    def __init__(self, nvml: Nvml = pynvml) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()

    def read(self) -> tuple[MigCard, ...]:
        with self._session("reading the cards"):
            cards = (self._card(position) for position in range(self._nvml.nvmlDeviceGetCount()))
            return tuple(card for card in cards if card)

    def create(self, uuid: str, instance: Instance) -> MigInstance:
        with self._session(f"creating {instance} on {uuid}"):
            card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            profiles = mig_nvml.list_profiles(self._nvml, card)
            if instance.profile not in profiles:
                raise MigRefused(f"{uuid} has no profile {instance.profile}; it has {', '.join(profiles)}")
            gpu_instance = self._find(card, profiles, instance)
            if gpu_instance and not gpu_instance.complete:
                self._complete(gpu_instance.handle, profiles[instance.profile].profile)
            id_ = gpu_instance.id if gpu_instance else self._create(card, profiles[instance.profile], instance)
            return MigInstance(instance, *self._device(mig_nvml.list_devices(self._nvml, card).get(id_, [])))

    def destroy(self, uuid: str, instance: Instance) -> None:
        with self._session(f"destroying {instance} on {uuid}"):
            card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            if gpu_instance := self._find(card, mig_nvml.list_profiles(self._nvml, card), instance):
                mig_nvml.destroy_computes(self._nvml, gpu_instance.handle)
                self._nvml.nvmlGpuInstanceDestroy(gpu_instance.handle)

    def set_mode(self, uuid: str, *, on: bool) -> str | None:
        with self._session(f"switching the MIG mode of {uuid} {'on' if on else 'off'}"):
            mode = pynvml.NVML_DEVICE_MIG_ENABLE if on else pynvml.NVML_DEVICE_MIG_DISABLE
            status = self._nvml.nvmlDeviceSetMigMode(self._nvml.nvmlDeviceGetHandleByUUID(uuid), mode)
            # The call may have reset the card, so the earlier handle of the card may be invalid.
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._nvml.nvmlDeviceGetHandleByUUID(uuid))
        if current == mode:
            return None
        reason = {
            pynvml.NVML_ERROR_IN_USE: "the card is in use",
            pynvml.NVML_ERROR_RESET_REQUIRED: "the card must be reset, or the node rebooted",
            pynvml.NVML_SUCCESS: "the card must be reset, or the node rebooted",
        }.get(status, f"NVML error {status}")
        return f"the MIG mode of {uuid} is not {'on' if on else 'off'} yet: {reason}"

    @contextmanager
    def _session(self, action: str) -> Iterator[None]:
        """Initialize NVML for one call. Raise its errors as MigRefused or RetryLater."""
        with self._lock:
            try:
                self._nvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise RetryLater(f"NVML: {error}") from error
            try:
                yield
            except pynvml.NVMLError as error:
                if error.value in _REFUSALS:
                    raise MigRefused(f"{action}: {_REFUSALS[error.value]}") from error
                raise RetryLater(f"{action}: NVML: {error}") from error
            finally:
                try:
                    self._nvml.nvmlShutdown()
                except pynvml.NVMLError as error:
                    log.warning("NVML did not shut down: %s", error)

    def _card(self, position: int) -> MigCard | None:
        """Return the card, or None if it does not answer.

        Raises NVMLError if the agent lacks the permission, because this error concerns all cards.
        """
        try:
            card = self._nvml.nvmlDeviceGetHandleByIndex(position)
            uuid = self._nvml.nvmlDeviceGetUUID(card)
            try:
                current, pending = self._nvml.nvmlDeviceGetMigMode(card)
            except pynvml.NVMLError as error:
                if error.value not in NO_MIG:
                    raise
                return MigCard(uuid, capable=False, busy=self._busy(card))
            profiles = mig_nvml.list_profiles(self._nvml, card)
            on = current == pynvml.NVML_DEVICE_MIG_ENABLE
            return MigCard(
                uuid,
                capable=True,
                current=on,
                pending=pending == pynvml.NVML_DEVICE_MIG_ENABLE,
                layout=mig_nvml.make_layout(uuid, profiles),
                instances=self._instances(card, profiles) if on else (),
                busy=self._busy(card),
            )
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                raise
            log.warning("card %d does not answer queries about MIG: %s", position, error)
            return None

    def _instances(self, card: Any, profiles: Mapping[str, CardProfile]) -> tuple[MigInstance, ...]:
        devices, instances = mig_nvml.list_devices(self._nvml, card), []
        for gpu_instance in mig_nvml.list_gpu_instances(self._nvml, card, profiles):
            uuid, busy = self._device(devices.get(gpu_instance.id, []))
            instances.append(MigInstance(gpu_instance.instance, uuid if gpu_instance.complete else "", busy))
        return tuple(sorted(instances, key=lambda one: one.instance))

    def _find(self, card: Any, profiles: Mapping[str, CardProfile], instance: Instance) -> GpuInstance | None:
        listed = mig_nvml.list_gpu_instances(self._nvml, card, profiles)
        return next((one for one in listed if one.instance == instance), None)

    def _create(self, card: Any, profile: CardProfile, instance: Instance) -> int:
        """Create a complete instance, and return the id of its GPU instance."""
        place = pynvml.c_nvmlGpuInstancePlacement_t(instance.start, profile.profile.size)
        gpu = self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(card, profile.id, ctypes.byref(place))
        try:
            self._complete(gpu, profile.profile)
            return int(self._nvml.nvmlGpuInstanceGetInfo(gpu).id)
        except (pynvml.NVMLError, MigRefused):
            try:
                mig_nvml.destroy_computes(self._nvml, gpu)
                self._nvml.nvmlGpuInstanceDestroy(gpu)
            except pynvml.NVMLError as error:
                log.warning("%s stays incomplete: %s", instance, error)
            raise

    def _complete(self, gpu: Any, profile: Profile) -> None:
        """Create the compute instance that takes all of a GPU instance. Destroy its other compute instances first."""
        mig_nvml.destroy_computes(self._nvml, gpu)
        whole = mig_nvml.find_whole_profile(self._nvml, gpu, profile)
        if whole is None:
            raise MigRefused(f"no compute instance takes all of {profile.name}")
        self._nvml.nvmlGpuInstanceCreateComputeInstance(gpu, whole.id)

    def _device(self, devices: list[Any]) -> tuple[str, bool]:
        """Return the UUID of the first device ("" if there is none), and whether processes run on any of them."""
        uuid = self._nvml.nvmlDeviceGetUUID(devices[0]) if devices else ""
        return uuid, any(self._busy(device) for device in devices)

    def _busy(self, device: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetComputeRunningProcesses(device))
        except pynvml.NVMLError as error:
            log.warning("NVML does not list the processes of a card: %s", error)
            return True
