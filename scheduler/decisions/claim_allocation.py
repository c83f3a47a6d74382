"""Puts decided cards into the allocation of a ResourceClaim.

The admission of claims patches the allocation that kube-scheduler writes, and the repair writes an allocation itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mgpu.model.cards import Card
from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.mig_devices import mig_device_at
from mgpu.model.resource_claims import Claim, Result, consumed_capacity, device_name


class Change(NamedTuple):
    """One field of an allocation result that differs from the decision.

    Attributes:
        position: The position of the result in the allocation.
        field: `device` or `consumedCapacity`.
    """

    position: int
    field: str
    value: Any


def changes(
    allocation: Mapping[str, Any], claim: Claim, request: GpuRequest, placement: Placement, cards: Mapping[int, Card]
) -> Iterator[Change]:
    """Yield what must change in the allocation of a claim so that it has the decided cards.

    If kube-scheduler's choice agrees with the decision, nothing changes. The consumed capacity of a whole card depends
    on the card. Where the result states no consumed capacity, the API server has no such field, and none is added.

    Args:
        allocation: `status.allocation` from which `claim.results` was read.
        cards: The GPUs of the node by index.
    """
    rows = allocation["devices"]["results"]
    own = [result for result in claim.results if not result.admin]
    yield from _changed_instances(own, request, placement)
    for container in request.containers:
        results = [r for r in own if r.request == container.container and r.mig_device is None]
        for result, index in zip(results, placement.cards(container.container), strict=True):
            if result.device != device_name(index):
                yield Change(result.position, "device", device_name(index))
            before = rows[result.position].get("consumedCapacity")
            takes_all = container.whole or container.ratio is not None
            if not before or not takes_all or index not in cards:
                continue
            consumed = {**before, **consumed_capacity(container, cards[index])}
            if consumed != before:
                yield Change(result.position, "consumedCapacity", consumed)


def _changed_instances(results: Sequence[Result], request: GpuRequest, placement: Placement) -> Iterator[Change]:
    for one in request.others:
        found = [(r, d) for r in results if r.request == one.container and (d := r.mig_device) and d.type == one.type]
        for (result, before), index in zip(found, placement.cards(one.container, one.type), strict=True):
            device = mig_device_at(one.type, index)
            if device is not None and device != before:
                yield Change(result.position, "device", device.name)


def with_changes(allocation: Mapping[str, Any], found: Iterator[Change]) -> dict[str, Any]:
    """Return a copy of an allocation with these changes."""
    rows = [dict(row) for row in allocation["devices"]["results"]]
    for change in found:
        rows[change.position][change.field] = change.value
    return {**allocation, "devices": {**allocation["devices"], "results": rows}}
