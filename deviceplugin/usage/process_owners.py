"""Finds out in which containers processes run, by their cgroups in /proc.

NVML names processes by the ids that they have on the host. The agent can look them up only in the host's process name
space (`hostPID`); in its own one, the same number is another process, or none. So `ProcessOwners.problem` must be None
before `find` is called.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from deviceplugin.usage.cgroup_names import CgroupName, find_container, names_container
from mgpu.model.usage_problems import UsageProblem

_START_FIELD = 19
"""The place of the start time in /proc/PID/stat, counted from 0 after the name of the program (`man 5 proc`)."""


class Unowned(Enum):
    """Why a process belongs to no container."""

    GONE = auto()
    """It has ended, or another process has its id by now."""
    FOREIGN = auto()
    """It runs outside of all pods."""


Owner = CgroupName | Unowned


@dataclass(frozen=True, slots=True)
class Owners:
    """The containers of processes.

    Attributes:
        by_pid: The owner of each process.
        problem: A problem because of which no owner is known; None if there is none.
    """

    by_pid: Mapping[int, Owner]
    problem: UsageProblem | None = None


def ticks_since_boot() -> int:
    """Return the time since the boot in the unit of /proc/PID/stat."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


class ProcessOwners:
    """The owners of processes, according to the kernel.

    Args:
        proc: The folder /proc of the process name space in which NVML counts.
        clock: A function that returns the time since the boot in ticks.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], int] = ticks_since_boot) -> None:
        self._proc = proc
        self._clock = clock

    def now(self) -> int:
        """Return the present time. A process that starts later cannot be one that was listed before."""
        return self._clock()

    def problem(self) -> UsageProblem | None:
        """Return why the ids of processes mean nothing here; None if this is the process name space of the host.

        In a name space of its own, the first process is that of this container, or that of the pod if the containers
        of the pod share a name space. On a host it is in no container.
        """
        try:
            first, own = (self._proc / "1/cgroup").read_text(), (self._proc / "self/cgroup").read_text()
        except PermissionError:
            return UsageProblem.PROC_NOT_READABLE
        except OSError:
            return UsageProblem.NO_HOST_PIDS
        return UsageProblem.NO_HOST_PIDS if first == own or names_container(first) else None

    def find(self, pids: Iterable[int], listed: int) -> Owners:
        """Return the owners of processes that NVML has listed after the time `listed` (`now`)."""
        if problem := self.problem():
            return Owners({}, problem)
        found: dict[int, Owner] = {}
        for pid in sorted({*pids}):
            try:
                found[pid] = self._owner(pid, listed)
            except PermissionError:
                # A security module forbids it, not the process itself, so no other one can be read either.
                return Owners({}, UsageProblem.PROC_NOT_READABLE)
        return Owners(found)

    def _owner(self, pid: int, listed: int) -> Owner:
        """Return the owner. The start time is read last: the file that was read before then belongs to that process."""
        try:
            text = (self._proc / str(pid) / "cgroup").read_text()
            stat = (self._proc / str(pid) / "stat").read_text()
        except PermissionError:
            raise
        except OSError:
            return Unowned.GONE  # ENOENT, or ESRCH if it ends meanwhile.
        started = int(stat.rpartition(")")[2].split()[_START_FIELD])
        # A process that started after the listing has got the id of a listed one that has ended.
        return Unowned.GONE if started > listed else find_container(text) or Unowned.FOREIGN
