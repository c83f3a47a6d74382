"""The device manager's checkpoint file, `kubelet_internal_checkpoint`, in the kubelet's own JSON.

    {"Data": {"PodDeviceEntries": [{"PodUID", "ContainerName", "ResourceName", "DeviceIDs": {"-1": [...]},
                                    "AllocResp": base64}],
              "RegisteredDevices": {resource: [...]}}, "Checksum": number}

"-1" is the NUMA node of ids without topology. The kubelet's checksum is a hash of Go's in-memory values, which cannot
be computed elsewhere; here it is a CRC of the data. `device_manager` reads and writes it, the node agent only reads it.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = "kubelet_internal_checkpoint"


@dataclass(frozen=True, slots=True)
class Entry:
    """The ids of one container and resource, and the plugin's serialized ContainerAllocateResponse."""

    uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    entries: tuple[Entry, ...] = ()
    registered: tuple[tuple[str, tuple[str, ...]], ...] = ()


def write(path: Path, entries: Iterable[Entry], registered: Mapping[str, Sequence[str]]) -> None:
    data = {
        "PodDeviceEntries": [
            {
                "PodUID": entry.uid,
                "ContainerName": entry.container,
                "ResourceName": entry.resource,
                "DeviceIDs": {"-1": list(entry.ids)},
                "AllocResp": base64.b64encode(entry.response).decode(),
            }
            for entry in entries
        ],
        "RegisteredDevices": {resource: sorted(ids) for resource, ids in sorted(registered.items())},
    }
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps({"Data": data, "Checksum": _checksum(data)}))
    os.replace(new, path)


def read(path: Path) -> Checkpoint | None:
    """Return the checkpoint, or None where there is none. Raises ValueError for a damaged one, as the kubelet fails."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    whole = json.loads(text)
    data = whole["Data"]
    if whole["Checksum"] != _checksum(data):
        raise ValueError(f"{path}: the checkpoint is corrupt")
    return Checkpoint(
        tuple(
            Entry(
                row["PodUID"],
                row["ContainerName"],
                row["ResourceName"],
                tuple(device for ids in row["DeviceIDs"].values() for device in ids),
                base64.b64decode(row["AllocResp"]),
            )
            for row in data["PodDeviceEntries"] or ()
        ),
        tuple((resource, tuple(ids)) for resource, ids in data["RegisteredDevices"].items()),
    )


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
