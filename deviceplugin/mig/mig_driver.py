"""The MIG mode and the instances of a node's cards, read and changed through NVML.

An instance here is a GPU instance together with the one compute instance that takes it whole: what a pod is given.
"""

import ctypes
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml

from deviceplugin.mig import instances
from deviceplugin.mig.instances import Found, Known
from deviceplugin.mig.mig_nvml import NO_MIG, Nvml
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, Profile

log = logging.getLogger(__name__)

_WHY = {
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "NVML does not take it",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the card does not support it",
    pynvml.NVML_ERROR_NO_PERMISSION: "the agent may not: it must run privileged",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "there is no room for it",
    pynvml.NVML_ERROR_IN_USE: "it is in use",
}
"""What NVML would say again."""


class MigRefused(Exception):
    """NVML, or the card as it is, does not allow it, and will not until something else has changed."""


@dataclass(frozen=True, slots=True)
class Made:
    """uuid: of the MIG device, "" where it is half made (no compute instance takes it whole) and nobody can use it.

    busy: whether processes run on it, or NVML does not say.
    """

    instance: Instance
    uuid: str
    busy: bool


@dataclass(frozen=True, slots=True)
class MigCard:
    """current, pending: whether MIG mode is on, and will be after the next reset. busy: as of `Made`, anywhere on it.

    layout: what it can be cut into, as NVML says; None where it cannot be (not `capable`). instances: ascending; their
    profiles may be of kinds that nobody can ask for (`1g.24gb+gfx`), made by others.
    """

    uuid: str
    capable: bool
    current: bool = False
    pending: bool = False
    layout: Layout | None = None
    instances: tuple[Made, ...] = ()
    busy: bool = False


class MigDriver(Protocol):
    """Every call raises MigRefused with one sentence, and RetryLater where there is no answer."""

    def read(self) -> tuple[MigCard, ...]:
        """The cards that answer, in NVML's order."""

    def create(self, uuid: str, instance: Instance) -> Made:
        """Make an instance, or the missing part of it; one that is made stays as it is."""

    def destroy(self, uuid: str, instance: Instance) -> None:
        """Destroy an instance, or what there is of it."""

    def set_mode(self, uuid: str, *, on: bool) -> str:
        """Why the mode is not in force yet, "" where it is."""


class NvmlMig:
    """Starts and shuts NVML down in every call (it counts): elsewhere a restart must be one. From any thread."""

    def __init__(self, nvml: Nvml = pynvml) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()

    def read(self) -> tuple[MigCard, ...]:
        with self._session("reading the cards"):
            found = (self._card(position) for position in range(self._nvml.nvmlDeviceGetCount()))
            return tuple(card for card in found if card)

    def create(self, uuid: str, instance: Instance) -> Made:
        with self._session(f"making {_named(instance)} on {uuid}"):
            card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            known = instances.profiles(self._nvml, card)
            if instance.profile not in known:
                raise MigRefused(f"{uuid} has no profile {instance.profile}; it has {', '.join(known)}")
            made = self._find(card, known, instance)
            if made and not made.whole:
                self._complete(made.handle, known[instance.profile].profile)
            id_ = made.id if made else self._create(card, known[instance.profile], instance)
            return Made(instance, *self._device(instances.devices(self._nvml, card).get(id_, [])))

    def destroy(self, uuid: str, instance: Instance) -> None:
        with self._session(f"destroying {_named(instance)} on {uuid}"):
            card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            if made := self._find(card, instances.profiles(self._nvml, card), instance):
                instances.destroy_computes(self._nvml, made.handle)
                self._nvml.nvmlGpuInstanceDestroy(made.handle)

    def set_mode(self, uuid: str, *, on: bool) -> str:
        with self._session(f"switching the MIG mode of {uuid} {'on' if on else 'off'}"):
            mode = pynvml.NVML_DEVICE_MIG_ENABLE if on else pynvml.NVML_DEVICE_MIG_DISABLE
            status = self._nvml.nvmlDeviceSetMigMode(self._nvml.nvmlDeviceGetHandleByUUID(uuid), mode)
            # It may have reset the card: what was known of it, its handle too, may be no more.
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._nvml.nvmlDeviceGetHandleByUUID(uuid))
        if current == mode:
            return ""
        why = {
            pynvml.NVML_ERROR_IN_USE: "something uses the card",
            pynvml.NVML_ERROR_RESET_REQUIRED: "the card must be reset, or the node rebooted",
            pynvml.NVML_SUCCESS: "the card must be reset, or the node rebooted",
        }.get(status, f"NVML error {status}")
        return f"the MIG mode of {uuid} is not {'on' if on else 'off'} yet: {why}"

    @contextmanager
    def _session(self, doing: str) -> Iterator[None]:
        with self._lock:
            yield from self._started(doing)

    def _started(self, doing: str) -> Iterator[None]:
        try:
            self._nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise RetryLater(f"NVML: {error}") from error
        try:
            yield
        except pynvml.NVMLError as error:
            if error.value in _WHY:
                raise MigRefused(f"{doing}: {_WHY[error.value]}") from error
            raise RetryLater(f"{doing}: NVML: {error}") from error
        finally:
            try:
                self._nvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.warning("NVML did not shut down: %s", error)

    def _card(self, position: int) -> MigCard | None:
        """None where it does not answer. Without permission nothing is known of any card: that is raised."""
        try:
            card = self._nvml.nvmlDeviceGetHandleByIndex(position)
            uuid = self._nvml.nvmlDeviceGetUUID(card)
            try:
                current, pending = self._nvml.nvmlDeviceGetMigMode(card)
            except pynvml.NVMLError as error:
                if error.value not in NO_MIG:
                    raise
                return MigCard(uuid, capable=False, busy=self._busy(card))
            known = instances.profiles(self._nvml, card)
            on = current == pynvml.NVML_DEVICE_MIG_ENABLE
            return MigCard(
                uuid,
                capable=True,
                current=on,
                pending=pending == pynvml.NVML_DEVICE_MIG_ENABLE,
                layout=instances.layout(uuid, known),
                instances=self._made(card, known) if on else (),
                busy=self._busy(card),
            )
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                raise
            log.warning("card %d does not answer about MIG: %s", position, error)
            return None

    def _made(self, card: Any, known: Mapping[str, Known]) -> tuple[Made, ...]:
        devices, made = instances.devices(self._nvml, card), []
        for found in instances.gpu_instances(self._nvml, card, known):
            uuid, busy = self._device(devices.get(found.id, []))
            made.append(Made(found.instance, uuid if found.whole else "", busy))
        return tuple(sorted(made, key=lambda one: one.instance))

    def _find(self, card: Any, known: Mapping[str, Known], instance: Instance) -> Found | None:
        return next((f for f in instances.gpu_instances(self._nvml, card, known) if f.instance == instance), None)

    def _create(self, card: Any, known: Known, instance: Instance) -> int:
        """The new GPU instance's id."""
        place = pynvml.c_nvmlGpuInstancePlacement_t(instance.start, known.profile.size)
        gpu = self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(card, known.id, ctypes.byref(place))
        try:
            self._complete(gpu, known.profile)
            return int(self._nvml.nvmlGpuInstanceGetInfo(gpu).id)
        except (pynvml.NVMLError, MigRefused):
            try:
                instances.destroy_computes(self._nvml, gpu)
                self._nvml.nvmlGpuInstanceDestroy(gpu)
            except pynvml.NVMLError as error:
                log.warning("%s stays half made: %s", _named(instance), error)
            raise

    def _complete(self, gpu: Any, profile: Profile) -> None:
        """Compute instances that take a part of it are in the way."""
        instances.destroy_computes(self._nvml, gpu)
        whole = instances.whole_profile(self._nvml, gpu, profile)
        if whole is None:
            raise MigRefused(f"no compute instance takes all of {profile.name}")
        self._nvml.nvmlGpuInstanceCreateComputeInstance(gpu, whole.id)

    def _device(self, devices: list[Any]) -> tuple[str, bool]:
        """UUID and whether it is busy; without a device nothing can run."""
        uuid = self._nvml.nvmlDeviceGetUUID(devices[0]) if devices else ""
        return uuid, any(self._busy(device) for device in devices)

    def _busy(self, device: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetComputeRunningProcesses(device))
        except pynvml.NVMLError as error:
            log.warning("NVML does not say which processes run: %s", error)
            return True


def _named(instance: Instance) -> str:
    return f"{instance.profile} at {instance.start}"
