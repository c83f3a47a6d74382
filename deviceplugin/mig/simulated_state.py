"""The state of simulated MIG cards, in a JSON file that outlives the processes that use it.

Beside it `<file>.clients/<uuid>/<pid>`: the processes that run on a card or a MIG device.
"""

import fcntl
import json
import os
import shutil
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_NAMESPACE = uuids.UUID("6f1a2c8e-5a0c-4c39-9d7e-0b9b6d0f4a11")


@dataclass
class Compute:
    """A compute instance. kind: of its profile. uuid: of the MIG device that it is."""

    id: int
    kind: int
    uuid: str


@dataclass
class Gpu:
    """A GPU instance. serial: no other instance ever has it; ids are used again."""

    id: int
    serial: int
    profile: str
    start: int
    compute: list[Compute] = field(default_factory=list)


@dataclass
class Mode:
    """A card's MIG mode, now and after the next reset, and its instances."""

    current: bool = False
    pending: bool = False
    instances: list[Gpu] = field(default_factory=list)


@dataclass
class State:
    """privileged: whether NVML lets its user change anything. passthrough: whether no card can be reset from inside,
    as in a virtual machine. serial: of the last instance. cards: by UUID; one that is not there was never changed.
    """

    privileged: bool = True
    passthrough: bool = False
    serial: int = 0
    cards: dict[str, Mode] = field(default_factory=dict)

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial


def mig_uuid(card: str, serial: int, compute: int) -> str:
    """The same for the same creation on the same card, another for every other."""
    return f"MIG-{uuids.uuid5(_NAMESPACE, f'{card}/{serial}/{compute}')}"


def read_state(file: Path) -> State:
    """Raises OSError and ValueError; a file that is not there yet is the state of new cards."""
    try:
        return _parsed(json.loads(file.read_bytes()))
    except FileNotFoundError:
        return State()


def _parsed(raw: dict[str, Any]) -> State:
    cards = {}
    for uuid, mode in raw.pop("cards").items():
        made = [Gpu(**{**gpu, "compute": [Compute(**c) for c in gpu["compute"]]}) for gpu in mode.pop("instances")]
        cards[uuid] = Mode(**mode, instances=made)
    return State(**raw, cards=cards)


@contextmanager
def changing(file: Path) -> Iterator[State]:
    """The state, to be changed by nobody else meanwhile; written when the block ends well, as a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = read_state(file)
        yield state
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(asdict(state), indent=1))
        os.replace(new, file)


# For who plays the machine around the cards: the runtime, an administrator.


def register(file: Path, uuid: str, pid: int) -> None:
    """A process runs on the MIG device or card with this UUID from now on."""
    folder = _clients(file, uuid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(pid)).touch()


def deregister(file: Path, uuid: str, pid: int) -> None:
    """It has ended."""
    (_clients(file, uuid) / str(pid)).unlink(missing_ok=True)


def clients(file: Path, uuid: str) -> tuple[int, ...]:
    """The processes that run on it, ascending."""
    try:
        return tuple(sorted(int(entry.name) for entry in _clients(file, uuid).iterdir()))
    except FileNotFoundError:
        return ()


def processes(file: Path, card: str, mode: Mode) -> tuple[int, ...]:
    """The processes on a card and all of its instances."""
    devices = [card, *(compute.uuid for gpu in mode.instances for compute in gpu.compute)]
    return tuple(sorted({pid for uuid in devices for pid in clients(file, uuid)}))


def set_switch(file: Path, *, privileged: bool | None = None, passthrough: bool | None = None) -> None:
    """See State; None: as it was."""
    with changing(file) as state:
        state.privileged = state.privileged if privileged is None else privileged
        state.passthrough = state.passthrough if passthrough is None else passthrough


def reset(file: Path, uuid: str) -> bool:
    """Reset a card (`nvidia-smi --gpu-reset`): a pending mode comes into force, its instances are gone.

    False: nothing was done, since processes run on it.
    """
    with changing(file) as state:
        mode = state.cards.get(uuid, Mode())
        if processes(file, uuid, mode):
            return False
        state.cards[uuid] = Mode(mode.pending, mode.pending)
    return True


def reboot(file: Path, *, forgetful: frozenset[str] = frozenset()) -> None:
    """All processes and instances are gone, pending modes are in force.

    forgetful: the cards that do not keep their mode (`deviceplugin.mig.simulated_nvml.forgetful`).
    """
    with changing(file) as state:
        for uuid, mode in state.cards.items():
            on = mode.pending and uuid not in forgetful
            state.cards[uuid] = Mode(on, on)
    shutil.rmtree(_clients_root(file), ignore_errors=True)


def _clients_root(file: Path) -> Path:
    return file.with_name(f"{file.name}.clients")


def _clients(file: Path, uuid: str) -> Path:
    return _clients_root(file) / uuid
