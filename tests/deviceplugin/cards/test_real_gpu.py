"""The inventory and the use of cards on a machine with an NVIDIA GPU, compared with the output of `nvidia-smi`.

The tests change no setting of a GPU. To have something to measure, one allocates memory through the driver's API.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

from deviceplugin.cards.nvml_cards import NvmlCards
from deviceplugin.usage.nvml_usage import CardReading, NvmlUsage
from deviceplugin.usage.process_owners import ProcessOwners, Unowned
from mgpu.model.usage_problems import UsageProblem

_MIB = 1 << 20
_ALLOCATED = 256 * _MIB
_FIRST_WITH_LIMITS = 615
_FIELDS = ("index", "uuid", "name", "memory.total")
_MINOR = re.compile(r"<uuid>(?P<uuid>[^<]+)</uuid>.*?<minor_number>(?P<minor>\d+)</minor_number>", re.DOTALL)


def nvidia_smi(*arguments: str) -> str:
    """Return its output. Skip the test if nvidia-smi, the driver or a GPU is missing."""
    path = shutil.which("nvidia-smi")
    if path is None:
        pytest.skip("no NVIDIA GPU: nvidia-smi is not installed")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode or not done.stdout.strip():
        pytest.skip(f"no NVIDIA GPU: nvidia-smi says {(done.stdout + done.stderr).strip()!r}")
    return done.stdout


def test_inventory_equals_the_output_of_nvidia_smi() -> None:
    table = nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    printed = [tuple(cell.strip() for cell in line.split(",")) for line in table.splitlines()]
    source = NvmlCards()
    try:
        cards = source.read()
    finally:
        source.close()
    assert [(str(c.index), c.uuid, c.model, str(c.memory >> 20)) for c in cards] == printed
    minors = {found["uuid"]: int(found["minor"]) for found in _MINOR.finditer(nvidia_smi("-q", "-x"))}
    assert {card.uuid: card.minor for card in cards} == minors


def uuids() -> list[str]:
    return nvidia_smi("--query-gpu=uuid", "--format=csv,noheader").split()


def in_mig_mode(uuid: str) -> bool:
    return nvidia_smi("--query-gpu=mig.mode.current", "--format=csv,noheader", f"--id={uuid}").strip() == "Enabled"


def compute_apps(uuid: str) -> dict[int, int]:
    """Return the memory in bytes by process id. A process whose memory `nvidia-smi` does not know is left out."""
    path = shutil.which("nvidia-smi") or ""
    query = [path, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", f"--id={uuid}"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
    return {int(pid): int(mib) * _MIB for pid, mib in rows if mib.isdigit()}


@contextmanager
def allocated(uuid: str) -> Iterator[None]:
    """Hold memory on the card in this process. Skip the test if the driver's library is not there, or allows none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.skip(f"no CUDA: {error}")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    calls: tuple[Callable[[], int], ...] = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGetByPCIBusId(ctypes.byref(device), _bus_id(uuid)),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxSetCurrent(context),
        lambda: cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(_ALLOCATED)),
    )
    for call in calls:
        if code := call():
            pytest.skip(f"CUDA does not work here: error {code}")
    try:
        yield
    finally:
        cuda.cuMemFree_v2(memory)
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def _bus_id(uuid: str) -> bytes:
    return nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader", f"--id={uuid}").strip().encode()


@contextmanager
def nvml_handle(uuid: str) -> Iterator[object]:
    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        pynvml.nvmlShutdown()


def read_twice(cards: list[str]) -> tuple[CardReading, ...]:
    """Return the second reading, which has the utilization since the first one."""
    usage = NvmlUsage()
    usage.read(cards)
    return usage.read(cards)


def test_memory_and_processes_are_those_of_nvidia_smi() -> None:
    cards = uuids()
    with allocated(cards[0]):
        readings = read_twice(cards)
        printed = {uuid: compute_apps(uuid) for uuid in cards}
    for reading in readings:
        if in_mig_mode(reading.card):
            assert reading.problem in (None, UsageProblem.NO_PERMISSION)
            continue
        assert reading.problem is None
        assert reading.sm is not None
        assert reading.processes is not None
        found = {process.pid: process.memory for process in reading.processes if process.memory is not None}
        assert {pid: found[pid] // _MIB for pid in printed[reading.card]} == {
            pid: memory // _MIB for pid, memory in printed[reading.card].items()
        }
    used = readings[0].memory or 0
    assert used >= _ALLOCATED


def test_own_process_is_listed_with_what_it_has_allocated() -> None:
    card = uuids()[0]
    if in_mig_mode(card):
        pytest.skip("the card is in MIG mode")
    if ProcessOwners().problem():
        # NVML may then name this process by an id that it does not have here.
        pytest.skip("this is not the process name space of the host")
    with allocated(card):
        (reading,) = read_twice([card])
        own = [process for process in reading.processes or () if process.pid == os.getpid()]
        assert [process.memory is None or process.memory >= _ALLOCATED for process in own] == [True]
        owners = ProcessOwners()
        assert owners.find([os.getpid()], owners.now()).by_pid[os.getpid()] is not Unowned.GONE


def code_of(call: Callable[[], object]) -> int:
    """Return NVML's return code."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return int(pynvml.NVML_SUCCESS)


def test_functions_for_utilization_answer_or_say_why_not() -> None:
    with nvml_handle(uuids()[0]) as handle:
        for call in (
            lambda: pynvml.nvmlDeviceGetUtilizationRates(handle),
            lambda: pynvml.nvmlDeviceGetProcessUtilization(handle, 0),
            lambda: pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle),
            lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ):
            assert code_of(call) in (
                pynvml.NVML_SUCCESS,
                pynvml.NVML_ERROR_NOT_FOUND,
                pynvml.NVML_ERROR_NOT_SUPPORTED,
                pynvml.NVML_ERROR_NO_PERMISSION,
            )


def test_memory_limits_are_read_or_not_supported() -> None:
    """Reading changes nothing. The root of all cgroups has no limits."""
    found = pynvml.c_nvmlGetMemoryLimits_v1_t(os.fsencode(Path("/sys/fs/cgroup")))
    with nvml_handle(uuids()[0]) as handle:
        major = int(pynvml.nvmlSystemGetDriverVersion().partition(".")[0])
        code = code_of(lambda: pynvml.nvmlDeviceGetMemoryLimits_v1(handle, found))
    if code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        assert major < _FIRST_WITH_LIMITS
        pytest.skip(f"driver {major} is older than R{_FIRST_WITH_LIMITS}, which can limit the memory of cgroups")
    assert code in (
        pynvml.NVML_SUCCESS,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_OPERATING_SYSTEM,
    )
    assert found.softLimit <= found.hardLimit
