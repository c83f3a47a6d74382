"""Cards that the kubelet itself has given out, as a node's `Device` says (koordinator.md, "Annotations").

A list of `{"podUID": …, "containerName": …, "resourceName": …, "deviceIDs": […]}` in an annotation.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.model.errors import BadObject, Problem
from mgpu.model.ledger import Share

CHECKPOINTS = "node.koordinator.sh/devices-checkpoints"
_OLDER = "node.koordinator.sh/gpu-checkpoints"
_NVIDIA = "nvidia.com/"
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_MOST_ROWS = 2048
"""Of one node: a kubelet runs some hundred pods. Each pod that a node names becomes a holding in the ledger."""
_MOST_IDS = 4096
"""Over all rows; each id becomes a share."""


@dataclass(frozen=True, slots=True, order=True)
class Given:
    """What one container was given of one resource. ids: UUIDs of cards, as the plugin that gave them names them."""

    uid: str
    container: str
    resource: str
    ids: tuple[str, ...]


def read_given(device: Mapping[str, Any]) -> tuple[Given, ...]:
    """Read what the annotations of a Device list, in order.

    Raises BadObject: a list is read as a whole or not at all. Its length is limited, since a node's agent writes it and
    is not trusted with the scheduler's memory.
    """
    annotations = (device.get("metadata") or {}).get("annotations") or {}
    problems: list[Problem] = []
    found = {given for key in (CHECKPOINTS, _OLDER) for given in _listed(annotations.get(key), key, problems)}
    ids = sum(len(given.ids) for given in found)
    if len(found) > _MOST_ROWS or ids > _MOST_IDS:
        text = f"lists {len(found)} containers with {ids} ids, a node has at most {_MOST_ROWS} with {_MOST_IDS}"
        problems.append(Problem(f"metadata.annotations[{CHECKPOINTS}]", text))
    if problems:
        raise BadObject(problems)
    return tuple(sorted(found))


def write_given(rows: Iterable[Given]) -> str:
    """The value of `CHECKPOINTS` that says this."""
    table = [
        {"podUID": g.uid, "containerName": g.container, "resourceName": g.resource, "deviceIDs": list(g.ids)}
        for g in sorted(rows)
    ]
    return json.dumps(table, separators=(",", ":"))


def shares_given(rows: Iterable[Given]) -> dict[str, tuple[Share, ...]]:
    """By the pod's UID, the cards that it was given, each of them whole.

    An id may be an index, or a UUID with the number of a replica behind it (`GPU-…::3`), as NVIDIA's plugin may be
    configured. Which card a MIG device is on is not known: it is held on all.
    """
    found: dict[str, dict[Share, None]] = {}
    for given in rows:
        for card in _cards(given):
            found.setdefault(given.uid, {})[Share(given.container, card, whole=True)] = None
    return {uid: tuple(shares) for uid, shares in found.items()}


def _cards(given: Given) -> Iterator[str | int | None]:
    for name in given.ids:
        uuid = name.partition("::")[0]
        if not given.resource.startswith(_NVIDIA):
            yield uuid  # of another resource: a card only where it is the UUID of one
        elif uuid.startswith("MIG-"):
            yield None
        else:
            yield int(uuid) if _INDEX.fullmatch(uuid) else uuid


def _listed(text: object, key: str, problems: list[Problem]) -> Iterator[Given]:
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
        given = _read(row)
        if given is None:
            problems.append(Problem(f"{path}[{i}]", "must have podUID, containerName, resourceName and deviceIDs"))
        else:
            yield given


def _read(row: object) -> Given | None:
    if not isinstance(row, dict):
        return None
    uid, container, resource = (row.get(key) for key in ("podUID", "containerName", "resourceName"))
    ids = row.get("deviceIDs") or []
    if not (isinstance(uid, str) and uid and isinstance(container, str) and isinstance(resource, str)):
        return None
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        return None
    return Given(uid, container, resource, tuple(sorted(ids)))
