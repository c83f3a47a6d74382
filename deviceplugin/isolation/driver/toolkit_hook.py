"""Finds the hook with which NVIDIA's container toolkit sets memory limits, and makes the call for a container.

Since version 1.20 the toolkit has the subcommand `apply-cuda-memory-limits` of `nvidia-cdi-hook`, an OCI hook
`createRuntime`: it reads two variables of the container, each a number of MiB, and sets the limits of the container's
cgroup through NVML before the first process starts. An older toolkit ignores the subcommand with a warning, so the
agent checks afterwards that the limit is in force (`backend`).

Source: NVIDIA/nvidia-container-toolkit, pull request 2075 (September 2026),
cmd/nvidia-cdi-hook/apply-cuda-memory-limits/apply-cuda-memory-limits.go.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from deviceplugin.delivery.cdi import Edits, Hook
from deviceplugin.isolation.limits import CardLimit

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
_SUBCOMMAND = "apply-cuda-memory-limits"
_DRIVER_ROOT = "--driver-root"
_MIB = 1 << 20
_MOST_BYTES = 4 << 20
"""A larger CDI spec is not read. Those of NVIDIA's toolkit have about 20 KiB for each card."""
_REQUEST, _LIMIT = "NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"


@dataclass(frozen=True, slots=True)
class ToolkitHook:
    """The hook of the toolkit that is installed on this node.

    Attributes:
        path: The path of the program on the host.
        args: The arguments up to the subcommand.
        driver_root: The folder of the host in which the driver is installed; "" for the root of the file system.
    """

    path: str
    args: tuple[str, ...]
    driver_root: str = ""


def whole_mib(limit: int) -> int:
    """Return a limit in bytes as a number of MiB, rounded down, but at least 1."""
    return max(1, limit // _MIB)


def hook_edits(hook: ToolkitHook, limits: Sequence[CardLimit]) -> Edits | None:
    """Return the edits of a container with these limits; None if the hook cannot set them.

    The hook sets the same limit on all cards. The request, which becomes the soft limit, is 0: without it the hook sets
    it to the limit, and the kernel adds a soft limit to those of all ancestors of the cgroup, which keep it after the
    container has ended.
    """
    amounts = {whole_mib(limit.memory) for limit in limits if limit.memory is not None}
    if len(amounts) != 1 or any(limit.memory is None for limit in limits):
        return None
    (mib,) = amounts
    cards = [word for limit in limits for word in ("--gpu-id", limit.card.uuid)]
    call = (*hook.args, _SUBCOMMAND, _DRIVER_ROOT, hook.driver_root, *cards)
    return Edits({_REQUEST: "0", _LIMIT: str(mib)}, hooks=(Hook("createRuntime", hook.path, call),))


def without_limit(variables: Iterable[str]) -> dict[str, str]:
    """Return values with which these variables say that there is no limit. The hook is not called where they hold."""
    return {name: "" for name in variables if name == _LIMIT}


def find_hook(setting: str, folders: Sequence[Path]) -> ToolkitHook | None:
    """Return the hook of this node, or None if there is none.

    Args:
        setting: The setting `deviceplugin.memoryLimitHook`: a path on the host, `none`, or `auto`, which looks for a
            call of the hook in the CDI specs that NVIDIA's toolkit has generated.
        folders: The folders of the CDI specs.
    """
    if setting == NONE:
        return None
    if setting != AUTO:
        name = Path(setting).name
        return ToolkitHook(setting, (name, "hook") if name == "nvidia-ctk" else (name,))
    files = sorted(file for folder in folders for pattern in ("*.json", "*.yaml") for file in folder.glob(pattern))
    return next((hook for file in files for hook in _hooks_in(file)), None)


def _hooks_in(file: Path) -> Iterator[ToolkitHook]:
    """Yield the calls of the hook in a CDI spec. Other programs write these files, so an unreadable one has none."""
    if file.name.startswith("mgpu_"):
        return
    try:
        if file.stat().st_size > _MOST_BYTES:
            return
        text = file.read_bytes()
        if _SUBCOMMAND.encode() not in text:
            return
        spec = orjson.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.debug("ignoring CDI file %s: %s", file, error)
        return
    if not isinstance(spec, dict):
        return
    devices = spec.get("devices")
    parts = [spec, *(devices if isinstance(devices, list) else ())]
    for part in parts:
        yield from _hooks_of(part.get("containerEdits") if isinstance(part, dict) else None)


def _hooks_of(edits: Mapping[str, Any] | None) -> Iterator[ToolkitHook]:
    rows = edits.get("hooks") if isinstance(edits, dict) else None
    for row in rows if isinstance(rows, list) else ():
        args = row.get("args") if isinstance(row, dict) else None
        if not isinstance(args, list) or _SUBCOMMAND not in args or not isinstance(row.get("path"), str):
            continue
        words = [str(arg) for arg in args]
        at = words.index(_SUBCOMMAND)
        rest = words[at + 1 :]
        root = rest[rest.index(_DRIVER_ROOT) + 1] if _DRIVER_ROOT in rest[:-1] else ""
        yield ToolkitHook(row["path"], tuple(words[:at]), root)
