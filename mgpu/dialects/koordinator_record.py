"""Reads and writes Koordinator's allocation record, the annotation `device-allocated`, and mgpu's supplement to it.

docs/design/koordinator.md, "Annotations", describes the formats. Koordinator records how much of each device the pod as
a whole has. If several containers request devices, mgpu also records the devices of each container. No part of an
invalid record is used, and a record must never give a pod more than the pod requests. Only `mgpu.dialects.koordinator`
uses this module.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu.dialects.protocol import unrequested_problems
from mgpu.model.cards import GPU, WHOLE_CORE, WHOLE_RATIO
from mgpu.model.errors import BadObject, Problem, raise_if_any
from mgpu.model.gpu_requests import Amount, ContainerRequest, peak
from mgpu.model.ledger import Minor, Share, share_of
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, quantity_of_bytes, whole_bytes, whole_number
from mgpu.model.raw_objects import annotation_path, is_integer, parse_json_object

ALLOCATED = "scheduling.koordinator.sh/device-allocated"
PER_CONTAINER = "mgpu.io/container-devices"
"""The annotation with the minors of each container: `{"a":{"gpu":[0,1]},"b":{"rdma":[0]}}`."""
_PREFIX = "koordinator.sh/"
_PREFIXES = (_PREFIX, "kubernetes.io/")
"""The prefixes of resource names in the record. The second prefix belongs to an older format of Koordinator."""


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """The part of one device that a pod has.

    Attributes:
        type: the type of the device, such as `gpu` or `rdma`.
        minor: the minor number of the device, which is unique among the pod's devices of this type.
        id: the UUID of the device; "" if the record has none.
        core: the core, in percent of the device.
        memory: the memory, in bytes.
        ratio: the memory, in percent of the device.
    """

    type: str
    minor: int
    id: str = ""
    core: int = 0
    memory: int = 0
    ratio: int = 0


def write_allocations(devices: Iterable[DeviceAllocation]) -> str:
    """Return the value of the annotation `ALLOCATED`, sorted by type and minor. Amounts of 0 are omitted."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for device in sorted(devices, key=lambda d: (d.type, d.minor)):
        amounts = [
            ("core", str(device.core)),
            ("memory", quantity_of_bytes(device.memory)),
            ("ratio", str(device.ratio)),
        ]
        names = _names(device.type)
        resources = {_PREFIX + names[what]: text for what, text in amounts if what in names and text != "0"}
        entry = {"minor": device.minor, "resources": resources, **({"id": device.id} if device.id else {})}
        by_type.setdefault(device.type, []).append(entry)
    return json.dumps(by_type, separators=(",", ":"))


def read_allocations(text: str) -> tuple[DeviceAllocation, ...]:
    """Return the devices in the value of `ALLOCATED`, in the order of the annotation. Unknown resources are ignored.

    Raises BadObject if the value is invalid.
    """
    devices: list[DeviceAllocation] = []
    for type, rows in parse_json_object(text, annotation_path(ALLOCATED)).items():
        if not isinstance(rows, list):
            raise _bad(f"{type} must be a list")
        devices += (_read_device(type, row) for row in rows)
    found: set[tuple[str, int]] = set()
    for device in devices:
        if (device.type, device.minor) in found:
            raise _bad(f"names minor {device.minor} of {device.type} twice")
        found.add((device.type, device.minor))
    return tuple(devices)


def recorded_shares(
    requests: Sequence[ContainerRequest], devices: Sequence[DeviceAllocation], text: str
) -> Iterator[Share]:
    """Yield the shares in mgpu's record of each container. Raises BadObject.

    Args:
        devices: the pod's allocation.
        text: the value of `PER_CONTAINER`.
    """
    table = parse_json_object(text, annotation_path(PER_CONTAINER))
    by_minor = {(d.type, d.minor): d for d in devices}
    on_device: dict[tuple[str, int], list[ContainerRequest]] = {key: [] for key in by_minor}
    for request in requests:
        row = table.get(request.container)
        minors = row.get(request.type) if isinstance(row, dict) else None
        what = f"{request.type} of container {request.container!r}"
        if not isinstance(minors, list) or len(minors) != request.cards or len(set(map(str, minors))) != request.cards:
            rule = f"must be {request.cards} different minor{'' if request.cards == 1 else 's'}"
            raise _bad(f"{what} {rule}, not {str(minors)[:80]}", PER_CONTAINER)
        for minor in minors:
            device = by_minor.get((request.type, minor)) if type(minor) is int else None
            if device is None:
                raise _bad(f"{what} names {minor!r}, which is not in {ALLOCATED}", PER_CONTAINER)
            on_device[device.type, device.minor].append(request)
            yield share_of(request, _card(device))
    raise_if_any([*unrequested_problems(requests, table, annotation_path(PER_CONTAINER))])
    for key, of_device in on_device.items():
        on_one = [replace(request, cards=1) for request in of_device]
        _refuse_unequal(f"minor {key[1]} of {key[0]}", [by_minor[key]], on_one)


def pod_shares(requests: Sequence[ContainerRequest], devices: Sequence[DeviceAllocation]) -> Iterator[Share]:
    """Yield the shares in a record that Koordinator itself wrote for the whole pod. Raises BadObject.

    The record determines the devices of each type. If a single container requests the type, its request determines the
    amounts. If several containers request the type, each of them may use all these devices, and it is unknown how much
    each one uses (`_joint_shares`).
    """
    for type in dict.fromkeys([*(r.type for r in requests), *(d.type for d in devices)]):
        of_type = [r for r in requests if r.type == type]
        recorded = [d for d in devices if d.type == type]
        if of_type and not recorded:
            raise _bad(f"names no device of type {type}, but container {of_type[0].container!r} requests it")
        most = sum(request.cards for request in of_type)
        if len(recorded) > most or (len(of_type) == 1 and len(recorded) != most):
            raise _bad(f"names {len(recorded)} devices of type {type}, but the pod requests {most or 'none'}")
        if len(of_type) == 1:
            for device in recorded:
                _refuse_unequal(f"minor {device.minor} of {type}", [device], [replace(of_type[0], cards=1)])
            yield from (share_of(of_type[0], _card(d)) for d in recorded)
            continue
        if len({bool(request.memory) for request in of_type}) > 1:
            raise _bad(
                f"does not say what each container has of {type}, and some of the containers request memory in bytes, "
                "others in percent"
            )
        _refuse_unequal(type, recorded, of_type)
        if any(d.core > WHOLE_RATIO or d.ratio > WHOLE_RATIO for d in recorded):
            raise _bad(f"has more than 100 percent of a device of type {type}")
        yield from _joint_shares(of_type, recorded)


def _joint_shares(requests: Sequence[ContainerRequest], devices: Sequence[DeviceAllocation]) -> Iterator[Share]:
    """Yield the shares of several containers that have the same devices.

    The first container holds the recorded amounts of all, and the others hold 0. Memory is in the unit that the
    containers request, bytes or percent. `mgpu.model.gpu_requests.amount_of` computes the other unit from the card.
    """
    first, *others = requests
    in_bytes = any(request.memory for request in requests)
    is_gpu = first.type == GPU
    for device in devices:
        card = _card(device)
        memory, ratio = (device.memory, 0) if in_bytes else (0, device.ratio)
        of_first = ratio if is_gpu else None
        yield Share(
            first.container, card, device.core * 10, memory, stage=first.stage, ratio=of_first, type=device.type
        )
        of_others = 0 if is_gpu else None
        yield from (Share(r.container, card, stage=r.stage, ratio=of_others, type=device.type) for r in others)


def _refuse_unequal(what: str, devices: Sequence[DeviceAllocation], requests: Sequence[ContainerRequest]) -> None:
    """Raise BadObject unless the total of the devices is the most that the containers need at any time.

    Memory is compared in the unit that all containers use, since the other unit depends on the card. If they use
    different units, memory is not compared. Bytes that cannot be divided evenly among cards may be rounded up or down
    on each card.
    """
    busiest = peak((request.stage, _total(request)) for request in requests)
    core, memory, ratio = (sum(getattr(d, name) for d in devices) for name in ("core", "memory", "ratio"))
    compared = [("core", core, busiest.core * WHOLE_RATIO // WHOLE_CORE, 0)]
    if not any(request.memory for request in requests):
        compared.append(("memory ratio", ratio, busiest.ratio, 0))
    elif all(request.memory for request in requests):
        compared.append(("memory", memory, busiest.memory, sum(request.cards for request in requests)))
    for name, found, requested, rounding in compared:
        if not requested - rounding <= found <= requested:
            raise _bad(f"{what} has {found} {name}, but its containers request {requested}")


def _total(request: ContainerRequest) -> Amount:
    """Return the total of a container's request over its cards, in the units in which it is requested."""
    ratio = WHOLE_RATIO if request.whole else request.ratio or 0
    return Amount(request.cards * request.core, request.cards * request.memory, 0, request.cards * ratio)


def _card(device: DeviceAllocation) -> str | Minor:
    return device.id or Minor(device.minor)


def _read_device(type: str, row: object) -> DeviceAllocation:
    resources = row.get("resources") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(resources, dict):
        raise _bad(f"every entry of {type} must be an object whose field resources is an object")
    minor = row.get("minor", 0)  # Koordinator omits a minor of 0.
    id = row.get("id", "")
    if not is_integer(minor, 0, MAX_QUANTITY):
        raise _bad(f"minor must be an integer of at least 0, not {str(minor)[:80]}")
    if not isinstance(id, str):
        raise _bad(f"the id of minor {minor} must be a string")
    amounts = {what: _amount(resources, name, in_bytes=what == "memory") for what, name in _names(type).items()}
    return DeviceAllocation(type, minor, id, **amounts)


def _amount(resources: Mapping[str, object], name: str, *, in_bytes: bool) -> int:
    text = next((resources[prefix + name] for prefix in _PREFIXES if prefix + name in resources), 0)
    try:
        amount = whole_bytes(text) if in_bytes else whole_number(text)
    except QuantityError as error:
        raise _bad(f"{name}: {error}") from error
    if amount < 0:
        raise _bad(f"{name} must be at least 0, not {text}")
    return amount


def _names(type: str) -> Mapping[str, str]:
    """Return the resource name, without prefix, of each amount that a device of this type has."""
    return {"core": "gpu-core", "memory": "gpu-memory", "ratio": "gpu-memory-ratio"} if type == GPU else {"core": type}


def _bad(message: str, annotation: str = ALLOCATED) -> BadObject:
    return BadObject([Problem(annotation_path(annotation), message)])
