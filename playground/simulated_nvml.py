"""Simulates the MIG functions of NVML for cards that do not exist, with the checks that nvml.h describes.

If the cards of a node agent are simulated, `deviceplugin.cards.simulated_cards` finds `SimulatedMig` by the entry point
group `mgpu.simulated_mig`, and `simulated_processes` by the group `mgpu.simulated_processes`. The functions have the
names and the arguments of `pynvml`, so that the agent's own code runs on them unchanged. When the agent calls another
function of `pynvml`, add that function here as well.
"""

# ruff: noqa: N802 (the names are the pynvml module's)

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pynvml

from deviceplugin.cards.simulated_cards import SimulatedCards
from deviceplugin.mig.mig_driver import MigCard, NvmlMig
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.mig import Instance, Layout, Profile, invalid_reason, layout_of
from playground.gpu_processes import on_device, proc_of_host
from playground.nvml_state import (
    Compute,
    Gpu,
    Mode,
    State,
    changing,
    clients,
    mig_uuid,
    processes,
    read_state,
    state_file,
)
from playground.simulated_library import fail
from playground.simulated_memory import SimulatedMemory

_KIND_IDS = {0: 19, 7: 20, 9: 15, 1: 14, 2: 9, 3: 5, 4: 0}
_KIND_IDS_A30 = {0: 14, 7: 21, 1: 5, 8: 6, 3: 0}
"""The id of each kind of GPU instance profile, as `nvidia-smi mig -lgip` prints it. The A30 has ids of its own.

A kind is the value of one of NVML's constants `NVML_GPU_INSTANCE_PROFILE_…`.
"""
_KINDS = {(1, 1): 0, (1, 2): 9, (2, 2): 1, (3, 4): 2, (4, 4): 3, (7, 8): 4}
_KINDS_MEDIA = {(1, 1): 7, (2, 2): 8}
"""The kind of a GPU instance profile by its numbers of compute slices and memory slices.

`_KINDS_MEDIA` is for profiles with media extensions (`+me`).
"""
_COMPUTE_SLICES = (1, 2, 3, 4, 7)
"""The compute slices of each kind of compute instance profile. The kinds are 0, 1 and so on, and are also the ids."""
_AMPERE = ("A30", "A100")


def forgetful(cards: Iterable[Card]) -> frozenset[str]:
    """Return the UUIDs of the cards that leave MIG mode at a reboot: Hopper and newer ones (MIG user guide)."""
    layouts = ((card.uuid, layout_of(card.model, card.memory)) for card in cards)
    return frozenset(uuid for uuid, layout in layouts if layout and not layout.name.startswith(_AMPERE))


class SimulatedNvml(SimulatedMemory):
    """The NVML library of one process. The cards' state is in a file, so it survives a restart of the agent.

    `simulated_library` and `simulated_memory` have the functions that do not concern MIG.
    """

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        key = self._key(handle, "card", "mig")
        return self._card(handle).uuid if key[0] == "card" else self._mig(handle)[1].uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        """Return the processes on a MIG device. For a card, return those on the card and on all of its instances."""
        if self._key(handle, "card", "mig")[0] == "mig":
            return self._described(on_device(self._file, self._mig(handle)[1].uuid))
        return super().nvmlDeviceGetComputeRunningProcesses(handle)

    # MIG mode.

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        self._layout(device)
        mode = self._mode(device)
        return [int(mode.current), int(mode.pending)]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        """Set the pending mode and, if that is possible at once, the current mode. Return the activation status.

        While instances exist or processes run on the card, the current mode cannot change. If the machine cannot reset
        its cards (`State.passthrough`), the current mode of an A30 or A100 does not change either.
        """
        self._privileged()
        layout = self._layout(device)
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        with changing(self._file) as state:
            card = self._mode_in(state, device)
            card.pending = mode == pynvml.NVML_DEVICE_MIG_ENABLE
            if card.pending == card.current:
                return int(pynvml.NVML_SUCCESS)
            if card.instances or processes(self._file, self._card(device).uuid, card):
                return int(pynvml.NVML_ERROR_IN_USE)
            if state.passthrough and layout.name.startswith(_AMPERE):
                return int(pynvml.NVML_ERROR_RESET_REQUIRED)
            card.current = card.pending
        return int(pynvml.NVML_SUCCESS)

    # GPU instances.

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        """Return the profile whose kind is `profile`. Version 2 fails if the card is not in MIG mode (nvml.h)."""
        layout = self._layout(device)
        if not 0 <= profile < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = next((p for p in layout.profiles if _kind(p) == profile), None)
        if found is None or (version != 1 and not self._mode(device).current):
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlGpuInstanceProfileInfo_t() if version == 1 else pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.instanceCount = _id(layout, found), found.compute, found.most
        # The driver reserves a small part of the memory of an instance.
        info.memorySizeMB = (self._card(device).memory >> 20) * found.size * 63 // (layout.slices * 64)
        if version != 1:
            info.name = f"MIG {found.name}".encode()
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Any, profile_id: int, placements: Any, count: Any
    ) -> int:
        """Write the possible placements of a profile into `placements`, even if the card is not in MIG mode."""
        self._privileged()
        profile = self._profile(device, profile_id)
        found = [pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size) for start in profile.starts]
        return _fill(found, placements, count)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profile_id: int, placement: Any) -> Any:
        self._privileged()
        layout = self._layout(device)
        with changing(self._file) as state:
            mode = self._on(device, self._mode_in(state, device))
            profile, place = self._profile(device, profile_id), _target(placement)
            if not isinstance(place, pynvml.c_nvmlGpuInstancePlacement_t):
                raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            if place.start not in profile.starts or place.size != profile.size:
                raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            there = [Instance(gpu.start, gpu.profile) for gpu in mode.instances]
            if invalid_reason(layout, [*there, Instance(place.start, profile.name)]):
                raise fail(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            used = {gpu.id for gpu in mode.instances}
            made = Gpu(
                next(i for i in range(1, 1 + len(used) + 1) if i not in used),
                state.next_serial(),
                profile.name,
                int(place.start),
            )
            mode.instances.append(made)
        return self._handle(pynvml.c_nvmlGpuInstance_t, "gpu", self._card(device).uuid, str(made.serial))

    def nvmlDeviceGetGpuInstances(self, device: Any, profile_id: int, instances: Any, count: Any) -> int:
        self._privileged()
        mode = self._on(device, self._mode(device))
        name, card = self._profile(device, profile_id).name, self._card(device).uuid
        found = [
            self._handle(pynvml.c_nvmlGpuInstance_t, "gpu", card, str(gpu.serial))
            for gpu in mode.instances
            if gpu.profile == name
        ]
        return _fill(found, instances, count)

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        card, gpu = self._gpu(instance)
        layout, info = self._layout(card), pynvml.c_nvmlGpuInstanceInfo_t()
        profile = _named(layout, gpu.profile)
        info.device, info.id, info.profileId = card, gpu.id, _id(layout, profile)
        info.placement = pynvml.c_nvmlGpuInstancePlacement_t(gpu.start, profile.size)
        return info

    def nvmlGpuInstanceDestroy(self, instance: Any) -> int:
        self._privileged()
        card, found = self._gpu(instance)
        with changing(self._file) as state:
            mode = self._mode_in(state, card)
            if found.compute:
                raise fail(pynvml.NVML_ERROR_IN_USE)
            mode.instances = [gpu for gpu in mode.instances if gpu.serial != found.serial]
        return int(pynvml.NVML_SUCCESS)

    # Compute instances, each of which is a MIG device.

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Any, profile: int, engines: int, version: int = 2
    ) -> Any:
        card, gpu = self._gpu(device)
        slices = _named(self._layout(card), gpu.profile).compute
        if not 0 <= profile < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT or engines != 0:
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if profile >= len(_COMPUTE_SLICES) or _COMPUTE_SLICES[profile] > slices:
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        of_version = {1: pynvml.c_nvmlComputeInstanceProfileInfo_t, 2: pynvml.c_nvmlComputeInstanceProfileInfo_v2_t}
        info = of_version[version]()
        info.id, info.sliceCount = profile, _COMPUTE_SLICES[profile]
        info.instanceCount = slices // _COMPUTE_SLICES[profile]
        return info

    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, instances: Any, count: Any) -> int:
        self._privileged()
        self.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, profile_id, 0)
        key, gpu = self._key(instance, "gpu"), self._gpu(instance)[1]
        found = [
            self._handle(pynvml.c_nvmlComputeInstance_t, "compute", *key[1:], compute.uuid)
            for compute in gpu.compute
            if compute.kind == profile_id
        ]
        return _fill(found, instances, count)

    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any:
        self._privileged()
        wanted = self.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, profile_id, 0).sliceCount
        key, (card, found) = self._key(instance, "gpu"), self._gpu(instance)
        with changing(self._file) as state:
            gpu = next(gpu for gpu in self._mode_in(state, card).instances if gpu.serial == found.serial)
            taken = sum(_COMPUTE_SLICES[compute.kind] for compute in gpu.compute)
            if taken + wanted > _named(self._layout(card), gpu.profile).compute:
                raise fail(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            used = {compute.id for compute in gpu.compute}
            id_ = next(i for i in range(len(used) + 1) if i not in used)
            made = Compute(id_, profile_id, mig_uuid(key[1], gpu.serial, state.next_serial()))
            gpu.compute.append(made)
        return self._handle(pynvml.c_nvmlComputeInstance_t, "compute", *key[1:], made.uuid)

    def nvmlComputeInstanceDestroy(self, instance: Any) -> int:
        self._privileged()
        _, card, serial, uuid = self._key(instance, "compute")
        with changing(self._file) as state:
            instances = state.cards.get(card, Mode()).instances
            gpu = next((gpu for gpu in instances if str(gpu.serial) == serial), None)
            if gpu is None or all(compute.uuid != uuid for compute in gpu.compute):
                raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            if clients(self._file, uuid):
                raise fail(pynvml.NVML_ERROR_IN_USE)
            gpu.compute = [compute for compute in gpu.compute if compute.uuid != uuid]
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        """Return the largest number of MIG devices, or 0 if the card is not in MIG mode or does not support MIG."""
        card = self._card(device)
        layout = layout_of(card.model, card.memory)
        return layout.compute if layout and self._mode(device).current else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        mode = self._on(device, self._mode(device))
        if not 0 <= index < self.nvmlDeviceGetMaxMigDeviceCount(device):
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        devices = [(str(gpu.serial), compute.uuid) for gpu in mode.instances for compute in gpu.compute]
        if index >= len(devices):
            raise fail(pynvml.NVML_ERROR_NOT_FOUND)
        return self._handle(pynvml.c_nvmlDevice_t, "mig", self._card(device).uuid, *devices[index])

    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        return self._mig(device)[0].id

    # What handles stand for.

    def _layout(self, handle: Any) -> Layout:
        card = self._card(handle)
        layout = layout_of(card.model, card.memory)
        if layout is None:
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return layout

    def _profile(self, handle: Any, id_: int) -> Profile:
        layout = self._layout(handle)
        found = next((p for p in layout.profiles if _id(layout, p) == id_), None)
        if found is None:
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def _mode_in(self, state: State, handle: Any) -> Mode:
        """Return the mode of a card in `state`. The caller may change it, because `changing` writes the state."""
        return state.cards.setdefault(self._card(handle).uuid, Mode())

    def _on(self, handle: Any, mode: Mode) -> Mode:
        """Return `mode` if the card is in MIG mode. Raises NOT_SUPPORTED for any other card."""
        self._layout(handle)
        if not mode.current:
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return mode

    def _gpu(self, handle: Any) -> tuple[Any, Gpu]:
        """Return the handle of the card of a GPU instance, and the instance."""
        _, card, serial = self._key(handle, "gpu")
        mode = read_state(self._file).cards.get(card, Mode())
        found = next((gpu for gpu in mode.instances if str(gpu.serial) == serial), None)
        if found is None:
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.nvmlDeviceGetHandleByUUID(card), found

    def _mig(self, handle: Any) -> tuple[Gpu, Compute]:
        """Return the GPU instance and the compute instance of a MIG device."""
        _, card, serial, uuid = self._key(handle, "mig")
        for gpu in read_state(self._file).cards.get(card, Mode()).instances:
            for compute in gpu.compute:
                if (str(gpu.serial), compute.uuid) == (serial, uuid):
                    return gpu, compute
        raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)


class SimulatedMig(NvmlMig):
    """The MIG driver of simulated cards.

    Args:
        cards: The file that lists the cards. It is read again when it has changed. The state file is next to it.
        node: The name of the node.
    """

    def __init__(self, cards: Path, node: str) -> None:
        self._source = SimulatedCards(cards, node)
        self._simulated = SimulatedNvml(state_file(cards), ())
        super().__init__(self._simulated)

    def read(self) -> tuple[MigCard, ...]:
        try:
            self._simulated.cards = self._source.read()
        except BadObject as error:
            raise RetryLater(str(error)) from error
        return super().read()


class NvmlOfFile(SimulatedNvml):
    """A simulated NVML that finds the cards in the file when it is started."""

    def __init__(self, cards: Path, node: str) -> None:
        super().__init__(state_file(cards), ())
        self._source = SimulatedCards(cards, node)

    def nvmlInit(self) -> None:
        try:
            self.cards = self._source.read()
        except BadObject as error:
            raise fail(pynvml.NVML_ERROR_UNKNOWN) from error
        super().nvmlInit()


def simulated_processes(cards: Path, node: str) -> tuple[SimulatedNvml, Path]:
    """Return an NVML for the processes on the cards that the file lists, and their /proc."""
    return NvmlOfFile(cards, node), proc_of_host(state_file(cards))


def _kind(profile: Profile) -> int | None:
    return (_KINDS_MEDIA if profile.media else _KINDS).get((profile.compute, profile.size))


def _id(layout: Layout, profile: Profile) -> int:
    ids = _KIND_IDS_A30 if layout.name.startswith("A30") else _KIND_IDS
    return ids[_kind(profile) or 0]


def _named(layout: Layout, name: str) -> Profile:
    """Return the profile of this name.

    Raises UNKNOWN if the layout has no such profile. That happens if a card of another model has replaced the card.
    """
    found = layout.profile(name)
    if found is None:
        raise fail(pynvml.NVML_ERROR_UNKNOWN)
    return found


def _target(reference: Any) -> Any:
    """Return the target of a `ctypes.byref`, or None for any other value, for which NVML would read invalid memory.

    The target is in the attribute `_obj`, which ctypes does not document.
    """
    return getattr(reference, "_obj", None)


def _fill(found: Sequence[Any], array: Any, count: Any) -> int:
    """Write the items of `found` into `array` and their number into `count`, as a C function does. Return NVML_SUCCESS.

    If `array` is None, only the count is written.
    """
    counted = _target(count)
    if not isinstance(counted, ctypes.c_uint):
        raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if array is not None and len(array) < len(found):
        raise fail(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    counted.value = len(found)
    if array is not None:
        for i, one in enumerate(found):
            array[i] = one
    return int(pynvml.NVML_SUCCESS)
