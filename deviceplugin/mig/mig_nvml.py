"""Lists the MIG profiles and instances of a card through NVML, and destroys compute instances.

Every function with the argument `nvml` may raise pynvml.NVMLError.

A GPU instance has a part of the card's memory and compute. Its compute instances divide its compute, and NVML lists
each of them as a MIG device. NVML identifies profiles in two ways: a *kind* (NVML_GPU_INSTANCE_PROFILE_…) selects a
profile in queries, and an *id* is used to create and list instances of the profile. `mig.mig_driver` calls these
functions.
"""

# ruff: noqa: N802 (the names are the pynvml module's)

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import pynvml

from mgpu.model.mig import Instance, Layout, Profile, layout_of

_SUFFIXES = {7: "+me", 8: "+me", 10: "+gfx", 11: "+gfx", 12: "+gfx", 13: "-me", 14: "-me", 15: "+me.all", 16: "+me.all"}
_SUFFIXES[17] = "+gfx"
"""The suffixes of profile names, by the kind of the profile. The other kinds have no suffix."""
_LAST = 17
"""The last kind of GPU instance profiles in nvml.h. It is a number here because pynvml does not name all kinds."""

KINDS = range(_LAST + 1)
"""The kinds of GPU instance profiles."""
COMPUTE_KINDS = range(9)
"""The kinds of compute instance profiles."""
NO_MIG = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
"""The errors of a query for the MIG mode: the card does not support MIG, or the driver is older than MIG."""
_EIGHTHS = 8
_NO_PROFILE = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_SHARED_ENGINES = 0


class Nvml(Protocol):
    """The functions of the `pynvml` module that MIG needs. Each may raise pynvml.NVMLError.

    `placement` and `count` are `ctypes.byref` references. `placements` and `instances` are arrays that NVML fills; if
    they are None, NVML only sets the count.
    """

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]: ...
    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int: ...
    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int) -> Any: ...
    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Any, profile_id: int, placements: Any, count: Any
    ) -> int: ...
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profile_id: int, placement: Any) -> Any: ...
    def nvmlDeviceGetGpuInstances(self, device: Any, profile_id: int, instances: Any, count: Any) -> int: ...
    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any: ...
    def nvmlGpuInstanceDestroy(self, instance: Any) -> int: ...
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Any, profile: int, engines: int, version: int
    ) -> Any: ...
    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, instances: Any, count: Any) -> int: ...
    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any: ...
    def nvmlComputeInstanceDestroy(self, instance: Any) -> int: ...


def profile_name(kind: int, slices: int, megabytes: int, total: int) -> str:
    """Return NVIDIA's name of a profile, such as `1g.10gb+me`.

    The number before `gb` is computed in three steps. The memory of the profile is rounded up to eighths of the card's
    memory. The card's memory is rounded up to whole GiB. The number is that many eighths of these GiB, rounded half up.
    `nvidia-smi` prints these names, and NVIDIA's device plugin uses them in the names of its resources.

    Args:
        kind: The kind of the profile, which determines the suffix.
        slices: The number of compute slices.
        megabytes: The memory of the profile in MiB.
        total: The memory of the card in bytes.
    """
    eighths = -(-(megabytes << 20) * _EIGHTHS // total)
    gigabytes = (2 * eighths * -(-total >> 30) + _EIGHTHS) // (2 * _EIGHTHS)
    return f"{slices}g.{gigabytes}gb{_SUFFIXES.get(kind, '')}"


class CardProfile(NamedTuple):
    """A profile of a card, and the id with which NVML creates instances of the profile."""

    id: int
    profile: Profile


class GpuInstance(NamedTuple):
    """A GPU instance. A pod can use it only if it is `complete`: a single compute instance takes all of it."""

    id: int
    handle: Any
    instance: Instance
    complete: bool


def list_profiles(nvml: Nvml, card: Any) -> dict[str, CardProfile]:
    """Return the card's profiles by name, without profiles that have no place on the card.

    The query has version 1, because NVML answers this version whether or not the card is in MIG mode.
    """
    total = int(nvml.nvmlDeviceGetMemoryInfo(card).total)
    built_in = layout_of(nvml.nvmlDeviceGetName(card), total)
    card_profiles = {}
    for kind in KINDS:
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(card, kind, version=1)
        except pynvml.NVMLError as error:
            if error.value not in _NO_PROFILE:
                raise
            continue
        get = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
        places = _list(pynvml.c_nvmlGpuInstancePlacement_t, get, card, info.id)
        if places:
            name = profile_name(kind, info.sliceCount, info.memorySizeMB, total)
            starts = tuple(sorted(place.start for place in places))
            profile = Profile(name, info.sliceCount, places[0].size, starts, info.instanceCount)
            profile = replace(profile, name=_requestable_name(profile, built_in))
            card_profiles[profile.name] = CardProfile(info.id, profile)
    return card_profiles


def make_layout(name: str, card_profiles: Mapping[str, CardProfile]) -> Layout:
    """Return the layout of a card with these profiles."""
    listed = tuple(one.profile for one in card_profiles.values())
    slices = max((start + p.size for p in listed for start in p.starts), default=0)
    return Layout(name, slices, max((p.compute for p in listed), default=0), listed)


def list_gpu_instances(nvml: Nvml, card: Any, card_profiles: Mapping[str, CardProfile]) -> Iterator[GpuInstance]:
    """Yield the GPU instances of a card in MIG mode."""
    for name, (id_, profile) in card_profiles.items():
        get = nvml.nvmlDeviceGetGpuInstances
        for handle in _list(pynvml.c_nvmlGpuInstance_t, get, card, id_, most=profile.most):
            info = nvml.nvmlGpuInstanceGetInfo(handle)
            whole = find_whole_profile(nvml, handle, profile)
            is_complete = whole is not None and bool(_computes(nvml, handle, whole))
            yield GpuInstance(info.id, handle, Instance(info.placement.start, name), is_complete)


def find_whole_profile(nvml: Nvml, gpu: Any, profile: Profile) -> Any:
    """Return NVML's profile of the compute instance that takes all of a GPU instance, or None if there is none."""
    return next((info for info in _compute_profiles(nvml, gpu) if info.sliceCount == profile.compute), None)


def destroy_computes(nvml: Nvml, gpu: Any) -> None:
    """Destroy all compute instances of a GPU instance. NVML refuses if processes run on them."""
    for info in _compute_profiles(nvml, gpu):
        for compute in _computes(nvml, gpu, info):
            nvml.nvmlComputeInstanceDestroy(compute)


def list_devices(nvml: Nvml, card: Any) -> dict[int, list[Any]]:
    """Return the handles of the MIG devices, by the id of their GPU instance."""
    handles: dict[int, list[Any]] = {}
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                raise
        else:
            handles.setdefault(nvml.nvmlDeviceGetGpuInstanceId(device), []).append(device)
    return handles


def _compute_profiles(nvml: Nvml, gpu: Any) -> Iterator[Any]:
    for kind in COMPUTE_KINDS:
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu, kind, _SHARED_ENGINES, version=1)
        except pynvml.NVMLError as error:
            if error.value not in _NO_PROFILE:
                raise
        else:
            yield info


def _computes(nvml: Nvml, gpu: Any, info: Any) -> list[Any]:
    get = nvml.nvmlGpuInstanceGetComputeInstances
    return _list(pynvml.c_nvmlComputeInstance_t, get, gpu, info.id, most=info.instanceCount)


def _list(kind: Any, get: Any, *arguments: Any, most: int | None = None) -> list[Any]:
    """Return the array that a listing function of NVML fills.

    Args:
        kind: The type of the elements.
        get: The function.
        arguments: The arguments of the function that precede the array and the count.
        most: The size of the array; None to get the size by a first call of the function.
    """
    count = ctypes.c_uint()
    if most is None:
        get(*arguments, None, ctypes.byref(count))
        most = count.value
    array = (kind * most)()
    get(*arguments, array, ctypes.byref(count))
    return list(array[: count.value])


def _requestable_name(profile: Profile, built_in: Layout | None) -> str:
    """Return the name by which pods request a profile of this shape.

    If the built-in layout has a profile with the same compute, size and suffix, the result is the name of that profile,
    because drivers may report slightly different amounts of memory, which change the number in the name. Otherwise the
    result is the profile's own name.
    """
    for p in built_in.profiles if built_in else ():
        if (p.compute, p.size, _attributes(p.name)) == (profile.compute, profile.size, _attributes(profile.name)):
            return p.name
    return profile.name


def _attributes(name: str) -> str:
    return name.partition("gb")[2]
