"""What there is on a card in MIG mode, listed through NVML. Every function may raise pynvml.NVMLError.

A GPU instance has its part of the card's memory and compute; compute instances divide its compute. Each of these is
what NVML calls a MIG device.
"""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pynvml

from deviceplugin.mig.mig_nvml import COMPUTE_KINDS, KINDS, Nvml, profile_name
from mgpu.model.mig import Instance, Layout, Profile, layout_of

_NO_PROFILE = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_SHARED_ENGINES = 0


class Known(NamedTuple):
    """A profile, and the id by which NVML creates it."""

    id: int
    profile: Profile


class Found(NamedTuple):
    """A GPU instance. whole: whether one compute instance takes all of it."""

    id: int
    handle: Any
    instance: Instance
    whole: bool


def profiles(nvml: Nvml, card: Any) -> dict[str, Known]:
    """By name, whether the card is in MIG mode or not: version 1 of the answer is given in either."""
    total = int(nvml.nvmlDeviceGetMemoryInfo(card).total)
    built_in = layout_of(nvml.nvmlDeviceGetName(card), total)
    found = {}
    for kind in KINDS:
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(card, kind, version=1)
        except pynvml.NVMLError as error:
            if error.value not in _NO_PROFILE:
                raise
            continue
        get = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
        places = _filled(pynvml.c_nvmlGpuInstancePlacement_t, get, card, info.id)
        if places:
            name = profile_name(kind, info.sliceCount, info.memorySizeMB, total)
            starts = tuple(sorted(place.start for place in places))
            profile = Profile(name, info.sliceCount, places[0].size, starts, info.instanceCount)
            profile = replace(profile, name=_known_name(profile, built_in))
            found[profile.name] = Known(info.id, profile)
    return found


def layout(name: str, known: Mapping[str, Known]) -> Layout:
    """What such profiles make of a card."""
    listed = tuple(one.profile for one in known.values())
    slices = max((start + p.size for p in listed for start in p.starts), default=0)
    return Layout(name, slices, max((p.compute for p in listed), default=0), listed)


def gpu_instances(nvml: Nvml, card: Any, known: Mapping[str, Known]) -> Iterator[Found]:
    for name, (id_, profile) in known.items():
        get = nvml.nvmlDeviceGetGpuInstances
        for handle in _filled(pynvml.c_nvmlGpuInstance_t, get, card, id_, most=profile.most):
            info = nvml.nvmlGpuInstanceGetInfo(handle)
            whole = whole_profile(nvml, handle, profile)
            made = whole is not None and bool(_computes(nvml, handle, whole))
            yield Found(info.id, handle, Instance(info.placement.start, name), made)


def whole_profile(nvml: Nvml, gpu: Any, profile: Profile) -> Any:
    """The profile of the compute instance that takes all of a GPU instance; None: it has none."""
    return next((info for info in _compute_profiles(nvml, gpu) if info.sliceCount == profile.compute), None)


def destroy_computes(nvml: Nvml, gpu: Any) -> None:
    for info in _compute_profiles(nvml, gpu):
        for compute in _computes(nvml, gpu, info):
            nvml.nvmlComputeInstanceDestroy(compute)


def devices(nvml: Nvml, card: Any) -> dict[int, list[Any]]:
    """The handles of the MIG devices, by the id of the GPU instance that they are in."""
    found: dict[int, list[Any]] = {}
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                raise
        else:
            found.setdefault(nvml.nvmlDeviceGetGpuInstanceId(device), []).append(device)
    return found


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
    return _filled(pynvml.c_nvmlComputeInstance_t, get, gpu, info.id, most=info.instanceCount)


def _filled(kind: Any, get: Any, *arguments: Any, most: int | None = None) -> list[Any]:
    """What a function lists; it says itself how many there are where `most` does not."""
    count = ctypes.c_uint()
    if most is None:
        get(*arguments, None, ctypes.byref(count))
        most = count.value
    array = (kind * most)()
    get(*arguments, array, ctypes.byref(count))
    return list(array[: count.value])


def _known_name(profile: Profile, built_in: Layout | None) -> str:
    """The name that the built-in layout has for a profile of this shape, which is what pods ask for; else its own."""
    for p in built_in.profiles if built_in else ():
        if (p.compute, p.size, _attributes(p.name)) == (profile.compute, profile.size, _attributes(profile.name)):
            return p.name
    return profile.name


def _attributes(name: str) -> str:
    return name.partition("gb")[2]
