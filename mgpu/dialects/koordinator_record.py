"""`device-allocated`, the annotation in which Koordinator records the devices of a pod.

Source: docs/design/koordinator.md, "Annotations".

One allocation per pod: per type a list of devices, with what the pod as a whole has of each.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu.model.cards import GPU, WHOLE_CORE, WHOLE_RATIO
from mgpu.model.cards import GPU as GPU_TYPE
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import Amount, ContainerRequest, peak
from mgpu.model.ledger import Minor, Share, share_of
from mgpu.model.quantities import QuantityError, quantity_of_bytes, whole_bytes, whole_number

ALLOCATED = "scheduling.koordinator.sh/device-allocated"
_PATH = f"metadata.annotations[{ALLOCATED}]"
_PREFIX = "koordinator.sh/"
_PREFIXES = (_PREFIX, "kubernetes.io/")
"""The second one is the seed's older spelling."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a pod has of one device: core (of other types: of the device) and ratio in percent, memory in bytes.

    id: its UUID; "": not given.
    """

    type: str
    minor: int
    id: str = ""
    core: int = 0
    memory: int = 0
    ratio: int = 0


def write(devices: Iterable[Device]) -> str:
    """The annotation, types and minors in order, as Koordinator spells it: amounts that are 0 are left out."""
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


def read(text: str) -> tuple[Device, ...]:
    """The devices in the annotation's order. Raises BadObject: a record is read whole or not at all.

    What else Koordinator writes beside the resources known here is left alone.
    """
    table = load(text, _PATH)
    devices: list[Device] = []
    for type, rows in table.items():
        if not isinstance(rows, list):
            raise _bad(f"{type} must be a list")
        devices += (_device(type, row) for row in rows)
    seen: set[tuple[str, int]] = set()
    for device in devices:
        if (device.type, device.minor) in seen:
            raise _bad(f"names minor {device.minor} of {device.type} twice")
        seen.add((device.type, device.minor))
    return tuple(devices)


def load(text: str, path: str) -> Mapping[str, Any]:
    """The JSON object in an annotation. Raises BadObject."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadObject([Problem(path, f"is not JSON: {str(error)[:80]}")]) from error
    if not isinstance(table, dict):
        raise BadObject([Problem(path, "must be an object")])
    return table


def _device(type: str, row: object) -> Device:
    resources = row.get("resources") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(resources, dict):
        raise _bad(f"every {type} must be an object with minor and resources")
    minor, id = row.get("minor", 0), row.get("id", "")  # Koordinator leaves out a minor of 0
    if not isinstance(minor, int) or isinstance(minor, bool) or minor < 0:
        raise _bad(f"minor must be an integer of at least 0, not {minor!r}")
    if not isinstance(id, str):
        raise _bad(f"the id of minor {minor} must be a string")
    amounts = {what: _amount(resources, name, bytes=what == "memory") for what, name in _names(type).items()}
    return Device(type, minor, id, **amounts)


def _amount(resources: Mapping[str, object], name: str, *, bytes: bool) -> int:
    text = next((resources[prefix + name] for prefix in _PREFIXES if prefix + name in resources), 0)
    try:
        amount = whole_bytes(text) if bytes else whole_number(text)
    except QuantityError as error:
        raise _bad(f"{name}: {error}") from error
    if amount < 0:
        raise _bad(f"{name} must be at least 0, not {text}")
    return amount


def _names(type: str) -> Mapping[str, str]:
    """The resources of a device of this type, without prefix, by the amount that each is."""
    return {"core": "gpu-core", "memory": "gpu-memory", "ratio": "gpu-memory-ratio"} if type == GPU else {"core": type}


def _bad(message: str) -> BadObject:
    return BadObject([Problem(_PATH, message)])


PER_CONTAINER = "mgpu.io/container-devices"
"""`{"a":{"gpu":[0,1]},"b":{"rdma":[0]}}`: which minors of the pod's allocation each container has."""


def by_container(requests: Sequence[ContainerRequest], devices: Sequence[Device], text: str) -> Iterator[Share]:
    """Yield the shares that mgpu's own record per container names. Raises BadObject."""
    table, by_minor = load(text, path_of(PER_CONTAINER)), {(d.type, d.minor): d for d in devices}
    on: dict[tuple[str, int], list[ContainerRequest]] = {key: [] for key in by_minor}
    for request in requests:
        row = table.get(request.container)
        minors = row.get(request.type) if isinstance(row, dict) else None
        what = f"{request.type} of container {request.container!r}"
        if not isinstance(minors, list) or len(minors) != request.cards or len(set(map(str, minors))) != request.cards:
            rule = f"must be {request.cards} different minor{'' if request.cards == 1 else 's'}"
            raise BadObject([Problem(path_of(PER_CONTAINER), f"{what} {rule}, not {str(minors)[:80]}")])
        for minor in minors:
            device = by_minor.get((request.type, minor)) if type(minor) is int else None
            if device is None:
                text = f"{what} names {minor!r}, which {ALLOCATED} does not"
                raise BadObject([Problem(path_of(PER_CONTAINER), text)])
            on[device.type, device.minor].append(request)
            yield share_of(request, _named(device))
    _refuse_unasked(requests, table)
    for key, of_device in on.items():
        _refuse_unequal(
            f"minor {key[1]} of {key[0]}", [by_minor[key]], [replace(request, cards=1) for request in of_device]
        )


def _refuse_unasked(requests: Sequence[ContainerRequest], table: Mapping[str, Any]) -> None:
    """Raises BadObject where a container has a row of a type that it does not ask for."""
    asked = {(request.container, request.type) for request in requests}
    named = ((name, type) for name, row in table.items() for type in (row if isinstance(row, dict) else (row,)))
    for name, type in named:
        if (name, type) not in asked:
            text = f"gives {str(type)[:40]!r} to container {name[:63]!r}, which does not ask for it"
            raise BadObject([Problem(path_of(PER_CONTAINER), text)])


def of_pod(requests: Sequence[ContainerRequest], devices: Sequence[Device]) -> Iterator[Share]:
    """Amounts are those that are asked for; a record only says of which devices, and how they are spread over them."""
    for type in dict.fromkeys([*(a.type for a in requests), *(d.type for d in devices)]):
        wanted, given = [a for a in requests if a.type == type], [d for d in devices if d.type == type]
        if wanted and not given:
            raise BadObject(
                [Problem(path_of(ALLOCATED), f"names no {type}, container {wanted[0].container!r} asks for it")]
            )
        most = sum(request.cards for request in wanted)
        if len(given) > most or (len(wanted) == 1 and len(given) != most):
            text = f"names {len(given)} devices of type {type}, the pod asks for {most or 'none'}"
            raise BadObject([Problem(path_of(ALLOCATED), text)])
        if len(wanted) == 1:
            for device in given:
                _refuse_unequal(f"minor {device.minor} of {type}", [device], [replace(wanted[0], cards=1)])
            yield from (share_of(wanted[0], _named(d)) for d in given)
            continue
        if len({bool(request.memory) for request in wanted}) > 1:
            text = f"does not say what each container has of {type}, and they ask for memory in bytes and in percent"
            raise BadObject([Problem(path_of(ALLOCATED), text)])
        _refuse_unequal(type, given, wanted)
        if any(d.core > WHOLE_RATIO or d.ratio > WHOLE_RATIO for d in given):
            raise BadObject([Problem(path_of(ALLOCATED), f"has more than 100 percent of a device of type {type}")])
        yield from _spread(wanted, given)


def _spread(requests: Sequence[ContainerRequest], devices: Sequence[Device]) -> Iterator[Share]:
    """What several containers hold together of each device, as shares of the first one; the others hold nothing of it.

    Of memory and ratio only what the containers ask for is taken: the other one follows from it (`amount_of`).
    """
    first, *others = requests
    in_bytes, gpu = any(request.memory for request in requests), first.type == GPU_TYPE
    for d in devices:
        memory, ratio = (d.memory, 0) if in_bytes else (0, d.ratio)
        of_first = ratio if gpu else None
        yield Share(first.container, _named(d), d.core * 10, memory, stage=first.stage, ratio=of_first, type=d.type)
        of_others = 0 if gpu else None
        yield from (Share(a.container, _named(d), stage=a.stage, ratio=of_others, type=d.type) for a in others)


def _refuse_unequal(what: str, devices: Sequence[Device], requests: Sequence[ContainerRequest]) -> None:
    """Raises BadObject where these devices together are not what these containers ask for at their busiest moment.

    Of memory and ratio those are compared that all containers count in; the other one depends on the card. Memory that
    does not divide evenly over cards may be rounded up or down on each.
    """
    busiest = peak((request.stage, _asked(request)) for request in requests)
    core, memory, ratio = (sum(getattr(d, name) for d in devices) for name in ("core", "memory", "ratio"))
    wanted = [("core", core, busiest.core * WHOLE_RATIO // WHOLE_CORE, 0)]
    if not any(request.memory for request in requests):
        wanted.append(("memory ratio", ratio, busiest.ratio, 0))
    elif all(request.memory for request in requests):
        wanted.append(("memory", memory, busiest.memory, sum(request.cards for request in requests)))
    for name, found, asked, rounding in wanted:
        if not asked - rounding <= found <= asked:
            raise BadObject([Problem(path_of(ALLOCATED), f"{what} has {found} {name}, its containers ask for {asked}")])


def _asked(request: ContainerRequest) -> Amount:
    """What a container asks for of all its cards together, as far as that does not depend on the cards."""
    ratio = WHOLE_RATIO if request.whole else request.ratio or 0
    return Amount(request.cards * request.core, request.cards * request.memory, 0, request.cards * ratio)


def _named(device: Device) -> str | Minor:
    return device.id or Minor(device.minor)


def path_of(key: str) -> str:
    return f"metadata.annotations[{key}]"
