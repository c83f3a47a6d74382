"""Reads the checkpoint of the kubelet's device manager: which container holds which ids, and the answer to Allocate.

The file is private to the kubelet, but no API has the same data: the pod's UID, init containers, and the answer with
the unique name that the agent put into it. A name belongs to one container forever. So an outdated file may lack the
name of a new answer, but it never shows a name with the wrong container. Mainly `deviceplugin.allocation` and
`partitioning.slice_plugins` use this module.
"""

import base64
import binascii
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from google.protobuf.message import DecodeError

from deviceplugin.delivery.cdi import ANSWER_ANNOTATION, KIND
from mgpu.model.errors import RetryLater
from proto import deviceplugin_pb2

log = logging.getLogger(__name__)

FILE = "kubelet_internal_checkpoint"
"""The name of the file in the kubelet's device-plugins folder."""


@dataclass(frozen=True, slots=True)
class PodDevicesEntry:
    """The devices of one resource that a container got at its admission.

    Attributes:
        uid: The UID by which the kubelet knows the pod.
        ids: The device ids that the container holds.
        name: The name of the answer to Allocate; "" if another plugin answered.
        device: Whether the answer contains a CDI device of this name.
        env: The environment in the answer.
    """

    uid: str
    container: str
    ids: frozenset[str]
    name: str = ""
    device: bool = False
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


def read_checkpoint(file: Path, resource: str, ids: frozenset[str] | None = None) -> list[PodDevicesEntry]:
    """Return the entries of a resource, or only the entries with exactly `ids`; empty if the file cannot be read."""
    try:
        return read_entries(file, resource, ids)[0]
    except RetryLater as error:
        if file.exists():
            log.warning("%s", error)
        return []


def read_entries(
    file: Path, resource: str, ids: frozenset[str] | None = None
) -> tuple[list[PodDevicesEntry], frozenset[str] | None]:
    """Return the entries of a resource, or only the entries with exactly `ids`, and the registered ids.

    The registered ids are the ids of the resource that a plugin has offered as healthy; None if no plugin has
    registered the resource. Raises RetryLater if the file is missing, incomplete or damaged.
    """
    try:
        data = _parse(file.read_bytes())
        rows = data["PodDeviceEntries"] or ()
        entries = [_entry(row, own) for row in rows if row["ResourceName"] == resource and (own := _ids(row, ids))]
        registered = data.get("RegisteredDevices") or {}
        return entries, frozenset(registered[resource] or ()) if resource in registered else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DecodeError) as error:
        raise RetryLater(f"the kubelet's checkpoint {file} is not readable: {error!r}") from error


@lru_cache(maxsize=1)
def _parse(content: bytes) -> Any:
    """Parse the file. Do not modify the result: it is cached, because the same file is read for every resource."""
    return orjson.loads(content)["Data"]


def _ids(row: Mapping[str, Any], required: frozenset[str] | None) -> frozenset[str] | None:
    """Return the ids of a row, in which they are grouped by NUMA node; None if other ids are required."""
    own = frozenset(i for part in row["DeviceIDs"].values() for i in part)
    return own if required in (None, own) else None


def _entry(row: Mapping[str, Any], ids: frozenset[str]) -> PodDevicesEntry:
    """Read a row. Its `AllocResp` is the answer to Allocate, a protobuf message in base64."""
    try:
        answer = deviceplugin_pb2.ContainerAllocateResponse.FromString(base64.b64decode(row["AllocResp"] or ""))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    names = [device.name for device in answer.cdi_devices if device.name.startswith(f"{KIND}=")]
    name = names[0] if names else answer.annotations.get(ANSWER_ANNOTATION, "")
    return PodDevicesEntry(row["PodUID"], row["ContainerName"], ids, name, bool(names), dict(answer.envs))
