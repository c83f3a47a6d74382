"""What each container of a pod holds of the devices that `device-allocated` gives to the pod (koordinator.md)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgpu.dialects.device_allocated import ALLOCATED, Device, load
from mgpu.model.cards import GPU as GPU_TYPE
from mgpu.model.cards import WHOLE_CORE, WHOLE_RATIO
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import Amount, ContainerRequest, peak
from mgpu.model.ledger import Minor, Share, share_of

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
