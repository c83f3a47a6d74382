"""Simulated processes, their memory and the memory limits of cgroups follow nvml.h, with its error codes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from playground import nvml_state
from playground.cgroup_limits import make_cgroup
from playground.gpu_processes import OutOfMemory, on_device, use
from playground.nvml_state import set_driver, set_switch
from playground.simulated_nvml import SimulatedNvml
from tests.deviceplugin.mig.rig import GIB, GPU, T4, Rig, gpu, instance

MAX = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
R615 = "615.65.06"
OTHER = "GPU-1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cards.mig.json"


@pytest.fixture
def nvml(file: Path) -> Iterator[SimulatedNvml]:
    set_driver(file, R615)
    nvml = SimulatedNvml(file, (gpu(), gpu(1, T4, 16)))
    nvml.nvmlInit()
    yield nvml
    nvml.nvmlShutdown()


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """The cgroup of a container, below that of its pod."""
    return make_cgroup(make_cgroup(make_cgroup(tmp_path / "cgroup") / "pod") / "leaf")


def code(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return int(caught.value.value)


def card(nvml: SimulatedNvml, uuid: str = GPU) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(uuid)


def set_limits(nvml: SimulatedNvml, cgroup: Path | None, soft: int, hard: int, handle: Any = None) -> None:
    name = None if cgroup is None else str(cgroup).encode()
    nvml.nvmlDeviceSetMemoryLimits_v1(handle or card(nvml), pynvml.c_nvmlSetMemoryLimits_v1_t(name, soft, hard))


def limits(nvml: SimulatedNvml, cgroup: Path, uuid: str = GPU) -> tuple[int, int, int]:
    """Return the soft limit, the hard limit and the used memory."""
    found = pynvml.c_nvmlGetMemoryLimits_v1_t(str(cgroup).encode())
    nvml.nvmlDeviceGetMemoryLimits_v1(card(nvml, uuid), found)
    return found.softLimit, found.hardLimit, found.currentUsed


def test_card_reports_its_processes_and_their_memory(nvml: SimulatedNvml, file: Path) -> None:
    use(file, GPU, 8, memory=3 * GIB)
    use(file, GPU, 7, memory=GIB)
    nvml_state.register(file, GPU, 9)
    found = nvml.nvmlDeviceGetComputeRunningProcesses(card(nvml))
    assert [(one.pid, one.usedGpuMemory) for one in found] == [(7, GIB), (8, 3 * GIB), (9, 0)]
    info = nvml.nvmlDeviceGetMemoryInfo(card(nvml))
    assert (info.total, info.used, info.free) == (80 * GIB, 4 * GIB, 76 * GIB)
    assert nvml.nvmlDeviceGetComputeRunningProcesses(card(nvml, OTHER)) == []


def test_process_on_an_instance_is_also_one_of_the_card(tmp_path: Path) -> None:
    rig = Rig(tmp_path).on().make(instance("1g.10gb@0"))
    (uuid,) = rig.made().values()
    use(rig.file, uuid, 5, memory=2 * GIB, sm=50)
    nvml = SimulatedNvml(rig.file, rig.cards)
    nvml.nvmlInit()
    handle = card(nvml)
    assert [one.usedGpuMemory for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)] == [2 * GIB]
    assert nvml.nvmlDeviceGetMemoryInfo(handle).used == 2 * GIB
    for call in (nvml.nvmlDeviceGetUtilizationRates, lambda of: nvml.nvmlDeviceGetProcessUtilization(of, 0)):
        assert code(call, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED
    set_switch(rig.file, privileged=False)
    assert code(nvml.nvmlDeviceGetComputeRunningProcesses, handle) == pynvml.NVML_ERROR_NO_PERMISSION


def test_samples_of_utilization_are_newer_than_the_last_one_seen(nvml: SimulatedNvml, file: Path) -> None:
    use(file, GPU, 7, memory=GIB)
    samples = nvml.nvmlDeviceGetProcessUtilization
    assert code(samples, card(nvml), 0) == pynvml.NVML_ERROR_NOT_FOUND, "no process has used the SMs"
    use(file, GPU, 7, sm=40)
    (first,) = samples(card(nvml), 0)
    assert (first.pid, first.smUtil) == (7, 40)
    assert nvml.nvmlDeviceGetUtilizationRates(card(nvml)).gpu == 40
    idle = use(file, GPU, 7, sm=0).changed
    assert [one.smUtil for one in samples(card(nvml), idle - 1)] == [40], "the driver still has the last sample"
    assert code(samples, card(nvml), idle) == pynvml.NVML_ERROR_NOT_FOUND


def test_limits_are_read_back_with_the_use_of_the_cgroup(nvml: SimulatedNvml, file: Path, leaf: Path) -> None:
    assert limits(nvml, leaf) == (0, MAX, 0)
    use(file, GPU, 7, memory=GIB, cgroup=leaf)
    use(file, GPU, 8, memory=GIB, cgroup=leaf.parent)
    set_limits(nvml, leaf, GIB, 2 * GIB)
    assert limits(nvml, leaf) == (GIB, 2 * GIB, GIB)
    assert limits(nvml, leaf, OTHER) == (0, MAX, 0), "a limit is for one card"
    assert limits(nvml, leaf.parent)[2] == 2 * GIB, "the use of the cgroups below counts"
    set_limits(nvml, leaf, 0, MAX)
    assert limits(nvml, leaf) == (0, MAX, GIB)


@pytest.mark.parametrize("accounting", ["dmem", "misc"])
def test_allocation_above_the_hard_limit_is_refused(
    nvml: SimulatedNvml, file: Path, leaf: Path, accounting: str
) -> None:
    set_driver(file, R615, memory_accounting=accounting)
    set_limits(nvml, leaf, 0, 4 * GIB)
    use(file, GPU, 7, memory=3 * GIB, cgroup=leaf)
    with pytest.raises(OutOfMemory, match="leaf"):
        use(file, GPU, 8, memory=2 * GIB, cgroup=leaf)
    with pytest.raises(OutOfMemory):
        use(file, GPU, 7, memory=4 * GIB + 1)
    assert [process.memory for process in on_device(file, GPU)] == [3 * GIB]
    use(file, GPU, 7, memory=4 * GIB)
    use(file, OTHER, 8, memory=9 * GIB, cgroup=leaf)


def test_allocation_beyond_the_card_is_refused(file: Path) -> None:
    use(file, GPU, 7, memory=60 * GIB, total=80 * GIB)
    with pytest.raises(OutOfMemory):
        use(file, GPU, 8, memory=21 * GIB, total=80 * GIB)


def test_every_ancestor_binds_with_dmem_and_the_nearest_limit_with_misc(
    nvml: SimulatedNvml, file: Path, leaf: Path
) -> None:
    for accounting in ("dmem", "misc"):
        set_driver(file, R615, memory_accounting=accounting)
        set_limits(nvml, leaf.parent, 0, GIB)
        set_limits(nvml, leaf, 0, 4 * GIB)
    use(file, GPU, 7, memory=2 * GIB, cgroup=leaf)
    set_driver(file, R615, memory_accounting="dmem")
    with pytest.raises(OutOfMemory, match="pod "):
        use(file, GPU, 7, memory=3 * GIB)


def test_limits_are_gone_with_the_cgroup_but_its_reservation_stays(nvml: SimulatedNvml, leaf: Path) -> None:
    set_limits(nvml, leaf, GIB, 2 * GIB)
    assert limits(nvml, leaf.parent)[0] == GIB, "a soft limit is added to those of the ancestors"
    for name in leaf.iterdir():
        name.unlink()
    leaf.rmdir()
    assert code(limits, nvml, leaf) == pynvml.NVML_ERROR_OPERATING_SYSTEM
    make_cgroup(leaf)
    assert limits(nvml, leaf) == (0, MAX, 0)
    assert limits(nvml, leaf.parent)[0] == GIB, "nobody has set the soft limit of the removed cgroup to 0"


def test_limit_below_the_use_does_not_take_effect_with_dmem(nvml: SimulatedNvml, file: Path, leaf: Path) -> None:
    use(file, GPU, 7, memory=3 * GIB, cgroup=leaf)
    set_limits(nvml, leaf, 0, 2 * GIB)
    assert limits(nvml, leaf)[1] == MAX
    set_driver(file, R615, memory_accounting="misc")
    set_limits(nvml, leaf, 0, 2 * GIB)
    assert limits(nvml, leaf)[1] == 2 * GIB


@pytest.mark.parametrize(
    ("soft", "hard"),
    [
        pytest.param(2, 1, id="soft above hard"),
        pytest.param(MAX, GIB, id="soft above hard, without a soft limit"),
        pytest.param(0, 80 * GIB + 1, id="hard above the card's memory"),
        pytest.param(80 * GIB + 1, MAX, id="soft above the card's memory"),
    ],
)
def test_wrong_limits_are_invalid(nvml: SimulatedNvml, leaf: Path, soft: int, hard: int) -> None:
    assert code(set_limits, nvml, leaf, soft, hard) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    set_limits(nvml, leaf, MAX, MAX)


def test_wrong_arguments_are_invalid(nvml: SimulatedNvml) -> None:
    assert code(set_limits, nvml, None, 0, GIB) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    for call in (nvml.nvmlDeviceSetMemoryLimits_v1, nvml.nvmlDeviceGetMemoryLimits_v1):
        assert code(call, card(nvml), None) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_cgroup_must_exist_and_be_of_version_2(nvml: SimulatedNvml, leaf: Path, tmp_path: Path) -> None:
    v1 = tmp_path / "v1"
    v1.mkdir()
    for cgroup, error in ((leaf / "gone", pynvml.NVML_ERROR_OPERATING_SYSTEM), (v1, pynvml.NVML_ERROR_NOT_SUPPORTED)):
        assert code(set_limits, nvml, cgroup, 0, GIB) == error
        assert code(limits, nvml, cgroup) == error


def test_cgroup_without_dmem_reads_its_ancestors_limits_and_takes_none(nvml: SimulatedNvml, leaf: Path) -> None:
    below = make_cgroup(leaf / "below", dmem=False)
    set_limits(nvml, leaf, 0, GIB)
    assert limits(nvml, below)[1] == GIB
    assert code(set_limits, nvml, below, 0, GIB) == pynvml.NVML_ERROR_NOT_FOUND


def test_driver_that_counts_itself_needs_no_dmem_and_knows_only_limits_that_were_set(
    nvml: SimulatedNvml, file: Path, tmp_path: Path
) -> None:
    set_driver(file, R615, memory_accounting="misc")
    cgroup = make_cgroup(tmp_path / "plain", dmem=False)
    assert code(limits, nvml, cgroup) == pynvml.NVML_ERROR_NOT_FOUND
    set_limits(nvml, cgroup, 0, GIB)
    assert limits(nvml, cgroup) == (0, GIB, 0)


def test_setting_needs_a_privilege_and_reading_does_not(nvml: SimulatedNvml, file: Path, leaf: Path) -> None:
    set_switch(file, privileged=False)
    assert code(set_limits, nvml, leaf, 0, GIB) == pynvml.NVML_ERROR_NO_PERMISSION
    assert limits(nvml, leaf) == (0, MAX, 0)


@pytest.mark.parametrize(
    ("version", "accounting", "error"),
    [
        pytest.param("610.43.02", "dmem", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, id="driver before R615"),
        pytest.param(R615, "", pynvml.NVML_ERROR_NOT_SUPPORTED, id="switched off"),
    ],
)
def test_driver_without_limits_refuses_both_calls_and_limits_nothing(
    nvml: SimulatedNvml, file: Path, leaf: Path, version: str, accounting: str, error: int
) -> None:
    set_limits(nvml, leaf, 0, GIB)
    set_driver(file, version, memory_accounting=accounting)
    assert nvml.nvmlSystemGetDriverVersion() == version
    assert code(set_limits, nvml, leaf, 0, GIB) == error
    assert code(limits, nvml, leaf) == error
    use(file, GPU, 7, memory=2 * GIB, cgroup=leaf)


def test_cards_and_devices_in_mig_mode_have_no_limits(tmp_path: Path, leaf: Path) -> None:
    rig = Rig(tmp_path).on().make(instance("1g.10gb@0"))
    set_driver(rig.file, R615)
    nvml = SimulatedNvml(rig.file, rig.cards)
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card(nvml), 0)
    for handle in (card(nvml), device):
        assert code(set_limits, nvml, leaf, 0, GIB, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED
