"""Reads and writes the DRA manager's checkpoint file, `dra_manager_state`, in the kubelet's JSON format.

    {"Data": "<JSON as a string>", "Checksum": CRC-32 of Data}
    Data: {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "ClaimInfoStateList":
           [{"ClaimUID", "ClaimName", "Namespace", "PodUIDs": {uid: {}},
             "DriverState": {driver: {"Devices": [{"PoolName", "DeviceName", "ShareID", "RequestNames",
                                                   "CDIDeviceIDs"}]}}}]}

The file says which claims may be prepared, but not which are: the kubelet writes a claim before it calls the driver.
`claim_manager` calls `read` and `write`; tests also read the file.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "dra_manager_state"
_HEADER = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1"}


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """A device that a driver has prepared.

    Attributes:
        pool: The pool that contains the device.
        device: The name of the device.
        share_id: The id of the share, or None if the device is not shared.
        requests: The requests of the claim that the device serves, or () for all of them.
        cdi: The full names of CDI devices.
    """

    pool: str
    device: str
    share_id: str | None = None
    requests: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimState:
    """A claim that pods of the node use.

    Attributes:
        uid: The UID of the claim.
        name: The name of the claim.
        namespace: The namespace of the claim.
        pods: The UIDs of the pods that use it.
        drivers: The prepared devices of each driver that has an allocation result in the claim.
        prepared: Whether this kubelet has prepared it. The checkpoint does not contain it.
    """

    uid: str
    name: str
    namespace: str
    pods: frozenset[str] = frozenset()
    drivers: Mapping[str, tuple[PreparedDevice, ...]] = field(default_factory=dict)
    prepared: bool = False

    def cdi_devices(self, request: str) -> list[str]:
        """Return the CDI devices that serve a request, or those of all requests if `request` is empty."""
        devices = (device for driver in self.drivers.values() for device in driver)
        return [n for d in devices if not request or not d.requests or request in d.requests for n in d.cdi]


def write(path: Path, claims: Iterable[ClaimState]) -> None:
    """Replace the file atomically."""
    data = json.dumps({**_HEADER, "ClaimInfoStateList": [_row(claim) for claim in claims]})
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())}))
    os.replace(new, path)


def read(path: Path) -> tuple[ClaimState, ...]:
    """Return the claims in the checkpoint, or () if there is no file.

    Raises ValueError if the file is not JSON or its checksum is wrong.
    """
    try:
        whole = json.loads(path.read_text())
    except FileNotFoundError:
        return ()
    if whole["Checksum"] != zlib.crc32(whole["Data"].encode()):
        raise ValueError(f"{path}: the checkpoint is corrupt")
    return tuple(_claim(row) for row in json.loads(whole["Data"])["ClaimInfoStateList"] or ())


def _row(claim: ClaimState) -> dict[str, Any]:
    return {
        "ClaimUID": claim.uid,
        "ClaimName": claim.name,
        "Namespace": claim.namespace,
        "PodUIDs": {uid: {} for uid in sorted(claim.pods)},
        "DriverState": {name: {"Devices": _devices(devices)} for name, devices in sorted(claim.drivers.items())},
    }


def _devices(devices: Iterable[PreparedDevice]) -> list[dict[str, Any]] | None:
    """Return the entries of the devices, or None, as Go writes an empty slice that was never appended to."""
    rows = [
        {
            "PoolName": device.pool,
            "DeviceName": device.device,
            "ShareID": device.share_id,
            "RequestNames": list(device.requests),
            "CDIDeviceIDs": list(device.cdi),
        }
        for device in devices
    ]
    return rows or None


def _claim(row: Mapping[str, Any]) -> ClaimState:
    drivers = {
        name: tuple(
            PreparedDevice(
                device["PoolName"],
                device["DeviceName"],
                device["ShareID"],
                tuple(device["RequestNames"] or ()),
                tuple(device["CDIDeviceIDs"] or ()),
            )
            for device in state["Devices"] or ()
        )
        for name, state in row["DriverState"].items()
    }
    return ClaimState(row["ClaimUID"], row["ClaimName"], row["Namespace"], frozenset(row["PodUIDs"]), drivers)
