"""Simulates NVML's functions for processes, memory and utilization, and the memory limits of driver R615 (CUDA 13.4).

The rules of the limits are those of nvml.h 13.4 and of NVIDIA's "MPS v3 Memory Partitioning"; where a comment says that
something is assumed, they leave it open. `playground.gpu_processes` says what processes use.
"""

# ruff: noqa: N802 (the names are the pynvml module's)

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from playground.cgroup_limits import DMEM, MISC, has_dmem, holder, is_cgroup_v2, read_limits, write_limits
from playground.gpu_processes import COMPUTE, GRAPHICS, MPS, GpuProcess, now_us, on_card, used_below
from playground.nvml_state import has_limit_functions, locked, read_state, supports_limits
from playground.simulated_library import SimulatedLibrary, fail

_NO_INSTANCE = 0xFFFFFFFF
"""The id of a process's GPU instance outside of MIG mode."""


class SimulatedMemory(SimulatedLibrary):
    """The functions of NVML for the memory of cards and for the processes on them."""

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        """Return the memory of a card. Nothing is reserved, so both versions of the structure have the same amounts."""
        card = self._card(handle)
        info = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        used = sum(process.memory for process in on_card(self._file, card.uuid, self._mode(handle)))
        info.total, info.used, info.free = card.memory, used, max(0, card.memory - used)
        return info

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return self._of_kind(handle, COMPUTE)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return self._of_kind(handle, MPS)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return self._of_kind(handle, GRAPHICS)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        rates = pynvml.c_nvmlUtilization_t()
        self._without_mig(handle)
        present = on_card(self._file, self._card(handle).uuid, self._mode(handle))
        rates.gpu = min(100, sum(process.sm for process in present))
        return rates

    def nvmlDeviceGetProcessUtilization(self, handle: Any, timeStamp: int) -> list[Any]:  # noqa: N803
        """Return a sample of each process that has used SMs after `timeStamp`.

        The driver also has samples of earlier use, which only the time stamp tells apart.
        """
        self._without_mig(handle)
        now, samples = now_us(), []
        for process in on_card(self._file, self._card(handle).uuid, self._mode(handle)):
            taken, sm = (now, process.sm) if process.sm else (process.changed, process.last_sm)
            if sm and taken > timeStamp:
                samples.append(pynvml.c_nvmlProcessUtilizationSample_t(process.pid, taken, sm, 0, 0, 0))
        if not samples:
            raise fail(pynvml.NVML_ERROR_NOT_FOUND)
        return samples

    # Memory limits of cgroups.

    def nvmlDeviceSetMemoryLimits_v1(self, device: Any, limits: Any) -> None:
        """Limit the memory that the processes of a cgroup get. Raises what nvml.h says.

        A cgroup without the controller `dmem` is NOT_FOUND where the driver uses that controller (NVIDIA's text; nvml.h
        does not list this error here).
        """
        card = self._limitable(device)
        self._privileged()
        if not isinstance(limits, pynvml.c_nvmlSetMemoryLimits_v1_t):
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        soft, hard = limits.softLimit, limits.hardLimit
        most = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
        if soft > hard or any(one > card.memory and one != most for one in (soft, hard)):
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        folder, accounting = self._cgroup(limits.nameSpace), self._accounting()
        if accounting == DMEM and not has_dmem(folder):
            raise fail(pynvml.NVML_ERROR_NOT_FOUND)
        with locked(self._file):
            used = used_below(on_card(self._file, card.uuid, self._mode(device)), folder)
            write_limits(folder, card.uuid, (soft, hard), used, accounting)

    def nvmlDeviceGetMemoryLimits_v1(self, device: Any, limits: Any) -> None:
        """Write the limits of a cgroup, and the memory that its processes use, into `limits`."""
        card = self._limitable(device)
        if not isinstance(limits, pynvml.c_nvmlGetMemoryLimits_v1_t):
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        folder, accounting = self._cgroup(limits.nameSpace), self._accounting()
        with locked(self._file):
            found = holder(folder, accounting)
            known = read_limits(found, card.uuid, accounting) if found else None
            if found is None or known is None:
                raise fail(pynvml.NVML_ERROR_NOT_FOUND)
            limits.softLimit, limits.hardLimit = known
            limits.currentUsed = used_below(on_card(self._file, card.uuid, self._mode(device)), found)

    def _limitable(self, device: Any) -> Any:
        """Return the card, whose driver and mode support limits."""
        self._check()
        state = read_state(self._file)
        if not has_limit_functions(state):
            raise fail(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        # That a card in MIG mode gives this error, and not only its MIG devices, is assumed.
        if self._key(device, "card", "mig")[0] == "mig" or self._mode(device).current or not supports_limits(state):
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._card(device)

    def _accounting(self) -> str:
        return DMEM if read_state(self._file).memory_accounting == DMEM else MISC

    def _cgroup(self, name: bytes | None) -> Path:
        """Return the folder of a cgroup. Without a name the error is assumed, and without cgroup v2 also."""
        if not name:
            raise fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        folder = Path(os.fsdecode(name))
        if not folder.is_dir():
            raise fail(pynvml.NVML_ERROR_OPERATING_SYSTEM)
        if not is_cgroup_v2(folder):
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return folder

    def _of_kind(self, handle: Any, kind: str) -> list[Any]:
        """Return the processes on a card that NVML has in this list. In MIG mode only privileged callers get it."""
        card, mode = self._card(handle), self._mode(handle)
        if mode.current:
            self._privileged()
        return self._described(one for one in on_card(self._file, card.uuid, mode) if one.kind == kind)

    def _without_mig(self, handle: Any) -> None:
        if self._mode(handle).current:
            raise fail(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _described(self, processes: Iterable[GpuProcess]) -> list[Any]:
        """Return processes in the form of pynvml, each once."""
        memory: dict[int, int] = {}
        for process in processes:
            memory[process.pid] = memory.get(process.pid, 0) + process.memory
        return [
            SimpleNamespace(
                pid=pid, usedGpuMemory=memory[pid], gpuInstanceId=_NO_INSTANCE, computeInstanceId=_NO_INSTANCE
            )
            for pid in sorted(memory)
        ]
