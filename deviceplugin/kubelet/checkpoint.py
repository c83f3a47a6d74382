"""The kubelet's device manager checkpoint: which container holds which ids, and what Allocate answered for it.

It is a private file of the kubelet, but nothing else has all of it: the pod's UID, init containers, and the answer with
the fresh name that this agent put into it. A name that is read here belongs to its container for good, however old the
file is; the only harm that an old file can do is to lack a name.
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


@dataclass(frozen=True, slots=True)
class PodDevicesEntry:
    """What a container was given of one resource at its admission.

    uid: the UID by which the kubelet knows the pod.
    name: the name of the answer to Allocate; "" if another plugin gave it.
    device: whether the answer names a CDI device, by that name.
    env: the environment in the answer.
    """

    uid: str
    container: str
    ids: frozenset[str]
    name: str = ""
    device: bool = False
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


def read_checkpoint(file: Path, resource: str, ids: frozenset[str] | None = None) -> list[PodDevicesEntry]:
    """Return the entries of a resource, or those that hold exactly `ids`; none if the file cannot be read."""
    try:
        return read_entries(file, resource, ids)[0]
    except RetryLater as error:
        if file.exists():
            log.warning("%s", error)
        return []


def read_entries(
    file: Path, resource: str, ids: frozenset[str] | None = None
) -> tuple[list[PodDevicesEntry], frozenset[str] | None]:
    """Return the entries of a resource, or those that hold exactly `ids`, and the healthy ids that the kubelet knows.

    The ids are None if no plugin has registered the resource. Raises RetryLater if the file is missing, half written or
    damaged.
    """
    try:
        data = _data(file.read_bytes())
        rows = data["PodDeviceEntries"] or ()
        entries = [_entry(row, own) for row in rows if row["ResourceName"] == resource and (own := _ids(row, ids))]
        registered = data.get("RegisteredDevices") or {}
        return entries, frozenset(registered[resource] or ()) if resource in registered else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DecodeError) as error:
        raise RetryLater(f"the kubelet's checkpoint {file} is not readable: {error!r}") from error


@lru_cache(maxsize=1)
def _data(content: bytes) -> Any:
    """Parse the file, once for the same content: each type of slices is looked up in it. Do not change the result."""
    return orjson.loads(content)["Data"]


def _ids(row: Mapping[str, Any], wanted: frozenset[str] | None) -> frozenset[str] | None:
    """Return the row's ids, which it lists by NUMA node, if they are the wanted ones; None otherwise."""
    own = frozenset(i for part in row["DeviceIDs"].values() for i in part)
    return own if wanted in (None, own) else None


def _entry(row: Mapping[str, Any], ids: frozenset[str]) -> PodDevicesEntry:
    """Read a row, whose `AllocResp` is the answer to Allocate as protobuf in base64."""
    try:
        answer = deviceplugin_pb2.ContainerAllocateResponse.FromString(base64.b64decode(row["AllocResp"] or ""))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    names = [device.name for device in answer.cdi_devices if device.name.startswith(f"{KIND}=")]
    name = names[0] if names else answer.annotations.get(ANSWER_ANNOTATION, "")
    return PodDevicesEntry(row["PodUID"], row["ContainerName"], ids, name, bool(names), dict(answer.envs))
