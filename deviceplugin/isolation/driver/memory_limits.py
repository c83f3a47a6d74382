"""Sets and reads the memory limits of cgroups through NVML (driver R615 and later, CUDA 13.4).

`MemoryLimits` initializes NVML for each call, so that the agent can use a driver that was updated in the meantime. The
rules come from nvml.h 13.4 (`nvmlDeviceSetMemoryLimits_v1`) and from NVIDIA's page "MPS v3 Memory Partitioning":

- The name of a cgroup is the full path of its folder. Setting a limit requires root; reading does not.
- The soft limit stays 0. A higher one would be added to those of the cgroup's ancestors, which keep it after the
  container has ended.
- Linux up to at least 6.19 ignores a hard limit below the present use, and reports success. So a limit is read again
  after it was set.
- Managed memory (`cudaMallocManaged`) is not limited.
"""

# ruff: noqa: N802 (the names are the pynvml module's)

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml

from deviceplugin.isolation.backend import Unable

UNLIMITED = int(pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
_TOO_OLD = "the driver is older than R615, which is the first one that limits the memory of cgroups"
_REASONS = {
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: _TOO_OLD,
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the driver does not limit memory on this card: it is in MIG mode, or the "
    "driver's accounting of memory is off (registry key RmMemacctMode)",
    pynvml.NVML_ERROR_NO_PERMISSION: "the agent may not set limits (manifests/components/isolation-driver)",
    pynvml.NVML_ERROR_NOT_FOUND: "the cgroup has no controller for the memory of cards (dmem)",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "the cgroup is gone, or the agent cannot open it",
}


class Nvml(Protocol):
    """The part of the `pynvml` module that is used here. Each function may raise pynvml.NVMLError."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceSetMemoryLimits_v1(self, device: Any, limits: Any) -> None: ...
    def nvmlDeviceGetMemoryLimits_v1(self, device: Any, limits: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a cgroup on one card, in bytes.

    Attributes:
        hard: The most memory that its processes get; None if there is no limit.
        used: The memory that they have.
    """

    hard: int | None
    used: int


class MemoryLimits:
    """Access to the limits. Thread-safe. The calls may block, so call them on a thread.

    Args:
        nvml: The `pynvml` module, or a simulated one.
    """

    def __init__(self, nvml: Nvml = pynvml) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()

    def unable_reason(self, cgroup: Path) -> str | None:
        """Return why the driver limits memory on no card of the node, or None if it does on some card.

        The question needs no permission, so the answer does not say whether this process may set limits.

        Args:
            cgroup: Any cgroup of the host, such as its root.
        """
        try:
            with self._nvml_session():
                count = self._nvml.nvmlDeviceGetCount()
                reasons = [
                    self._unable_reason_of(self._nvml.nvmlDeviceGetHandleByIndex(i), cgroup) for i in range(count)
                ]
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        return next((reason for reason in reasons if reason), "there are no cards") if all(reasons) else None

    def _unable_reason_of(self, device: Any, cgroup: Path) -> str | None:
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t(os.fsencode(cgroup), 0, 0, 0)
        try:
            self._nvml.nvmlDeviceGetMemoryLimits_v1(device, limits)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_FOUND:
                return None  # The driver answers about limits, and this cgroup has none.
            return _REASONS.get(error.value, f"NVML: {error}")
        return None

    def read(self, uuid: str, cgroup: Path) -> Limit | Unable:
        """Return the limit of the cgroup on the card."""
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t(os.fsencode(cgroup), 0, 0, 0)
        try:
            with self._nvml_session():
                self._nvml.nvmlDeviceGetMemoryLimits_v1(self._nvml.nvmlDeviceGetHandleByUUID(uuid), limits)
        except pynvml.NVMLError as error:
            return Unable(_REASONS.get(error.value, f"NVML: {error}"))
        hard = int(limits.hardLimit)
        return Limit(None if hard == UNLIMITED else hard, int(limits.currentUsed))

    def set(self, uuid: str, cgroup: Path, limit: int) -> Limit | Unable:
        """Set the hard limit in bytes, and return the limit that is in force afterwards."""
        wanted = pynvml.c_nvmlSetMemoryLimits_v1_t(os.fsencode(cgroup), 0, limit)
        try:
            with self._nvml_session():
                self._nvml.nvmlDeviceSetMemoryLimits_v1(self._nvml.nvmlDeviceGetHandleByUUID(uuid), wanted)
        except pynvml.NVMLError as error:
            return Unable(_REASONS.get(error.value, f"NVML: {error}"))
        return self.read(uuid, cgroup)

    @contextmanager
    def _nvml_session(self) -> Iterator[None]:
        with self._lock:
            self._nvml.nvmlInit()
            try:
                yield
            finally:
                self._nvml.nvmlShutdown()
