"""The kubelet's device manager checkpoint: which container holds which ids, and what `Allocate` answered for it.

A private file of the kubelet, but the only thing that has it all: the pod's UID, init containers, and the answer, with
the fresh name that this agent put into it. So a name read here belongs to that container for ever, however old the
file is; what an old file can do is lack a name.
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
class Given:
    """What a container was given at its admission.

    name: the answer's own, "" where no agent of ours gave it. device: whether it names a CDI device, by that name.
    """

    uid: str
    container: str
    ids: frozenset[str]
    name: str = ""
    device: bool = False
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


def read_checkpoint(file: Path, resource: str, ids: frozenset[str] | None = None) -> list[Given]:
    """The containers that hold ids of `resource`, or exactly `ids`; none where the file cannot be read."""
    try:
        return read_known(file, resource, ids)[0]
    except RetryLater as error:
        if file.exists():
            log.warning("%s", error)
        return []


def read_known(
    file: Path, resource: str, ids: frozenset[str] | None = None
) -> tuple[list[Given], frozenset[str] | None]:
    """The containers that hold ids of `resource` (or exactly `ids`), and its healthy ids; None: no plugin offers it.

    Raises RetryLater where the file is not there, half written or damaged.
    """
    try:
        data = _data(file.read_bytes())
        rows = data["PodDeviceEntries"] or ()
        given = [_given(row, own) for row in rows if row["ResourceName"] == resource and (own := _ids(row, ids))]
        offered = data.get("RegisteredDevices") or {}
        return given, frozenset(offered[resource] or ()) if resource in offered else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DecodeError) as error:
        raise RetryLater(f"the kubelet's checkpoint {file} is not readable: {error!r}") from error


@lru_cache(maxsize=1)
def _data(content: bytes) -> Any:
    """Cached: every type of slices is looked up in it, three times a look. Nobody changes what this returns."""
    return orjson.loads(content)["Data"]


def _ids(row: Mapping[str, Any], wanted: frozenset[str] | None) -> frozenset[str] | None:
    """The row's ids (they are listed by NUMA node) where they are wanted."""
    own = frozenset(i for part in row["DeviceIDs"].values() for i in part)
    return own if wanted in (None, own) else None


def _given(row: Mapping[str, Any], ids: frozenset[str]) -> Given:
    """`AllocResp` is the answer to Allocate: protobuf, as base64."""
    try:
        answer = deviceplugin_pb2.ContainerAllocateResponse.FromString(base64.b64decode(row["AllocResp"] or ""))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    names = [device.name for device in answer.cdi_devices if device.name.startswith(f"{KIND}=")]
    name = names[0] if names else answer.annotations.get(ANSWER_ANNOTATION, "")
    return Given(row["PodUID"], row["ContainerName"], ids, name, bool(names), dict(answer.envs))
