"""Stores the state of simulated MIG cards in a JSON file, so that the state survives the processes that use it.

`playground.simulated_nvml` changes the state as NVML would, in the process of the node agent. The container runtime
registers the processes on each device as files `<file>.clients/<uuid>/<pid>`, in which `playground.gpu_processes` says
what the processes use. A file lock guards every change, because several processes change the files. `mgpu demo` reads
the state, and tests change it as an administrator or a reboot would.
"""

import fcntl
import json
import os
import shutil
import time
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

_SUFFIX = ".mig.json"
_FIRST_WITH_LIMITS = 615
_NAMESPACE = uuids.UUID("6f1a2c8e-5a0c-4c39-9d7e-0b9b6d0f4a11")


@dataclass
class Compute:
    """A compute instance.

    Attributes:
        id: The id that NVML reports. It is unique within the GPU instance.
        kind: The number of its profile in NVML (`NVML_COMPUTE_INSTANCE_PROFILE_…`).
        uuid: The UUID of its MIG device.
    """

    id: int
    kind: int
    uuid: str


@dataclass
class Gpu:
    """A GPU instance.

    Attributes:
        id: The id that NVML reports. Another instance may get it after this one is destroyed.
        serial: A number that no other instance in the file ever gets.
        profile: The name of its profile.
        start: The number of its first memory slice.
        compute: Its compute instances.
    """

    id: int
    serial: int
    profile: str
    start: int
    compute: list[Compute] = field(default_factory=list)


@dataclass
class Mode:
    """The MIG mode and the GPU instances of a card.

    Attributes:
        current: Whether MIG is enabled now.
        pending: Whether MIG is enabled after the next reset.
        instances: The GPU instances.
    """

    current: bool = False
    pending: bool = False
    instances: list[Gpu] = field(default_factory=list)


@dataclass
class State:
    """The content of the file.

    Attributes:
        privileged: Whether NVML permits changes.
        passthrough: Whether the machine cannot reset its cards, as in a virtual machine.
        driver: The version of the driver.
        memory_accounting: How the driver counts the memory of cgroups: "dmem" (by the kernel's controller), "misc" (by
            itself), or "" (not at all). A driver older than R615 cannot.
        serial: The serial number that was given last.
        cards: The modes of the cards by UUID. A card that is missing was never changed.
    """

    privileged: bool = True
    passthrough: bool = False
    driver: str = "580.126.09"
    memory_accounting: str = "dmem"
    serial: int = 0
    cards: dict[str, Mode] = field(default_factory=dict)

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial


def state_file(cards: Path) -> Path:
    """Return the state file of the cards that a file lists: `cards.mig.json` next to `cards.yaml`."""
    return cards.with_suffix(_SUFFIX)


def mig_uuid(card: str, serial: int, compute: int) -> str:
    """Return the UUID of a MIG device, which depends only on the arguments.

    Args:
        card: The UUID of the card.
        serial: The serial number of the GPU instance.
        compute: The serial number of the compute instance.
    """
    return f"MIG-{uuids.uuid5(_NAMESPACE, f'{card}/{serial}/{compute}')}"


def read_state(file: Path) -> State:
    """Return the state, which the caller must not change. If the file does not exist, return the state of new cards.

    Raises OSError if the file cannot be read, and ValueError if it is not JSON.
    """
    return _known(file, _written(file))


def _written(file: Path) -> int:
    """Return the modification time of the file in nanoseconds, or 0 if the file does not exist.

    `changing` gives every version of the file another time, so the time identifies the version.
    """
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _parsed(file: Path, written: int) -> State:
    raw: dict[str, Any] = json.loads(file.read_bytes()) if written else {"cards": {}}
    cards = {}
    for uuid, mode in raw.pop("cards").items():
        made = [Gpu(**{**gpu, "compute": [Compute(**c) for c in gpu["compute"]]}) for gpu in mode.pop("instances")]
        cards[uuid] = Mode(**mode, instances=made)
    return State(**raw, cards=cards)


# The states by file and modification time. Every function of NVML reads the state, which changes rarely.
_known = lru_cache(maxsize=16)(_parsed)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock that guards the state file and the files of processes and cgroups beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def changing(file: Path) -> Iterator[State]:
    """Lock the file and return its state for changes, which are written atomically if the block raises no exception."""
    with locked(file):
        before = _written(file)
        state = _parsed(file, before)
        yield state
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(state, default=vars))
        after = max(time.time_ns(), before + 1)
        os.utime(new, ns=(after, after))
        os.replace(new, file)


# The functions below do what the container runtime and the administrator of a real machine do.


def register(file: Path, uuid: str, pid: int) -> None:
    """Record that a process runs on the MIG device or card with this UUID."""
    path = client_file(file, uuid, pid)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def deregister(file: Path, uuid: str, pid: int) -> None:
    client_file(file, uuid, pid).unlink(missing_ok=True)


def client_file(file: Path, uuid: str, pid: int) -> Path:
    """Return the file of a process on a MIG device or card. `playground.gpu_processes` knows its content."""
    return _clients(file, uuid) / str(pid)


def proc_folder(file: Path) -> Path:
    """Return the folder that the agents of simulated cards read instead of /proc (`playground.gpu_processes`)."""
    return file.with_name(f"{file.name}.proc")


def cgroup_root(file: Path) -> Path:
    """Return the folder that stands for the root of the node's cgroups (`playground.cgroup_limits`)."""
    return file.with_name(f"{file.name}.cgroup")


def clients(file: Path, uuid: str) -> tuple[int, ...]:
    """Return the ids of the processes that run on the MIG device or card, in ascending order."""
    try:
        return tuple(sorted(int(entry.name) for entry in _clients(file, uuid).iterdir() if entry.name.isdigit()))
    except FileNotFoundError:
        return ()


def processes(file: Path, card: str, mode: Mode) -> tuple[int, ...]:
    """Return the ids of the processes on a card and on all of its instances, in ascending order."""
    devices = [card, *(compute.uuid for gpu in mode.instances for compute in gpu.compute)]
    return tuple(sorted({pid for uuid in devices for pid in clients(file, uuid)}))


def set_switch(file: Path, *, privileged: bool | None = None, passthrough: bool | None = None) -> None:
    """Change `State.privileged` and `State.passthrough`. None leaves a value unchanged."""
    with changing(file) as state:
        state.privileged = state.privileged if privileged is None else privileged
        state.passthrough = state.passthrough if passthrough is None else passthrough


def set_driver(file: Path, version: str, *, memory_accounting: str = "dmem") -> None:
    """Install a version of the driver, which counts the memory of cgroups in this way (`State.memory_accounting`)."""
    with changing(file) as state:
        state.driver, state.memory_accounting = version, memory_accounting


def has_limit_functions(state: State) -> bool:
    """Return whether the driver's library has the functions for memory limits, which R615 added."""
    return int(state.driver.partition(".")[0]) >= _FIRST_WITH_LIMITS


def supports_limits(state: State) -> bool:
    """Return whether the driver limits the memory of cgroups. An administrator can switch that off."""
    return has_limit_functions(state) and bool(state.memory_accounting)


def reset(file: Path, uuid: str) -> bool:
    """Reset a card, as `nvidia-smi --gpu-reset` does: its pending mode takes effect and its instances are removed.

    If processes run on the card, change nothing and return False.
    """
    with changing(file) as state:
        mode = state.cards.get(uuid, Mode())
        if processes(file, uuid, mode):
            return False
        state.cards[uuid] = Mode(mode.pending, mode.pending)
    return True


def reboot(file: Path, *, forgetful: frozenset[str] = frozenset()) -> None:
    """Change the state as a reboot of the machine does: processes and instances are gone, pending modes take effect.

    Args:
        forgetful: The UUIDs of the cards that leave MIG mode (`playground.simulated_nvml.forgetful`).
    """
    with changing(file) as state:
        for uuid, mode in state.cards.items():
            on = mode.pending and uuid not in forgetful
            state.cards[uuid] = Mode(on, on)
    for folder in (_clients_root(file), proc_folder(file), cgroup_root(file)):
        shutil.rmtree(folder, ignore_errors=True)


def _clients_root(file: Path) -> Path:
    return file.with_name(f"{file.name}.clients")


def _clients(file: Path, uuid: str) -> Path:
    return _clients_root(file) / uuid
