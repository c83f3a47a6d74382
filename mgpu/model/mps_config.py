"""Reads and writes the ConfigMap with the MPS partitions of nodes.

The scheduler (`scheduler.partitioning`) writes the ConfigMap, and the agents (`deviceplugin.partitioning`) read it. The
format is the configuration v1 of NVIDIA's device plugin, with `sharing.mps.resources[]` (docs/design/slices.md, "MPS").
A card that is not listed is not partitioned. Other writers may change the ConfigMap, so the functions that read it
limit the work that a short text can cause.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mgpu.model.errors import BadObject, Problem
from mgpu.model.quantities import MAX_QUANTITY
from mgpu.model.raw_objects import is_integer
from mgpu.model.slice_names import MAX_MPS_CLIENTS, SliceCounts, device_type, gigabytes, slice_of_resource

DEFAULT_KEY = "default"
"""The key in the ConfigMap for all nodes without a key of their own."""
_VERSION = "v1"
_NAME = "nvidia.com/gpu"
_SHARING = "sharing.mps.resources"

MAX_CHARACTERS = 64 << 10
"""The most characters of one node's configuration. 16 cards with ten sizes each need 18 KiB, and parsing YAML takes
100 ms for each 8 KiB."""
_NODES = 8192
"""The most YAML nodes (keys, values, lists and objects) of one configuration. An entry with one card has 12."""
_LEVELS = 16
"""The most levels of objects and lists. The list of an entry's cards is on the sixth level."""
_SCALAR = 256
"""The most characters of one value. The longest valid values are resource names. Parsing a long number takes quadratic
time."""

Json = Mapping[str, Any]


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects aliases and limits the result, so that a short text cannot become a large object."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._nodes += 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*); write the value out")
        if self._nodes > _NODES:
            raise yaml.YAMLError(f"it has more than {_NODES} values")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _SCALAR:
            raise yaml.YAMLError(f"it has a value of more than {_SCALAR} characters")
        if self._level >= _LEVELS:
            raise yaml.YAMLError(f"it has more than {_LEVELS} levels")
        self._level += 1
        found: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        return found


def config_of(data: Mapping[str, str], node: str) -> tuple[str, str] | None:
    """Return the key and the text in the ConfigMap's `data` that apply to a node, or None if there are none."""
    return next(((key, data[key]) for key in (node, DEFAULT_KEY) if key in data), None)


def write_config(spec: SliceCounts) -> str:
    """Return the YAML of the configuration, with one entry for each card and size of shares."""
    rows = [
        {
            "devices": [str(card)],
            "memoryGB": gigabytes(name),
            "name": _NAME,
            "rename": device_type(name),
            "replicas": names[name],
        }
        for card, names in sorted(spec.items())
        for name in sorted(names, key=gigabytes)
        if names[name]
    ]
    mps = {"failRequestsGreaterThanOne": True, "resources": rows}
    config = {"version": _VERSION, "flags": {"migStrategy": "none"}, "sharing": {"mps": mps}}
    return yaml.safe_dump(config, sort_keys=False)


def read_config(text: str, source: str = "configuration") -> dict[int, dict[str, int]]:
    """Return the number of shares by card index and name of the slice (`4gb`).

    Unknown keys are ignored, and the memory of the cards is not checked.

    Args:
        source: the start of the paths in errors.
    Raises:
        BadObject: if the text is not a valid configuration, with the paths of the invalid values.
    """
    problems: list[Problem] = []
    found: dict[int, dict[str, int]] = {}
    for path, row in _rows(_document(text, problems), problems):
        replicas, size = _integer(row, "replicas", path, problems), _integer(row, "memoryGB", path, problems)
        problems += _misnamed(path, row, size)
        for card in _devices(path, row, problems):
            if replicas and size:
                names = found.setdefault(card, {})
                names[f"{size}gb"] = names.get(f"{size}gb", 0) + replicas
    for card, names in sorted(found.items()):
        if sum(names.values()) > MAX_MPS_CLIENTS:
            text = f"card {card} has {sum(names.values())} shares, but a card has at most {MAX_MPS_CLIENTS} MPS clients"
            problems.append(Problem(_SHARING, text))
    if problems:
        raise BadObject(Problem(f"{source}: {p.field}" if p.field else source, p.message) for p in problems)
    return found


def _document(text: str, problems: list[Problem]) -> Json:
    if len(text) > MAX_CHARACTERS:
        problems.append(Problem("", f"has {len(text)} characters, more than the {MAX_CHARACTERS} that mgpu reads"))
        return {}
    try:
        found = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(Problem("", f"is not YAML: {' '.join(str(error).split())}"))
        return {}
    if isinstance(found, dict):
        return found
    problems.append(Problem("", "must be an object with version, flags and sharing"))
    return {}


def _rows(config: Json, problems: list[Problem]) -> Iterator[tuple[str, Json]]:
    if problems:
        return
    if config.get("version") != _VERSION:
        problems.append(Problem("version", f"must be {_VERSION}, not {_repr(config.get('version'))}"))
        return
    flags, sharing = (_object(config, key, key, problems) for key in ("flags", "sharing"))
    mps = _object(sharing, "mps", "sharing.mps", problems)
    if flags.get("migStrategy", "none") != "none":
        text = f"must be none, not {_repr(flags['migStrategy'])}: a node has either MIG or MPS slices"
        problems.append(Problem("flags.migStrategy", text))
    if mps.get("failRequestsGreaterThanOne", True) is not True:
        problems.append(
            Problem(
                "sharing.mps.failRequestsGreaterThanOne", "must be true: a container may request only one MPS share"
            )
        )
    rows = mps.get("resources") or []
    if not isinstance(rows, list):
        problems.append(Problem(_SHARING, "must be a list"))
        return
    for i, row in enumerate(rows):
        if isinstance(row, dict):
            yield f"{_SHARING}[{i}]", row
        else:
            problems.append(Problem(f"{_SHARING}[{i}]", "must be an object"))


def _object(of: Json, key: str, path: str, problems: list[Problem]) -> Json:
    found = of.get(key) or {}
    if isinstance(found, dict):
        return found
    problems.append(Problem(path, "must be an object"))
    return {}


def _integer(row: Json, key: str, path: str, problems: list[Problem]) -> int:
    """Return the integer at a key. If it is not at least 1, append a problem and return 0."""
    value = row.get(key)
    if is_integer(value, 1, MAX_QUANTITY):
        return value
    problems.append(Problem(f"{path}.{key}", f"must be an integer of at least 1, not {_repr(value)}"))
    return 0


def _misnamed(path: str, row: Json, size: int) -> Iterator[Problem]:
    if row.get("name") != _NAME:
        yield Problem(f"{path}.name", f"must be {_NAME}, not {_repr(row.get('name'))}")
    resource = f"nvidia.com/gpu-{size}gb"
    if size and slice_of_resource(resource) is None:
        yield Problem(f"{path}.memoryGB", f"{size} GiB is more than any card has")
    elif size and row.get("rename") not in (device_type(f"{size}gb"), resource):
        yield Problem(
            f"{path}.rename", f"must be {device_type(f'{size}gb')}, as memoryGB says, not {_repr(row.get('rename'))}"
        )


def _repr(value: object) -> str:
    """Return a value for a message, shortened since it may be a large object."""
    return reprlib.repr(value)


def _devices(path: str, row: Json, problems: list[Problem]) -> Iterator[int]:
    """Yield the indexes of the cards of an entry, and append a problem for each invalid or repeated one."""
    devices = row.get("devices")
    if not isinstance(devices, list) or not devices:
        problems.append(Problem(f"{path}.devices", "must be a list of card indexes"))
        return
    seen: set[int] = set()
    for i, device in enumerate(devices):
        index = int(device) if re.fullmatch(r"\d{1,3}", str(device), re.ASCII) else None
        if index is None or index in seen:
            text = f"{_repr(device)} is not a card index" if index is None else f"card {index} is listed twice"
            problems.append(Problem(f"{path}.devices[{i}]", text))
        else:
            seen.add(index)
            yield index
