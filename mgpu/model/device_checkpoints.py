"""Reads and writes the annotation of a Device that lists the cards of unrecorded pods and of remnants.

docs/design/koordinator.md, "Annotations", describes the format. Each entry is `{"podUID": …, "containerName": …,
"resourceName": …, "deviceIDs": […]}`. The node's agent writes the list. The scheduler and the commands read it, also
from an annotation with Koordinator's older name.

Schedulers of other versions read the same annotation. The entry of a remnant that holds parts of cards has their
amounts in `share`; a scheduler that does not know `share` counts whole cards. An entry without ids means that the pod
runs without a record and was given nothing. The entry of `UNLISTED_PODS` says this of all pods that are not listed.
Older schedulers ignore both kinds of entries.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu.model.errors import Problem, raise_if_any
from mgpu.model.ledger import Share
from mgpu.model.quantities import MAX_QUANTITY
from mgpu.model.raw_objects import is_integer

CHECKPOINTS = "node.koordinator.sh/devices-checkpoints"
_OLDER = "node.koordinator.sh/gpu-checkpoints"
DELETED_POD = "mgpu.io/deleted-pod"
"""The resource name in entries of remnants."""
UNRECORDED = "mgpu.io/unrecorded-pod"
"""The resource name in the entry of an unrecorded pod if it is unknown which resource brought its cards."""
UNLISTED_PODS = "*"
"""The pod UID in the entry for all unrecorded pods that the list does not name. An agent that writes this entry
guarantees that it lists all pods that hold cards without a record. An older agent cannot guarantee this. It replaces
the whole list, so its first write removes the entry."""
_NVIDIA = "nvidia.com/"
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_MAX_ENTRIES = 2048
"""The most entries of one node. Each pod in the list becomes a holding in the ledger. A kubelet runs a few hundred
pods."""
_MAX_IDS = 4096
"""The most ids in all entries together. Each id becomes a share in the ledger."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointEntry:
    """The devices of one resource that one container got.

    Attributes:
        uid: the UID of the pod, or `UNLISTED_PODS`.
        ids: the device ids of the cards, as the plugin that allocated them names them (`shares_by_pod`); () if the
            container got none.
        share: the share that the container holds of each card; None if it holds whole cards.
    """

    uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    share: Share | None = field(default=None, compare=False)


def read_entries(device: Mapping[str, Any]) -> tuple[CheckpointEntry, ...]:
    """Return the entries in the annotations of a Device, sorted.

    Raises BadObject if any entry is invalid or there are too many: one node's agent must not be able to fill the
    scheduler's memory.
    """
    annotations = (device.get("metadata") or {}).get("annotations") or {}
    problems: list[Problem] = []
    found = {given for key in (CHECKPOINTS, _OLDER) for given in _listed(annotations.get(key), key, problems)}
    ids = sum(len(given.ids) for given in found)
    if len(found) > _MAX_ENTRIES or ids > _MAX_IDS:
        limit = f"mgpu accepts at most {_MAX_ENTRIES} containers and {_MAX_IDS} ids"
        text = f"lists {len(found)} containers with {ids} ids, but {limit}"
        problems.append(Problem(f"metadata.annotations[{CHECKPOINTS}]", text))
    raise_if_any(problems)
    return tuple(sorted(found))


def write_entries(entries: Iterable[CheckpointEntry]) -> str:
    """Return the value of the annotation `CHECKPOINTS`."""
    return json.dumps([_written(entry) for entry in sorted(entries)], separators=(",", ":"))


def _written(entry: CheckpointEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "podUID": entry.uid,
        "containerName": entry.container,
        "resourceName": entry.resource,
        "deviceIDs": list(entry.ids),
    }
    if (share := entry.share) is not None and not share.whole:
        row["share"] = {"core": share.core, "memory": share.memory, "ratio": share.ratio}
    return row


def no_devices_entry(uid: str) -> CheckpointEntry:
    """Return the entry of a pod, or of `UNLISTED_PODS`, that got nothing."""
    return CheckpointEntry(uid, "", UNRECORDED, ())


def shares_by_pod(entries: Iterable[CheckpointEntry]) -> dict[str, tuple[Share, ...]]:
    """Return the shares that each pod got, by UID; () for a pod that got nothing.

    Depending on the configuration of NVIDIA's plugin, an id is a UUID, an index, or a UUID and the number of a replica
    (`GPU-…::3`). It is unknown on which card a MIG device is, so its share is held on every card of the node.
    """
    found: dict[str, dict[Share, None]] = {}
    for entry in entries:
        shares = found.setdefault(entry.uid, {})
        for card in _cards(entry):
            share = Share(entry.container, card, whole=True) if entry.share is None else replace(entry.share, card=card)
            shares[share] = None
    return {uid: tuple(shares) for uid, shares in found.items()}


def _cards(entry: CheckpointEntry) -> Iterator[str | int | None]:
    for name in entry.ids:
        uuid = name.partition("::")[0]
        if not entry.resource.startswith(_NVIDIA):
            yield uuid  # an id of another resource names a card only if a card has this UUID
        elif uuid.startswith("MIG-"):
            yield None
        else:
            yield int(uuid) if _INDEX.fullmatch(uuid) else uuid


def _listed(text: object, key: str, problems: list[Problem]) -> Iterator[CheckpointEntry]:
    path = f"metadata.annotations[{key}]"
    if text is None:
        return
    try:
        rows = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list):
        problems.append(Problem(path, "must be a JSON list of the devices that containers got"))
        return
    for i, row in enumerate(rows):
        try:
            given = _read(row)
        except (ValueError, KeyError, TypeError):
            given = None
        if given is None:
            problems.append(
                Problem(
                    f"{path}[{i}]",
                    "must have podUID, containerName and resourceName, a list of strings in deviceIDs, and a "
                    "valid share if it has one",
                )
            )
        else:
            yield given


def _read(row: object) -> CheckpointEntry | None:
    if not isinstance(row, dict):
        return None
    uid, container, resource = (row.get(key) for key in ("podUID", "containerName", "resourceName"))
    ids = row.get("deviceIDs") or []
    if not (isinstance(uid, str) and uid and isinstance(container, str) and isinstance(resource, str)):
        return None
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        return None
    share = None if row.get("share") is None else _share(container, row["share"])
    return CheckpointEntry(uid, container, resource, tuple(sorted(ids)), share)


def _share(container: str, row: Mapping[str, Any]) -> Share:
    """Return the share in an entry. Raises ValueError, KeyError or TypeError if any amount is invalid."""
    core, memory, ratio = row["core"], row["memory"], row["ratio"]
    amounts = (core, memory) if ratio is None else (core, memory, ratio)
    if not all(is_integer(n, 0, MAX_QUANTITY) for n in amounts):
        raise ValueError(f"amounts must be integers from 0 to {MAX_QUANTITY}")
    return Share(container, None, core, memory, ratio=ratio)
