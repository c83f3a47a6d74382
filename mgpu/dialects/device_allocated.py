"""`device-allocated`, the annotation in which Koordinator records the devices of a pod.

Source: docs/design/koordinator.md, "Annotations".

One allocation per pod: per type a list of devices, with what the pod as a whole has of each.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.model.cards import GPU
from mgpu.model.errors import BadObject, Problem
from mgpu.model.quantities import QuantityError, quantity_of_bytes, whole_bytes, whole_number

ALLOCATED = "scheduling.koordinator.sh/device-allocated"
_PATH = f"metadata.annotations[{ALLOCATED}]"
_PREFIX = "koordinator.sh/"
_PREFIXES = (_PREFIX, "kubernetes.io/")
"""The second one is the seed's older spelling."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a pod has of one device: core (of other types: of the device) and ratio in percent, memory in bytes.

    id: its UUID; "": not given.
    """

    type: str
    minor: int
    id: str = ""
    core: int = 0
    memory: int = 0
    ratio: int = 0


def write(devices: Iterable[Device]) -> str:
    """The annotation, types and minors in order, as Koordinator spells it: amounts that are 0 are left out."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for device in sorted(devices, key=lambda d: (d.type, d.minor)):
        amounts = [
            ("core", str(device.core)),
            ("memory", quantity_of_bytes(device.memory)),
            ("ratio", str(device.ratio)),
        ]
        names = _names(device.type)
        resources = {_PREFIX + names[what]: text for what, text in amounts if what in names and text != "0"}
        entry = {"minor": device.minor, "resources": resources, **({"id": device.id} if device.id else {})}
        by_type.setdefault(device.type, []).append(entry)
    return json.dumps(by_type, separators=(",", ":"))


def read(text: str) -> tuple[Device, ...]:
    """The devices in the annotation's order. Raises BadObject: a record is read whole or not at all.

    What else Koordinator writes beside the resources known here is left alone.
    """
    table = load(text, _PATH)
    devices: list[Device] = []
    for type, rows in table.items():
        if not isinstance(rows, list):
            raise _bad(f"{type} must be a list")
        devices += (_device(type, row) for row in rows)
    seen: set[tuple[str, int]] = set()
    for device in devices:
        if (device.type, device.minor) in seen:
            raise _bad(f"names minor {device.minor} of {device.type} twice")
        seen.add((device.type, device.minor))
    return tuple(devices)


def load(text: str, path: str) -> Mapping[str, Any]:
    """The JSON object in an annotation. Raises BadObject."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadObject([Problem(path, f"is not JSON: {str(error)[:80]}")]) from error
    if not isinstance(table, dict):
        raise BadObject([Problem(path, "must be an object")])
    return table


def _device(type: str, row: object) -> Device:
    resources = row.get("resources") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(resources, dict):
        raise _bad(f"every {type} must be an object with minor and resources")
    minor, id = row.get("minor", 0), row.get("id", "")  # Koordinator leaves out a minor of 0
    if not isinstance(minor, int) or isinstance(minor, bool) or minor < 0:
        raise _bad(f"minor must be an integer of at least 0, not {minor!r}")
    if not isinstance(id, str):
        raise _bad(f"the id of minor {minor} must be a string")
    amounts = {what: _amount(resources, name, bytes=what == "memory") for what, name in _names(type).items()}
    return Device(type, minor, id, **amounts)


def _amount(resources: Mapping[str, object], name: str, *, bytes: bool) -> int:
    text = next((resources[prefix + name] for prefix in _PREFIXES if prefix + name in resources), 0)
    try:
        amount = whole_bytes(text) if bytes else whole_number(text)
    except QuantityError as error:
        raise _bad(f"{name}: {error}") from error
    if amount < 0:
        raise _bad(f"{name} must be at least 0, not {text}")
    return amount


def _names(type: str) -> Mapping[str, str]:
    """The resources of a device of this type, without prefix, by the amount that each is."""
    return {"core": "gpu-core", "memory": "gpu-memory", "ratio": "gpu-memory-ratio"} if type == GPU else {"core": type}


def _bad(message: str) -> BadObject:
    return BadObject([Problem(_PATH, message)])
