"""Reads and writes the `Device` object of a node, which lists its cards and other devices.

docs/design/koordinator.md, "Device CRD", describes the format. The node's agent writes the object, and the scheduler
and the commands read it. Koordinator's older spellings are accepted too (`deviceType`, `resource`,
`kubernetes.io/gpu-*`). The size of a Device is limited, because a compromised node could write a very large one.

The module also reads the card lists of simulated nodes.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mgpu.model.cards import GPU, Card, noun
from mgpu.model.errors import BadObject, Problem, raise_if_any
from mgpu.model.pods import Node
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, quantity_of_bytes, whole_bytes, whole_number
from mgpu.model.raw_objects import is_integer

DEVICE_API = "scheduling.koordinator.sh/v1alpha1"
INDEX_LABEL = "mgpu.io/index"
MODEL_LABEL = "node.koordinator.sh/gpu-model"
WHOLE_CARDS_LABEL = "mgpu.io/whole-cards"
"""The label of a Node that names the device plugin which serves `nvidia.com/gpu`. The value is `nvidia` for NVIDIA's
plugin. With the value `mgpu`, or without the label, mgpu's agent serves the resource."""
_PREFIXES = ("koordinator.sh/", "kubernetes.io/")
_TYPE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)

_MAX_MEMORY = MAX_QUANTITY // 1000
"""The most bytes of one card, chosen so that sums and percentages of it stay below 2^63."""

MAX_GPUS = 64
"""The most GPUs of one node. The largest servers have 16 to 20, and the scheduler's work grows with their number."""

_MAX_DEVICES = 1024
"""The most devices of one node, including virtual functions of network cards."""

_MAX_TEXT = 128
"""The most characters of a device's UUID and of its model. UUIDs have 40."""


def read_device(raw: Mapping[str, Any]) -> tuple[Card, ...]:
    """Return the devices in a Device object: GPUs by index, then other devices by type and index.

    Devices of other types than `gpu` have no memory.

    Raises:
        BadObject: if the object is invalid. It lists the first problem of each invalid device.
    """
    spec = raw.get("spec")
    rows = spec.get("devices") if isinstance(spec, dict) else None
    if rows is not None and not isinstance(rows, list):
        raise BadObject([Problem("spec.devices", "must be a list")])
    if rows and len(rows) > _MAX_DEVICES:
        raise BadObject([Problem("spec.devices", f"has {len(rows)} devices, but a node has at most {_MAX_DEVICES}")])
    cards, problems = [], []
    for i, row in enumerate(rows or ()):
        path = f"spec.devices[{i}]"
        if not isinstance(row, dict):
            problems.append(Problem(path, "must be an object"))
        else:
            try:
                cards.append(_read_card(row, path))
            except BadObject as error:
                problems += error.problems
    problems += _repeated(cards, "spec.devices")
    problems += _too_many_gpus(cards, "spec.devices")
    raise_if_any(problems)
    return tuple(sorted(cards, key=lambda card: (card.type != GPU, card.type, card.index)))


def _read_card(row: Mapping[str, Any], path: str) -> Card:
    type_ = row.get("type", row.get("deviceType"))
    if not isinstance(type_, str) or not _TYPE.fullmatch(type_):
        raise BadObject([Problem(f"{path}.type", f"must be gpu or the name of another device type, not {type_!r}")])
    resources = row.get("resources", row.get("resource")) or {}
    labels, topology = row.get("labels") or {}, row.get("topology") or {}
    for part, name in ((resources, "resources"), (labels, "labels"), (topology, "topology")):
        if not isinstance(part, dict):
            raise BadObject([Problem(f"{path}.{name}", "must be an object")])
    minor = row.get("minor", 0)  # Koordinator omits a minor of 0
    if not is_integer(minor, 0, MAX_QUANTITY):
        raise BadObject([Problem(f"{path}.minor", f"must be an integer of at least 0, not {str(minor)[:80]}")])
    uuid = row.get("id", "" if type_ == GPU else f"{type_}-{minor}")
    if not isinstance(uuid, str) or not 0 < len(uuid) <= _MAX_TEXT:
        text = f"must be the UUID of the {noun(type_)}, at most {_MAX_TEXT} characters"
        raise BadObject([Problem(f"{path}.id", text)])
    model = str(labels.get(MODEL_LABEL, ""))
    if len(model) > _MAX_TEXT:
        raise BadObject([Problem(f"{path}.labels[{MODEL_LABEL}]", f"has more than {_MAX_TEXT} characters")])
    for name, amount in resources.items():
        _amount(whole_bytes, amount, f"{path}.resources[{name}]", least=0)
    name = next((p + "gpu-memory" for p in _PREFIXES if p + "gpu-memory" in resources), _PREFIXES[0] + "gpu-memory")
    memory = 0
    if type_ == GPU:
        memory = _amount(whole_bytes, resources.get(name), f"{path}.resources[{name}]", least=1, most=_MAX_MEMORY)
    index = _amount(whole_number, labels.get(INDEX_LABEL, minor), f"{path}.labels[{INDEX_LABEL}]", least=0)
    numa = topology.get("nodeID")
    return Card(
        index=index,
        uuid=uuid,
        model=sys.intern(model),  # All cards of the cluster share the few texts.
        memory=memory,
        healthy=row.get("health", "deviceType" not in row) is not False,  # Koordinator's older writer omits false
        numa=numa if isinstance(numa, int) and 0 <= numa <= MAX_QUANTITY else None,
        minor=minor,
        type=sys.intern(type_),
    )


def _amount(read: Callable[[object], int], value: object, path: str, *, least: int, most: int = MAX_QUANTITY) -> int:
    try:
        amount = read(value)
    except QuantityError as error:
        raise BadObject([Problem(path, str(error))]) from error
    if amount < least:
        raise BadObject([Problem(path, f"must be at least {least}, not {value}")])
    if amount > most:
        raise BadObject([Problem(path, f"{value} is more than any card has")])
    return amount


def has_gained_capacity(before: Iterable[Card], after: Iterable[Card]) -> bool:
    """Return whether more pods may fit, because a healthy card is new, was unhealthy before, or has grown."""
    usable = {(card.type, card.uuid): (card.core, card.memory) for card in before if card.healthy}
    after = [card for card in after if card.healthy]
    return any((card.core, card.memory) > usable.get((card.type, card.uuid), (-1, -1)) for card in after)


def write_device(node: Node, node_uid: str, cards: Sequence[Card]) -> dict[str, Any]:
    """Return the Device object of a node.

    The Node owns the object, so the garbage collector deletes the object after the Node. If `node_uid` is empty, the
    object has no owner.
    """
    meta: dict[str, Any] = {"name": node.name}
    if node_uid:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node_uid}
        meta["ownerReferences"] = [owner]
    devices = [_write_card(card) for card in sorted(cards, key=lambda card: (card.type != GPU, card.type, card.index))]
    return {"apiVersion": DEVICE_API, "kind": "Device", "metadata": meta, "spec": {"devices": devices}}


def _write_card(card: Card) -> dict[str, Any]:
    of_gpu = {
        "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory": quantity_of_bytes(card.memory),
        "koordinator.sh/gpu-memory-ratio": "100",
    }
    entry: dict[str, Any] = {
        "type": card.type,
        "id": card.uuid,
        "minor": card.index if card.minor is None else card.minor,
        "health": card.healthy,
        "resources": of_gpu if card.type == GPU else {f"koordinator.sh/{card.type}": "100"},
        "labels": {INDEX_LABEL: str(card.index), **({MODEL_LABEL: card.model} if card.model else {})},
    }
    if card.numa is not None:
        # Koordinator's CRD requires all three fields. Koordinator writes -1 for an unknown socket.
        entry["topology"] = {"socketID": -1, "nodeID": card.numa, "pcieID": ""}
    return entry


def read_card_list(rows: object, node: str, path: str) -> tuple[Card, ...]:
    """Return the cards in the file of a simulated agent, or in the annotation `mgpu.io/cards` of a simulated Node.

    Args:
        rows: a list of `{"index": 0, "uuid": "GPU-0", "model": "A100-SXM4-80GB", "memory": "80Gi", "healthy": true}`.
            `"count": 8` stands for 8 equal cards with ascending indexes. The default of `index` is the number of cards
            that precede the row, and the default of `uuid` is `GPU-<node>-<index>`.
        path: the start of the paths in errors.
    Raises:
        BadObject: with the path of each problem (`<path>[0].memory`).
    """
    if not isinstance(rows, list):
        raise BadObject([Problem(path, "must be a list of cards")])
    cards: list[Card] = []
    problems: list[Problem] = []
    for i, row in enumerate(rows):
        try:
            cards += _listed(row, f"{path}[{i}]", node, len(cards))
        except BadObject as error:
            problems += error.problems
    problems += _repeated(cards, path)
    problems += _too_many_gpus(cards, path)
    raise_if_any(problems)
    return tuple(sorted(cards, key=lambda card: card.index))


_LISTED_KEYS = {"index", "uuid", "model", "memory", "healthy", "numa", "minor", "count"}


def _listed(row: object, path: str, node: str, following: int) -> list[Card]:
    if not isinstance(row, dict):
        raise BadObject([Problem(path, "must be an object")])
    problems = [
        Problem(f"{path}.{key}", f"unknown; the keys of a card are {', '.join(sorted(_LISTED_KEYS))}")
        for key in sorted(map(str, row.keys() - _LISTED_KEYS))
    ]
    numbers: dict[str, int | None] = {"index": following, "count": 1, "minor": None, "numa": None}
    for key in numbers:
        value, least, most = row.get(key), int(key == "count"), MAX_GPUS if key == "count" else MAX_QUANTITY
        if value is None:
            continue
        if is_integer(value, least, most):
            numbers[key] = value
        else:
            problems.append(Problem(f"{path}.{key}", f"must be an integer from {least} to {most}"))
    for key, kind in (("uuid", str), ("model", str), ("healthy", bool)):
        if key in row and not isinstance(row[key], kind):
            problems.append(Problem(f"{path}.{key}", f"must be a {'string' if kind is str else 'boolean'}"))
    try:
        memory = whole_bytes(row.get("memory"))
        if not 0 < memory <= _MAX_MEMORY:
            problems.append(Problem(f"{path}.memory", "must be greater than 0, and not more than any card has"))
    except QuantityError as error:
        problems.append(Problem(f"{path}.memory", str(error)))
    problems += (
        Problem(f"{path}.{key}", f"cannot be combined with count, since each card has its own {key}")
        for key in ("uuid", "minor")
        if row.get(key) is not None and numbers["count"] != 1
    )
    raise_if_any(problems)
    first = numbers["index"] or 0
    return [
        Card(
            index=i,
            uuid=row.get("uuid") or f"GPU-{node}-{i}",
            model=row.get("model", ""),
            memory=memory,
            healthy=row.get("healthy", True),
            numa=numbers["numa"],
            minor=numbers["minor"],
        )
        for i in range(first, first + (numbers["count"] or 1))
    ]


def _too_many_gpus(cards: Iterable[Card], path: str) -> list[Problem]:
    count = sum(card.type == GPU for card in cards)
    return [Problem(path, f"has {count} GPUs, but a node has at most {MAX_GPUS}")] if count > MAX_GPUS else []


def _repeated(cards: Iterable[Card], path: str) -> list[Problem]:
    problems, seen = [], set()
    for card in cards:
        for what, value in (("minor", str(card.minor)), ("UUID", card.uuid), ("index", str(card.index))):
            if (card.type, what, value) in seen and value != "None":
                problems.append(Problem(path, f"two {noun(card.type)}s have the {what} {value}"))
            seen.add((card.type, what, value))
    return problems
