"""The processes on simulated cards, with the memory and the compute that they use.

Each process is a file `<state file>.clients/<uuid>/<pid>`, where the UUID is that of a card or of a MIG device. The
container runtime registers the processes (`playground.nvml_state.register`), and `use` says what a process uses. Tests
and the playground call it; `playground.simulated_memory` reports it as NVML does. An allocation above a limit of the
process's cgroup, or above what the card has left, is refused here, as the driver refuses it.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from playground.cgroup_limits import limited_ancestors
from playground.nvml_state import (
    Mode,
    State,
    client_file,
    clients,
    locked,
    proc_folder,
    read_state,
    supports_limits,
)

COMPUTE = "compute"
MPS = "mps"
GRAPHICS = "graphics"
_ROOT = "0::/init.scope\n"
_OWN = "0::/system.slice/mgpu-agent.service\n"
_STAT = "{pid} (main) S{fields}\n"
_FIELDS_AFTER_STATE = 49


class OutOfMemory(Exception):
    """The driver refuses the allocation: CUDA reports CUDA_ERROR_OUT_OF_MEMORY. The message names the limit."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a card or on a MIG device.

    Attributes:
        pid: The process id, as the host counts.
        cgroup: The folder of its cgroup; "" if nothing has said it.
        memory: The memory that it has allocated, in bytes.
        sm: The percentage of the SMs that it uses now.
        last_sm: The percentage that it used before the last change of `sm`.
        changed: The time of that change in microseconds of the wall clock. The driver keeps older samples.
        kind: In which of NVML's lists the process is: `compute`, `mps` (a client of MPS) or `graphics`.
    """

    pid: int
    cgroup: str = ""
    memory: int = 0
    sm: int = 0
    last_sm: int = 0
    changed: int = 0
    kind: str = COMPUTE


def now_us() -> int:
    """Return the wall clock in microseconds, in which the driver states the times of samples."""
    return time.time_ns() // 1000


def use(
    file: Path,
    uuid: str,
    pid: int,
    *,
    memory: int | None = None,
    sm: int | None = None,
    cgroup: str | Path | None = None,
    kind: str | None = None,
    total: int | None = None,
) -> GpuProcess:
    """Set what a process uses of a card or MIG device, and return the process, which is registered if it was not.

    Args:
        file: The state file.
        uuid: The card or the MIG device.
        pid: The process id.
        memory: All memory that the process has after the call, in bytes. None leaves it unchanged, like the next three.
        sm: The percentage of the SMs.
        cgroup: The folder of the process's cgroup.
        kind: `COMPUTE`, `MPS` or `GRAPHICS`.
        total: The memory of the card; None means that it has enough.

    Raises OutOfMemory if the process gets more memory than before, and a limit or the card does not allow that. The
    state does not change then.
    """
    with locked(file):
        before = _read(file, uuid, pid) or GpuProcess(pid)
        after = before if cgroup is None else replace(before, cgroup=str(cgroup))
        after = after if kind is None else replace(after, kind=kind)
        if memory is not None:
            more = memory - before.memory
            if more > 0:
                _check_room(file, uuid, after, more, total)
            after = replace(after, memory=memory)
        if sm is not None:
            after = replace(after, sm=sm, last_sm=before.sm, changed=now_us())
        path = client_file(file, uuid, pid)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{pid}")
        new.write_text(json.dumps(asdict(after)))
        os.replace(new, path)
    return after


def write_proc(file: Path, pid: int, cgroup: str) -> None:
    """Let the kernel know a process and its cgroup, as /proc/PID of a host does (`proc_folder`).

    Args:
        cgroup: The path of the cgroup below the root of all cgroups.
    """
    folder = proc_of_host(file) / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (folder / "stat").write_text(_STAT.format(pid=pid, fields=" 0" * _FIELDS_AFTER_STATE))


def proc_of_host(file: Path) -> Path:
    """Return the folder like /proc. If it does not exist yet, create it with the first process and the agent."""
    root = proc_folder(file)
    for name, text in (("1", _ROOT), ("self", _OWN)):
        if not (root / name / "cgroup").exists():
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / "cgroup").write_text(text)
    return root


def remove_proc(file: Path, pid: int) -> None:
    shutil.rmtree(proc_folder(file) / str(pid), ignore_errors=True)


def on_device(file: Path, uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes on a card or on a MIG device, by process id. Those on a card's MIG devices are not on it."""
    found = (_read(file, uuid, pid) for pid in clients(file, uuid))
    return tuple(process for process in found if process)


def on_card(file: Path, uuid: str, mode: Mode) -> tuple[GpuProcess, ...]:
    """Return the processes on a card and on all of its instances, by process id; one process may be listed twice."""
    devices = [uuid, *(compute.uuid for gpu in mode.instances for compute in gpu.compute)]
    found = [process for device in devices for process in on_device(file, device)]
    return tuple(sorted(found, key=lambda process: (process.pid, process.memory)))


def used_below(processes: Iterable[GpuProcess], cgroup: Path) -> int:
    """Return the memory that the processes of a cgroup and of the cgroups below it use, in bytes."""
    return sum(p.memory for p in processes if p.cgroup and Path(p.cgroup).is_relative_to(cgroup))


def _check_room(file: Path, uuid: str, process: GpuProcess, more: int, total: int | None) -> None:
    state: State = read_state(file)
    present = on_device(file, uuid)
    if total is not None and sum(p.memory for p in present) + more > total:
        raise OutOfMemory(f"{uuid} has no {more} bytes left")
    if not process.cgroup or not supports_limits(state):
        return
    others = [p for p in present if p.pid != process.pid]
    mine = next((p.memory for p in present if p.pid == process.pid), 0)
    for folder, hard in limited_ancestors(Path(process.cgroup), uuid, state.memory_accounting):
        if used_below(others, folder) + mine + more > hard:
            raise OutOfMemory(f"the limit of {folder} on {uuid} is {hard} bytes")


def _read(file: Path, uuid: str, pid: int) -> GpuProcess | None:
    """Return the process, or None if it is not registered. `register` creates an empty file."""
    try:
        content = client_file(file, uuid, pid).read_bytes()
    except FileNotFoundError:
        return None
    return GpuProcess(**json.loads(content)) if content else GpuProcess(pid)
