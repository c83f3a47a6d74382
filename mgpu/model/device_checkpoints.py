"""Cards that containers got without an allocation record, as a node reports them in its Device object.

Source: docs/design/koordinator.md, "Annotations". The annotation is a list of `{"podUID": …, "containerName": …,
"resourceName": …, "deviceIDs": […]}`. It has what the kubelet allocated through another plugin, and what deleted pods
hold whose containers still run (remnants). A row of a remnant has a `share` as well, the amounts that it holds; a
scheduler that does not know this key holds the whole card.

A row without ids means that its pod runs without a record and got nothing. The row of `OTHERS` means the same for all
pods that the list does not name. A scheduler that knows neither ignores such rows. The agent writes the list, the
scheduler reads it and does not trust its size.
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
"""The resource in rows of remnants."""
UNRECORDED = "mgpu.io/unrecorded-pod"
"""The resource in rows of pods without a record where it is unknown by which resource they got cards."""
UNLISTED_PODS = "*"
"""Stands for a pod's UID and means every pod without a record that the list does not name. An agent that writes this
row guarantees that it lists all pods that hold cards without a record. It is a row of the list so that an earlier
agent, which does not guarantee this, removes it with its first write."""
_NVIDIA = "nvidia.com/"
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_MOST_ROWS = 2048
"""Rows of one node. A kubelet runs some hundred pods, and each pod in the list becomes a holding in the ledger."""
_MOST_IDS = 4096
"""Ids in all rows together; each becomes a share."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointEntry:
    """What one container got of one resource.

    Attributes:
        ids: UUIDs of cards as the allocating plugin names them; () for nothing.
        share: what it holds of each of these cards; None for all of it.
    """

    uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    share: Share | None = field(default=None, compare=False)


def read_entries(device: Mapping[str, Any]) -> tuple[CheckpointEntry, ...]:
    """Return the rows in the annotations of a Device, in order.

    Raises BadObject: a list is read as a whole or not at all. Its length is limited, so that one node's agent cannot
    fill the scheduler's memory.
    """
    annotations = (device.get("metadata") or {}).get("annotations") or {}
    problems: list[Problem] = []
    found = {given for key in (CHECKPOINTS, _OLDER) for given in _listed(annotations.get(key), key, problems)}
    ids = sum(len(given.ids) for given in found)
    if len(found) > _MOST_ROWS or ids > _MOST_IDS:
        text = f"lists {len(found)} containers with {ids} ids, a node has at most {_MOST_ROWS} with {_MOST_IDS}"
        problems.append(Problem(f"metadata.annotations[{CHECKPOINTS}]", text))
    raise_if_any(problems)
    return tuple(sorted(found))


def write_entries(rows: Iterable[CheckpointEntry]) -> str:
    """Return the value of the annotation `CHECKPOINTS`."""
    return json.dumps([_written(given) for given in sorted(rows)], separators=(",", ":"))


def _written(given: CheckpointEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "podUID": given.uid,
        "containerName": given.container,
        "resourceName": given.resource,
        "deviceIDs": list(given.ids),
    }
    if (share := given.share) is not None and not share.whole:
        row["share"] = {"core": share.core, "memory": share.memory, "ratio": share.ratio}
    return row


def no_devices_entry(uid: str) -> CheckpointEntry:
    """Return the row which says that a pod, or `OTHERS`, got nothing."""
    return CheckpointEntry(uid, "", UNRECORDED, ())


def shares_by_pod(rows: Iterable[CheckpointEntry]) -> dict[str, tuple[Share, ...]]:
    """Return the shares that each pod got, by UID; () for a pod that got nothing. Without a `share` a card is held
    whole.

    An id may be an index, or a UUID followed by the number of a replica (`GPU-…::3`), depending on the configuration of
    NVIDIA's plugin. It is unknown which card a MIG device is on, so it is held on all.
    """
    found: dict[str, dict[Share, None]] = {}
    for given in rows:
        own = found.setdefault(given.uid, {})
        for card in _cards(given):
            share = Share(given.container, card, whole=True) if given.share is None else replace(given.share, card=card)
            own[share] = None
    return {uid: tuple(shares) for uid, shares in found.items()}


def _cards(given: CheckpointEntry) -> Iterator[str | int | None]:
    for name in given.ids:
        uuid = name.partition("::")[0]
        if not given.resource.startswith(_NVIDIA):
            yield uuid  # Of another resource it is a card only if a card has this UUID.
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
        problems.append(Problem(path, "must be a JSON list of what pods were given"))
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
                    "must have podUID, containerName, resourceName and deviceIDs, and a valid share if any",
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
    """Raise ValueError, KeyError or TypeError for an invalid share: it must not be read as less than the pod holds."""
    core, memory, ratio = row["core"], row["memory"], row["ratio"]
    amounts = (core, memory) if ratio is None else (core, memory, ratio)
    if not all(is_integer(n, 0, MAX_QUANTITY) for n in amounts):
        raise ValueError(f"amounts must be integers from 0 to {MAX_QUANTITY}")
    return Share(container, None, core, memory, ratio=ratio)
