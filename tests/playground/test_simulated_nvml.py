"""Simulated cards refuse what NVML refuses, with its codes."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from deviceplugin.mig.mig_driver import NvmlMig
from deviceplugin.mig.mig_nvml import KINDS
from mgpu.model.mig import LAYOUTS
from playground.nvml_state import deregister, read_state, reboot, register, reset, set_switch
from playground.simulated_nvml import SimulatedNvml, forgetful
from tests import data
from tests.deviceplugin.mig.rig import A30, A100, GPU, H100, T4, Rig, gpu, instance

PROFILES = data.load("mig_profiles")
SEVENTH, SECOND, WHOLE = 19, 14, 0
"""Ids of an A100's profiles: 1g.10gb, 2g.20gb, 7g.80gb."""


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path).on()


@pytest.fixture
def nvml(rig: Rig) -> Iterator[SimulatedNvml]:
    nvml = SimulatedNvml(rig.file, (gpu(), gpu(1, T4, 16), gpu(2, H100)))
    nvml.nvmlInit()
    yield nvml
    nvml.nvmlShutdown()


def code(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return int(caught.value.value)


def place(start: int, size: int) -> Any:
    return ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))


def make(nvml: SimulatedNvml, profile: int, start: int, size: int) -> Any:
    card = nvml.nvmlDeviceGetHandleByUUID(GPU)
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(card, profile, place(start, size))


def test_overlapping_instances_have_no_room(nvml: SimulatedNvml) -> None:
    make(nvml, SECOND, 2, 2)
    for profile, start, size in ((SECOND, 2, 2), (SEVENTH, 3, 1), (WHOLE, 0, 8)):
        assert code(make, nvml, profile, start, size) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES


@pytest.mark.parametrize(
    ("profile", "start", "size"),
    [
        pytest.param(SECOND, 1, 2, id="no start of this profile"),
        pytest.param(SECOND, 6, 2, id="room, but no start"),
        pytest.param(SECOND, 0, 1, id="not the profile's size"),
        pytest.param(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE, 0, 1, id="the kind 0 is the id of the whole card"),
        pytest.param(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE, 0, 2, id="the kind 1 is no id"),
        pytest.param(99, 0, 1, id="no profile"),
    ],
)
def test_invalid_arguments_are_refused(nvml: SimulatedNvml, profile: int, start: int, size: int) -> None:
    assert code(make, nvml, profile, start, size) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert make(nvml, SECOND, 0, 2)


def test_placement_is_given_by_reference(nvml: SimulatedNvml) -> None:
    card, by_value = nvml.nvmlDeviceGetHandleByUUID(GPU), pynvml.c_nvmlGpuInstancePlacement_t(0, 2)
    create = nvml.nvmlDeviceCreateGpuInstanceWithPlacement
    assert code(create, card, SECOND, by_value) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@pytest.mark.parametrize(("profile", "most", "size"), [(20, 1, 1), (15, 4, 2), (SECOND, 3, 2)])
def test_instances_of_a_profile_are_limited(nvml: SimulatedNvml, profile: int, most: int, size: int) -> None:
    for start in range(most):
        make(nvml, profile, start * size, size)
    assert code(make, nvml, profile, 3 if profile == 20 else 0, size) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES


def test_what_is_in_use_is_not_destroyed(nvml: SimulatedNvml, rig: Rig) -> None:
    whole = make(nvml, SECOND, 0, 2)
    compute = nvml.nvmlGpuInstanceCreateComputeInstance(whole, 1)
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.nvmlDeviceGetHandleByUUID(GPU), 0)
    uuid = nvml.nvmlDeviceGetUUID(device)
    assert code(nvml.nvmlGpuInstanceDestroy, whole) == pynvml.NVML_ERROR_IN_USE, "it has a compute instance"
    register(rig.file, uuid, 41)
    assert [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)] == [41]
    assert code(nvml.nvmlComputeInstanceDestroy, compute) == pynvml.NVML_ERROR_IN_USE
    deregister(rig.file, uuid, 41)
    nvml.nvmlComputeInstanceDestroy(compute)
    nvml.nvmlGpuInstanceDestroy(whole)
    assert rig.made() == {}


def test_handles_of_destroyed_instances_are_invalid(nvml: SimulatedNvml) -> None:
    made = make(nvml, SECOND, 0, 2)
    nvml.nvmlGpuInstanceDestroy(made)
    again = make(nvml, SECOND, 0, 2)
    assert code(nvml.nvmlGpuInstanceGetInfo, made) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    nvml.nvmlShutdown()
    assert code(nvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    nvml.nvmlInit()
    assert code(nvml.nvmlGpuInstanceGetInfo, again) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_compute_instances_divide_their_gpu_instance(nvml: SimulatedNvml) -> None:
    made = make(nvml, SECOND, 0, 2)
    nvml.nvmlGpuInstanceCreateComputeInstance(made, 0)
    create = nvml.nvmlGpuInstanceCreateComputeInstance
    assert code(create, made, 1) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    assert code(create, made, 2) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert create(made, 0)


def test_without_permission_nothing_is_changed(nvml: SimulatedNvml, rig: Rig) -> None:
    set_switch(rig.file, privileged=False)
    card = nvml.nvmlDeviceGetHandleByUUID(GPU)
    assert code(make, nvml, SECOND, 0, 2) == pynvml.NVML_ERROR_NO_PERMISSION
    assert code(nvml.nvmlDeviceSetMigMode, card, 0) == pynvml.NVML_ERROR_NO_PERMISSION
    count = ctypes.byref(ctypes.c_uint())
    placements = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
    assert code(placements, card, SECOND, None, count) == pynvml.NVML_ERROR_NO_PERMISSION
    set_switch(rig.file, privileged=True)
    assert make(nvml, SECOND, 0, 2)


def test_card_without_mig_is_not_supported(nvml: SimulatedNvml) -> None:
    card = nvml.nvmlDeviceGetHandleByIndex(1)
    for call in (nvml.nvmlDeviceGetMigMode, lambda c: nvml.nvmlDeviceSetMigMode(c, 1)):
        assert code(call, card) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(card) == 0


def test_out_of_mig_mode_there_are_no_instances(nvml: SimulatedNvml) -> None:
    card, array = nvml.nvmlDeviceGetHandleByIndex(2), (pynvml.c_nvmlGpuInstance_t * 7)()
    for call in (
        lambda: nvml.nvmlDeviceCreateGpuInstanceWithPlacement(card, SECOND, place(0, 2)),
        lambda: nvml.nvmlDeviceGetGpuInstances(card, SECOND, array, ctypes.byref(ctypes.c_uint())),
        lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 0),
        lambda: nvml.nvmlDeviceGetGpuInstanceProfileInfo(card, 0),
    ):
        assert code(call) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert nvml.nvmlDeviceGetGpuInstanceProfileInfo(card, 0, version=1).id == SEVENTH


def test_mode_changes_on_an_idle_card_only(nvml: SimulatedNvml, rig: Rig) -> None:
    card, h100 = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(2)
    make(nvml, SECOND, 0, 2)
    assert nvml.nvmlDeviceSetMigMode(card, 0) == pynvml.NVML_ERROR_IN_USE, "it has an instance"
    assert nvml.nvmlDeviceGetMigMode(card) == [1, 0]
    assert reset(rig.file, GPU)
    assert nvml.nvmlDeviceGetMigMode(card) == [0, 0]
    register(rig.file, "GPU-2", 7)
    assert nvml.nvmlDeviceSetMigMode(h100, 1) == pynvml.NVML_ERROR_IN_USE
    assert not reset(rig.file, "GPU-2")
    deregister(rig.file, "GPU-2", 7)
    assert nvml.nvmlDeviceSetMigMode(h100, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(h100) == [1, 1]


def test_in_a_virtual_machine_an_a100_must_be_reset_from_outside(nvml: SimulatedNvml, rig: Rig) -> None:
    set_switch(rig.file, passthrough=True)
    card, h100 = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(2)
    assert nvml.nvmlDeviceSetMigMode(card, 0) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert nvml.nvmlDeviceGetMigMode(card) == [1, 0]
    assert nvml.nvmlDeviceSetMigMode(h100, 1) == pynvml.NVML_SUCCESS
    reset(rig.file, GPU)
    assert nvml.nvmlDeviceGetMigMode(card) == [0, 0]


def test_reboot_takes_instances_and_processes_and_from_hopper_on_the_mode(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpu(), gpu(1, H100)).on("GPU-0", "GPU-1").make(instance("2g.20gb@0"))
    register(rig.file, rig.made()[instance("2g.20gb@0")], 1)
    reboot(rig.file, forgetful=forgetful(rig.cards))
    assert [(card.current, card.pending, card.busy, card.instances) for card in (rig.card(), rig.card("GPU-1"))] == [
        (True, True, False, ()),
        (False, False, False, ()),
    ]


def test_uuids_are_stable_and_never_used_again(rig: Rig) -> None:
    two = instance("2g.20gb@2")
    first = rig.make(two).made()
    assert NvmlMig(SimulatedNvml(rig.file, rig.cards)).read()[0].instances[0].uuid == first[two]
    rig.driver.destroy(GPU, two)
    assert rig.make(two).made()[two] not in ("", first[two])


def test_state_that_is_half_written_is_never_read(rig: Rig) -> None:
    """The file is replaced, so an agent that dies while it writes leaves the one before."""
    rig.make(instance("7g.80gb@0"))
    rig.file.with_name("mig.json.new").write_text('{"cards": {"GPU-0"')
    assert rig.made().keys() == {instance("7g.80gb@0")}
    assert read_state(rig.file).serial > 0


@pytest.mark.parametrize(
    ("model", "gib", "layout"),
    [
        (A30, 24, "A30-24"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40"),
        (A100, 80, "A100-80"),
        (H100, 80, "H100-80"),
        ("NVIDIA H100 NVL", 94, "H100-NVL-94"),
        ("NVIDIA H200", 141, "H200-141"),
        ("NVIDIA B200", 180, "B200-180"),
    ],
)
def test_profiles_are_what_nvidia_smi_prints(tmp_path: Path, model: str, gib: int, layout: str) -> None:
    nvml = SimulatedNvml(tmp_path / "mig.json", (gpu(0, model, gib),))
    nvml.nvmlInit()
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    by_kind = {fact["kind"]: fact for fact in PROFILES[layout]["profiles"].values()}
    for kind in KINDS:
        if fact := by_kind.get(kind):
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(card, kind, version=1)
            assert (info.id, info.sliceCount, info.instanceCount) == (fact["id"], fact["compute"], fact["most"])
        else:
            get = nvml.nvmlDeviceGetGpuInstanceProfileInfo
            assert code(get, card, kind, 1) == pynvml.NVML_ERROR_NOT_SUPPORTED
    read = NvmlMig(nvml).read()[0].layout
    assert read is not None
    assert {(p.name, p.compute, p.size, p.starts, p.most) for p in read.profiles} == {
        (name, fact["compute"], fact["memory"], tuple(fact["starts"]), fact["most"])
        for name, fact in PROFILES[layout]["profiles"].items()
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_driver_reads_the_layout_that_is_built_in(tmp_path: Path, layout: Any) -> None:
    model, _, gib = layout.name.rpartition("-")
    card = NvmlMig(SimulatedNvml(tmp_path / "mig.json", (gpu(0, model, int(gib)),))).read()[0]
    assert card.layout is not None
    assert (card.layout.slices, card.layout.compute) == (layout.slices, layout.compute)
    assert sorted(card.layout.profiles, key=lambda p: p.name) == sorted(layout.profiles, key=lambda p: p.name)
