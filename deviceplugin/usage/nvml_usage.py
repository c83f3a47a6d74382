"""Reads from NVML what processes use of the cards.

An MPS client is a process of its own: since Volta it has its own memory on the card, and NVML lists it among the MPS
processes. A process may be in several of NVML's lists, each time with all of its memory, so it counts once.
"""

# ruff: noqa: N802 (the names are the pynvml module's)

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml

from mgpu.model.usage_problems import UsageProblem

log = logging.getLogger(__name__)

_ABSENT = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
_NO_SAMPLES = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS)
"""The errors of pynvml if no process has used the SMs. It also raises "success" if the driver's first answer is that
there is room for all samples, because there are none."""
_MOST_PERCENT = 100


class Nvml(Protocol):
    """The functions of the `pynvml` module that are needed here. Each may raise pynvml.NVMLError."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetProcessUtilization(self, handle: Any, timeStamp: int) -> list[Any]: ...  # noqa: N803


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses of a card.

    Attributes:
        memory: Its memory in bytes; None if NVML does not say it.
        sm: Its use of the SMs since the last reading, from 0 to 1; None if NVML does not say it.
    """

    pid: int
    memory: int | None
    sm: float | None


@dataclass(frozen=True, slots=True)
class CardReading:
    """What NVML says about the use of one card.

    Attributes:
        card: The UUID of the card.
        memory: The memory in use, in bytes, with what the driver itself uses; None if NVML does not say it.
        sm: The part of the time in which a kernel ran, from 0 to 1; None if NVML does not say it.
        processes: The processes on the card, by process id; None if they could not be listed.
        problem: What failed; None if nothing did.
    """

    card: str
    memory: int | None = None
    sm: float | None = None
    processes: tuple[ProcessUse, ...] | None = None
    problem: UsageProblem | None = None


class NvmlUsage:
    """The reader of NVML. Only one thread at a time may use it.

    Args:
        nvml: The `pynvml` module, or a fake.
    """

    def __init__(self, nvml: Nvml = pynvml) -> None:
        self._nvml = nvml
        # The time stamp of the newest sample that was read, by the UUID of the card.
        self._seen: dict[str, int] = {}
        self._failed: dict[str, str] = {}

    def read(self, cards: Sequence[str]) -> tuple[CardReading, ...]:
        """Return what is used of the cards with these UUIDs. Failures are in the result, and in the log once."""
        try:
            self._nvml.nvmlInit()
        except pynvml.NVMLError as error:
            return tuple(self._failure(uuid, error) for uuid in cards)
        try:
            return tuple(map(self._card, cards))
        finally:
            try:
                self._nvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.warning("NVML did not shut down: %s", error)

    def _card(self, uuid: str) -> CardReading:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            memory = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            rates = self._optional(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        except pynvml.NVMLError as error:
            return self._failure(uuid, error)
        sm = None if rates is None else _ratio(rates.gpu)
        try:
            processes = self._processes(uuid, handle)
        except pynvml.NVMLError as error:
            failed = self._failure(uuid, error)
            return CardReading(uuid, memory, sm, None, failed.problem)
        self._failed.pop(uuid, None)
        return CardReading(uuid, memory, sm, processes)

    def _processes(self, uuid: str, handle: Any) -> tuple[ProcessUse, ...]:
        listed = [self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        others = (self._nvml.nvmlDeviceGetMPSComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses)
        listed += [self._optional(function, handle) or [] for function in others]
        memory = _memory_by_pid(process for processes in listed for process in processes)
        sm = self._sm_by_pid(uuid, handle)
        return tuple(ProcessUse(pid, memory[pid], None if sm is None else sm.get(pid, 0.0)) for pid in sorted(memory))

    def _sm_by_pid(self, uuid: str, handle: Any) -> Mapping[int, float] | None:
        """Return how much of the SMs each process has used since the last reading; None if that is not known.

        A process that has used none is missing. The driver keeps samples for a while, and nothing but their time stamps
        tells which are new. So the first reading only learns the time of the newest sample.
        """
        is_first = uuid not in self._seen
        since = self._seen.setdefault(uuid, 0)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except pynvml.NVMLError as error:
            if error.value in _NO_SAMPLES:
                return None if is_first else {}
            del self._seen[uuid]
            if error.value in _ABSENT:
                return None
            raise
        # Some drivers fill up the array with samples of no process, or of impossible amounts.
        new = [s for s in samples if s.pid and s.timeStamp > since and s.smUtil <= _MOST_PERCENT]
        self._seen[uuid] = max((int(s.timeStamp) for s in new), default=since)
        if is_first:
            return None
        of_pid: dict[int, list[int]] = {}
        for sample in new:
            of_pid.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        return {pid: _ratio(sum(values) / len(values)) for pid, values in of_pid.items()}

    def _optional(self, function: Callable[[Any], Any], handle: Any) -> Any:
        """Call a function that not every driver and card has. Return None if it is missing."""
        try:
            return function(handle)
        except pynvml.NVMLError as error:
            if error.value in _ABSENT:
                return None
            raise

    def _failure(self, uuid: str, error: pynvml.NVMLError) -> CardReading:
        denied = error.value == pynvml.NVML_ERROR_NO_PERMISSION
        if self._failed.get(uuid) != str(error):
            log.warning("cannot read what is used of card %s: NVML: %s", uuid, error)
            self._failed[uuid] = str(error)
        return CardReading(uuid, problem=UsageProblem.NO_PERMISSION if denied else UsageProblem.NVML)


def _memory_by_pid(processes: Iterable[Any]) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for process in processes:
        before, now = found.get(process.pid), process.usedGpuMemory
        found[process.pid] = now if before is None else max(before, now or 0)
    return found


def _ratio(percent: float) -> float:
    return min(max(percent, 0), _MOST_PERCENT) / _MOST_PERCENT
