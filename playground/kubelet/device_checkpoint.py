"""Reads and writes the device manager's checkpoint file, `kubelet_internal_checkpoint`, in the kubelet's JSON format.

    {"Data": {"PodDeviceEntries": [{"PodUID", "ContainerName", "ResourceName", "DeviceIDs": {"-1": [...]},
                                    "AllocResp": base64}],
              "RegisteredDevices": {resource: [...]}}, "Checksum": number}

"-1" is the NUMA node of ids without topology. The real kubelet's checksum is a hash of Go values in memory, which
cannot be computed in Python, so the checksum here is a CRC of the data. The node agent reads the file with its own
reader (`deviceplugin.kubelet.checkpoint`), which ignores the checksum. `device_manager` calls `read` and `write`; tests
also write the file.
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
    """The devices of one resource that a container holds.

    Attributes:
        uid: The UID of the pod.
        container: The name of the container.
        resource: The name of the resource.
        ids: The ids of the devices.
        response: The serialized ContainerAllocateResponse of the device plugin.
    """

    uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of the file.

    Attributes:
        entries: The devices that containers hold.
        registered: The names of the registered resources, each with the ids of its healthy devices.
    """

    entries: tuple[Entry, ...] = ()
    registered: tuple[tuple[str, tuple[str, ...]], ...] = ()


def write(path: Path, entries: Iterable[Entry], registered: Mapping[str, Sequence[str]]) -> None:
    """Replace the file atomically.

    Args:
        path: The file.
        entries: The devices that containers hold.
        registered: The ids of the healthy devices of each registered resource.
    """
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
    """Return the checkpoint, or None if there is no file.

    Raises ValueError if the file is not JSON or its checksum is wrong.
    """
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
