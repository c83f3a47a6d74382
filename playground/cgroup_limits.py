"""Stores the memory limits of simulated cards in the folders of cgroups, as the kernel's `dmem` controller does.

A folder that `make_cgroup` has created stands for a cgroup, anywhere on the machine: no cgroup file system is needed.
The limits are in its files `dmem.max` and `dmem.min`, one line for each card, so they are gone with the folder. Where
the driver does its own accounting (`misc`), the file is `misc.limits`, which no real cgroup has.

The rules are those of NVIDIA's "MPS v3 Memory Partitioning" (the documentation of CUDA 13.4):

- `dmem`: every cgroup with files of the controller bounds all cgroups below it. A soft limit is added to those of all
  ancestors, which keep it when the folder is removed without setting it to 0 before.
- `misc`: the nearest cgroup that has a limit counts, and no other one.
"""

from collections.abc import Iterator
from pathlib import Path

from pynvml import NVML_DEVICE_MEMORY_LIMIT_MAX

DMEM = "dmem"
MISC = "misc"

Limits = tuple[int, int]
"""A soft and a hard limit in bytes."""
UNLIMITED: Limits = (0, NVML_DEVICE_MEMORY_LIMIT_MAX)
_CONTROLLERS = "cgroup.controllers"
_MAX = "dmem.max"
_MIN = "dmem.min"
_MISC = "misc.limits"


def make_cgroup(folder: Path, *, dmem: bool = True) -> Path:
    """Create a folder that stands for a cgroup (version 2), and return it.

    Args:
        folder: The folder; its parent exists.
        dmem: Whether the controller `dmem` is enabled for it.
    """
    folder.mkdir(exist_ok=True)
    (folder / _CONTROLLERS).touch()
    for name in (_MAX, _MIN) if dmem else ():
        (folder / name).touch()
    return folder


def is_cgroup_v2(folder: Path) -> bool:
    return (folder / _CONTROLLERS).exists()


def holder(folder: Path, accounting: str) -> Path | None:
    """Return the cgroup whose limits count for `folder` when they are read: itself or an ancestor, or None."""
    name = _MAX if accounting == DMEM else _MISC
    return next((one for one in (folder, *folder.parents) if (one / name).exists()), None)


def has_dmem(folder: Path) -> bool:
    return (folder / _MAX).exists()


def read_limits(folder: Path, uuid: str, accounting: str) -> Limits | None:
    """Return the limits of a card in this very cgroup.

    With `dmem` a cgroup that was given no limits has `UNLIMITED`. None means that the driver knows no limits of it.
    """
    if accounting == DMEM:
        return _amount(folder / _MIN, uuid, UNLIMITED[0]), _amount(folder / _MAX, uuid, UNLIMITED[1])
    found = _lines(folder / _MISC).get(uuid)
    soft, _, hard = (found or "").partition(",")
    return (int(soft), int(hard)) if found else None


def write_limits(folder: Path, uuid: str, limits: Limits, used: int, accounting: str) -> None:
    """Write the limits of a card. A hard limit below `used`, the memory in use, does not take effect with `dmem`.

    That is what the kernel does: it reports success, and the limit stays as it was (`set_resource_max` in
    kernel/cgroup/dmem.c up to at least Linux 6.19).
    """
    soft, hard = limits
    if accounting != DMEM:
        _write(folder / _MISC, uuid, f"{soft},{hard}")
        return
    change = soft - _amount(folder / _MIN, uuid, 0)
    _write(folder / _MIN, uuid, str(soft))
    for ancestor in folder.parents:
        if not (ancestor / _MIN).exists():
            break
        _write(ancestor / _MIN, uuid, str(max(0, _amount(ancestor / _MIN, uuid, 0) + change)))
    if hard >= used:
        _write(folder / _MAX, uuid, str(hard))


def limited_ancestors(folder: Path, uuid: str, accounting: str) -> Iterator[tuple[Path, int]]:
    """Yield each cgroup whose hard limit bounds a process in `folder`, with that limit."""
    for one in (folder, *folder.parents):
        limits = read_limits(one, uuid, accounting)
        if limits is None or limits[1] == UNLIMITED[1]:
            continue
        yield one, limits[1]
        if accounting != DMEM:
            return


def _lines(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return dict(line.split(" ", 1) for line in lines)


def _amount(file: Path, uuid: str, default: int) -> int:
    return int(_lines(file).get(uuid, default))


def _write(file: Path, uuid: str, value: str) -> None:
    lines = _lines(file) | {uuid: value}
    file.write_text("".join(f"{key} {lines[key]}\n" for key in sorted(lines)))
