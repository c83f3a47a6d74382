"""Reads and changes the MIG mode and the MIG instances of a node's cards through NVML.

A MIG instance here is a GPU instance together with the one compute instance that takes all of it: what a pod is given.
`instance_changes` and `mode_manager` use the driver to change cards, the partitioners and `lingering_processes` to read
them. Every call starts and shuts down NVML, so that a new driver is noticed; NVML counts its users.
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
from deviceplugin.mig.mig_nvml import NO_MIG, Found, Known, Nvml
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
"""Errors that NVML would return again: the remedy is elsewhere. All others are tried again."""


class MigRefused(Exception):
    """NVML, or the state of the card, does not allow the change, and will not until something else has changed."""


@dataclass(frozen=True, slots=True)
class Made:
    """A MIG instance that exists.

    Attributes:
        uuid: of the MIG device; "" where the instance is half made: no compute instance takes all of it, so that no pod
            can use it.
        busy: whether processes run on it, or NVML does not say.
    """

    instance: Instance
    uuid: str
    busy: bool


@dataclass(frozen=True, slots=True)
class MigCard:
    """A card, as NVML describes it.

    Attributes:
        capable: whether the card has MIG.
        current: whether MIG mode is on.
        pending: whether MIG mode will be on after the next reset.
        layout: what the card can be cut into; None where it is not `capable`.
        instances: ascending. An administrator may have made instances that no pod can request (`1g.24gb+gfx`).
        busy: whether processes run anywhere on the card, or NVML does not say.
    """

    uuid: str
    capable: bool
    current: bool = False
    pending: bool = False
    layout: Layout | None = None
    instances: tuple[Made, ...] = ()
    busy: bool = False


class MigDriver(Protocol):
    """Thread-safe. Every call raises MigRefused with one sentence, and RetryLater where there is no answer."""

    def read(self) -> tuple[MigCard, ...]:
        """Return the cards that answer, in NVML's order."""

    def create(self, uuid: str, instance: Instance) -> Made:
        """Make an instance, or the missing part of it. A complete one stays as it is."""

    def destroy(self, uuid: str, instance: Instance) -> None:
        """Destroy an instance, or the part of it that exists."""

    def set_mode(self, uuid: str, *, on: bool) -> str | None:
        """Switch the MIG mode, and return why it is not in force yet; None: it is."""


def existing(card: MigCard) -> frozenset[Instance]:
    """Return all MIG instances of the card, also half made ones."""
    return frozenset(made.instance for made in card.instances)


def complete(card: MigCard) -> frozenset[Instance]:
    """Return the MIG instances of the card that pods can use."""
    return frozenset(made.instance for made in card.instances if made.uuid)


class NvmlMig:
    """The driver on real cards, and on simulated ones through another `nvml`."""

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
            known = mig_nvml.profiles(self._nvml, card)
            if instance.profile not in known:
                raise MigRefused(f"{uuid} has no profile {instance.profile}; it has {', '.join(known)}")
            made = self._find(card, known, instance)
            if made and not made.complete:
                self._complete(made.handle, known[instance.profile].profile)
            id_ = made.id if made else self._create(card, known[instance.profile], instance)
            return Made(instance, *self._device(mig_nvml.devices(self._nvml, card).get(id_, [])))

    def destroy(self, uuid: str, instance: Instance) -> None:
        with self._session(f"destroying {_named(instance)} on {uuid}"):
            card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            if made := self._find(card, mig_nvml.profiles(self._nvml, card), instance):
                mig_nvml.destroy_computes(self._nvml, made.handle)
                self._nvml.nvmlGpuInstanceDestroy(made.handle)

    def set_mode(self, uuid: str, *, on: bool) -> str | None:
        with self._session(f"switching the MIG mode of {uuid} {'on' if on else 'off'}"):
            mode = pynvml.NVML_DEVICE_MIG_ENABLE if on else pynvml.NVML_DEVICE_MIG_DISABLE
            status = self._nvml.nvmlDeviceSetMigMode(self._nvml.nvmlDeviceGetHandleByUUID(uuid), mode)
            # The call may have reset the card, and with it all handles.
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._nvml.nvmlDeviceGetHandleByUUID(uuid))
        if current == mode:
            return None
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
        """Return the card, or None where it does not answer. Missing permission is raised: it concerns all cards."""
        try:
            card = self._nvml.nvmlDeviceGetHandleByIndex(position)
            uuid = self._nvml.nvmlDeviceGetUUID(card)
            try:
                current, pending = self._nvml.nvmlDeviceGetMigMode(card)
            except pynvml.NVMLError as error:
                if error.value not in NO_MIG:
                    raise
                return MigCard(uuid, capable=False, busy=self._busy(card))
            known = mig_nvml.profiles(self._nvml, card)
            on = current == pynvml.NVML_DEVICE_MIG_ENABLE
            return MigCard(
                uuid,
                capable=True,
                current=on,
                pending=pending == pynvml.NVML_DEVICE_MIG_ENABLE,
                layout=mig_nvml.layout(uuid, known),
                instances=self._made(card, known) if on else (),
                busy=self._busy(card),
            )
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                raise
            log.warning("card %d does not answer about MIG: %s", position, error)
            return None

    def _made(self, card: Any, known: Mapping[str, Known]) -> tuple[Made, ...]:
        devices, made = mig_nvml.devices(self._nvml, card), []
        for found in mig_nvml.gpu_instances(self._nvml, card, known):
            uuid, busy = self._device(devices.get(found.id, []))
            made.append(Made(found.instance, uuid if found.complete else "", busy))
        return tuple(sorted(made, key=lambda one: one.instance))

    def _find(self, card: Any, known: Mapping[str, Known], instance: Instance) -> Found | None:
        return next((f for f in mig_nvml.gpu_instances(self._nvml, card, known) if f.instance == instance), None)

    def _create(self, card: Any, known: Known, instance: Instance) -> int:
        """Create a complete instance, and return its id."""
        place = pynvml.c_nvmlGpuInstancePlacement_t(instance.start, known.profile.size)
        gpu = self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(card, known.id, ctypes.byref(place))
        try:
            self._complete(gpu, known.profile)
            return int(self._nvml.nvmlGpuInstanceGetInfo(gpu).id)
        except (pynvml.NVMLError, MigRefused):
            try:
                mig_nvml.destroy_computes(self._nvml, gpu)
                self._nvml.nvmlGpuInstanceDestroy(gpu)
            except pynvml.NVMLError as error:
                log.warning("%s stays half made: %s", _named(instance), error)
            raise

    def _complete(self, gpu: Any, profile: Profile) -> None:
        """Let one compute instance take all of a GPU instance. Those that take a part of it are destroyed first."""
        mig_nvml.destroy_computes(self._nvml, gpu)
        whole = mig_nvml.whole_profile(self._nvml, gpu, profile)
        if whole is None:
            raise MigRefused(f"no compute instance takes all of {profile.name}")
        self._nvml.nvmlGpuInstanceCreateComputeInstance(gpu, whole.id)

    def _device(self, devices: list[Any]) -> tuple[str, bool]:
        """Return the UUID of an instance's MIG device, and whether it is busy. Without a device nothing can run."""
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
