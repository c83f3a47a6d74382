"""The part of a container runtime that reads CDI specs (Container Device Interface 0.6 and up)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Unresolvable(Exception):
    """A device that no spec file names: the container is not created."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What CDI devices change in a container: environment (later wins), device nodes and mounts.

    mounts: (path in the container, path on the host), the later one of two in the same place.
    """

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


def resolve(names: Sequence[str], directory: Path) -> Edits:
    """The edits of all devices in `names` (`vendor/class=name`), read from the spec files that are there now.

    As in the CDI library, a file that cannot be read or parsed, or has a device without edits, is as good as absent;
    a spec's own edits come once, before those of its devices. Raises Unresolvable with every name that is not found.
    """
    specs = list(_specs(directory)) if names else []
    env: dict[str, str] = {}
    nodes: list[str] = []
    mounts: dict[str, str] = {}
    missing: list[str] = []
    used: list[dict[str, Any]] = []
    for name in names:
        spec, device = _find(name, specs)
        if spec is None or device is None:
            missing.append(name)
            continue
        if not any(spec is seen for seen in used):
            used.append(spec)
            _apply(spec.get("containerEdits"), env, nodes, mounts)
        _apply(device.get("containerEdits"), env, nodes, mounts)
    if missing:
        raise Unresolvable(f"unresolvable CDI devices {', '.join(missing)}")
    return Edits(env, tuple(nodes), tuple(mounts.items()))


def _specs(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("*.json")):
        try:
            spec = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(spec, dict) and spec.get("cdiVersion") and _complete(spec.get("devices")):
            yield spec


def _complete(devices: Sequence[dict[str, Any]] | None) -> bool:
    """Whether there are devices, and each changes something in a container."""
    return bool(devices) and all(any((device.get("containerEdits") or {}).values()) for device in devices or ())


def _find(name: str, specs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    kind, _, device = name.partition("=")
    for spec in specs:
        for entry in spec["devices"] if spec.get("kind") == kind else ():
            if entry.get("name") == device:
                return spec, entry
    return None, None


def _apply(edits: Mapping[str, Any] | None, env: dict[str, str], nodes: list[str], mounts: dict[str, str]) -> None:
    for entry in (edits or {}).get("env") or ():
        key, _, value = entry.partition("=")
        env[key] = value
    nodes += (node["path"] for node in (edits or {}).get("deviceNodes") or ())
    mounts.update((mount["containerPath"], mount["hostPath"]) for mount in (edits or {}).get("mounts") or ())
