"""What NVML says about the use of cards is read with NVML's own functions, and its failures are results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from deviceplugin.usage.nvml_usage import CardReading, NvmlUsage, ProcessUse
from mgpu.model.usage_problems import UsageProblem
from playground.gpu_processes import GRAPHICS, MPS, use
from playground.nvml_state import set_switch
from playground.simulated_nvml import SimulatedNvml
from tests.deviceplugin.mig.rig import GIB, GPU, Flaky, Rig, gpu, instance

OTHER = "GPU-1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cards.mig.json"


@pytest.fixture
def flaky(file: Path) -> Flaky:
    return Flaky(SimulatedNvml(file, (gpu(), gpu(1))))


@pytest.fixture
def usage(flaky: Flaky) -> Iterator[NvmlUsage]:
    nvml: Any = flaky
    yield NvmlUsage(nvml)
    assert flaky._nvml._starts == 0, "NVML is shut down after each reading"


def one(usage: NvmlUsage, uuid: str = GPU) -> CardReading:
    (found,) = usage.read([uuid])
    return found


def memory(reading: CardReading) -> dict[int, int | None]:
    return {process.pid: process.memory for process in reading.processes or ()}


def test_processes_of_all_kinds_are_read_with_their_memory(usage: NvmlUsage, file: Path) -> None:
    use(file, GPU, 3, memory=GIB)
    use(file, GPU, 1, memory=2 * GIB, kind=MPS)
    use(file, GPU, 2, memory=4 * GIB, kind=GRAPHICS)
    use(file, OTHER, 4, memory=8 * GIB)
    first, second = usage.read([GPU, OTHER])
    assert memory(first) == {1: 2 * GIB, 2: 4 * GIB, 3: GIB}
    assert (first.card, first.memory, first.problem) == (GPU, 7 * GIB, None)
    assert memory(second) == {4: 8 * GIB}


def test_process_in_several_lists_counts_once(usage: NvmlUsage, file: Path, flaky: Flaky) -> None:
    use(file, GPU, 1, memory=2 * GIB)
    nvml = flaky._nvml
    nvml.nvmlDeviceGetMPSComputeRunningProcesses = nvml.nvmlDeviceGetComputeRunningProcesses  # type: ignore[method-assign]
    assert memory(one(usage)) == {1: 2 * GIB}


def test_utilization_is_that_since_the_last_reading(usage: NvmlUsage, file: Path) -> None:
    use(file, GPU, 1, memory=GIB, sm=90)
    use(file, GPU, 2, memory=GIB)
    assert [process.sm for process in one(usage).processes or ()] == [None, None], "the driver may have old samples"
    use(file, GPU, 1, sm=40)
    found = one(usage)
    assert (found.processes, found.sm) == ((ProcessUse(1, GIB, 0.4), ProcessUse(2, GIB, 0.0)), 0.4)
    use(file, GPU, 1, sm=0)
    one(usage)  # has the last sample of process 1
    assert [process.sm for process in one(usage).processes or ()] == [0.0, 0.0]


def test_idle_card_at_the_first_reading_gives_utilization_at_the_second(usage: NvmlUsage, file: Path) -> None:
    use(file, GPU, 1, memory=GIB)
    assert [process.sm for process in one(usage).processes or ()] == [None]
    use(file, GPU, 1, sm=30)
    assert [process.sm for process in one(usage).processes or ()] == [0.3]


def test_samples_of_no_process_and_of_impossible_amounts_are_ignored_and_the_rest_is_averaged(
    usage: NvmlUsage, file: Path, flaky: Flaky
) -> None:
    use(file, GPU, 1, memory=GIB)
    one(usage)
    rows = [(1, 10, 20), (1, 11, 40), (0, 12, 50), (1, 12, 4_000_000_000)]
    flaky._nvml.nvmlDeviceGetProcessUtilization = lambda handle, timeStamp: [  # type: ignore[method-assign] # noqa: ARG005, N803
        pynvml.c_nvmlProcessUtilizationSample_t(pid, at, sm, 0, 0, 0) for pid, at, sm in rows
    ]
    assert [process.sm for process in one(usage).processes or ()] == [pytest.approx(0.3)]


@pytest.mark.parametrize("code", [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND])
def test_card_without_samples_is_idle(usage: NvmlUsage, file: Path, flaky: Flaky, code: int) -> None:
    use(file, GPU, 1, memory=GIB)
    for expected in (None, 0.0):
        flaky.fail(0, code, "nvmlDeviceGetProcessUtilization")
        assert [process.sm for process in one(usage).processes or ()] == [expected]


def test_memory_that_nvml_does_not_know_is_unknown_and_not_0(usage: NvmlUsage, file: Path, flaky: Flaky) -> None:
    use(file, GPU, 1, memory=GIB)
    listed = flaky._nvml.nvmlDeviceGetComputeRunningProcesses

    def unknown(handle: Any) -> list[Any]:
        found = listed(handle)
        found[0].usedGpuMemory = None
        return found

    flaky._nvml.nvmlDeviceGetComputeRunningProcesses = unknown  # type: ignore[method-assign]
    assert memory(one(usage)) == {1: None}


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMPS", "nvmlDeviceGetGraphics", "nvmlDeviceGetProcessUt"]
)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_driver_without_a_function_reports_the_rest(
    usage: NvmlUsage, file: Path, flaky: Flaky, function: str, code: int
) -> None:
    use(file, GPU, 1, memory=GIB)
    flaky.fail(0, code, function)
    found = one(usage)
    assert (memory(found), found.memory, found.problem) == ({1: GIB}, GIB, None)


def test_card_in_mig_mode_reports_memory_and_no_utilization(tmp_path: Path) -> None:
    rig = Rig(tmp_path).on().make(instance("1g.10gb@0"))
    (uuid,) = rig.made().values()
    use(rig.file, uuid, 5, memory=2 * GIB, sm=50)
    usage = NvmlUsage(SimulatedNvml(rig.file, rig.cards))
    for _ in range(2):
        found = one(usage)
        assert (found.memory, found.sm, found.processes) == (2 * GIB, None, (ProcessUse(5, 2 * GIB, None),))
    set_switch(rig.file, privileged=False)
    found = one(usage)
    assert (found.memory, found.processes, found.problem) == (2 * GIB, None, UsageProblem.NO_PERMISSION)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
def test_failure_is_a_result_and_is_logged_once(
    usage: NvmlUsage, flaky: Flaky, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, function)
        assert one(usage) == CardReading(GPU, problem=UsageProblem.NVML)
    assert len(caplog.messages) == 1
    assert one(usage).problem is None


def test_lost_card_does_not_hide_the_others(usage: NvmlUsage) -> None:
    gone, there = usage.read(["GPU-gone", GPU])
    assert (gone.problem, there.problem, there.memory) == (UsageProblem.NVML, None, 0)


def test_utilization_that_failed_begins_anew(usage: NvmlUsage, file: Path, flaky: Flaky) -> None:
    use(file, GPU, 1, memory=GIB, sm=90)
    one(usage)
    flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceGetProcessUtilization")
    found = one(usage)
    assert (found.memory, found.processes, found.problem) == (GIB, None, UsageProblem.NVML)
    assert [process.sm for process in one(usage).processes or ()] == [None]
