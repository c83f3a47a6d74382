"""Chooses devices for the ResourceClaims of a pod on one node, as kube-scheduler's structured allocator does.

The search tries the devices in the order of `pools.gather_pools` for one request after the other, and goes back to an
earlier choice if a later request cannot be satisfied. The first solution is the result.

Source: k8s.io/dynamic-resource-allocation/structured.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from playground.apiserver.device_expressions import ExpressionError, device_matches
from playground.scheduling.claims.allocation_results import Chosen, allocation_of
from playground.scheduling.claims.capacity import consumption
from playground.scheduling.claims.counters import Counters
from playground.scheduling.claims.device_requests import (
    Alternative,
    Constraint,
    Usage,
    constraints_of,
    requests_of_claim,
    selectors_of,
)
from playground.scheduling.claims.pools import Device, DeviceId, Pool, gather_pools

Raw = Mapping[str, Any]
_MOST_RESULTS = 32


class AllocationError(Exception):
    """The claims cannot be allocated on any node before one of the objects changes."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of one of the claims. `claim` is the index of the claim."""

    claim: int
    alternatives: tuple[Alternative, ...]


def allocate(
    claims: Sequence[Raw], node: Raw, slices: Sequence[Raw], classes: Mapping[str, Raw], usage: Usage
) -> list[dict[str, Any]] | None:
    """Return the allocation of each claim on a node, or None if the node has no suitable devices.

    Args:
        usage: What the allocated claims use, which the function does not change.

    Raises:
        AllocationError: A claim cannot be allocated, or a CEL expression fails.
    """
    search = _Search(claims, gather_pools(slices, node), classes, usage)
    if not search.run():
        return None
    name = node["metadata"]["name"]
    return [allocation_of(claim, search.results[i], classes, name) for i, claim in enumerate(claims)]


@dataclass(slots=True)
class _Taken:
    """A device that was chosen, with what `_Search._release` needs."""

    chosen: Chosen
    claim: int
    counted: bool


@dataclass
class _Search:
    """The state of a search.

    Attributes:
        results: The devices that are chosen at present, for each claim.
    """

    claims: Sequence[Raw]
    pools: Sequence[Pool]
    classes: Mapping[str, Raw]
    usage: Usage
    results: list[list[Chosen]] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [[] for _ in self.claims]
        self._requests = [_Request(i, row) for i, claim in enumerate(self.claims) for row in requests_of_claim(claim)]
        self._constraints: list[list[Constraint]] = [constraints_of(claim) for claim in self.claims]
        self._devices = [device for pool in self.pools if pool.usable for device in pool.devices]
        self._counters = Counters(self.pools, self.usage)
        # Which claims have which exclusive devices at present, and what is consumed of the shared ones.
        self._exclusive: dict[DeviceId, set[int]] = {}
        self._shared = Usage()
        self._matches: dict[tuple[DeviceId, int, str], bool] = {}
        self._all: dict[tuple[int, str], list[Device]] = {}

    def run(self) -> bool:
        """Search, and return whether all requests are satisfied."""
        for i, request in enumerate(self._requests):
            for wanted in request.alternatives:
                if wanted.device_class not in self.classes:
                    problem = f"could not retrieve device class {wanted.device_class}"
                    raise AllocationError(f"claim {self._name(request)}, request {wanted.name}: {problem}")
                if wanted.count is None:
                    self._all[i, wanted.name] = self._all_devices(i, wanted)
        for index, claim in enumerate(self.claims):
            least = sum(
                min(self._count(i, one) for one in request.alternatives)
                for i, request in enumerate(self._requests)
                if request.claim == index
            )
            if least > _MOST_RESULTS:
                name = claim["metadata"]["name"]
                limit = f"exceeds the claim limit of {_MOST_RESULTS}"
                raise AllocationError(f"claim {name}: number of requested devices {least} {limit}")
        return self._satisfy(0)

    def _name(self, request: _Request) -> str:
        return str(self.claims[request.claim]["metadata"]["name"])

    def _count(self, i: int, wanted: Alternative) -> int:
        return len(self._all[i, wanted.name]) if wanted.count is None else wanted.count

    def _all_devices(self, i: int, wanted: Alternative) -> list[Device]:
        """Return the devices for `allocationMode: All`. Raises AllocationError if a pool is being updated."""
        for pool in self.pools:
            if not pool.usable:
                state = "being updated" if not pool.complete else "invalid"
                problem = f"asks for all devices, but resource pool {pool.driver}/{pool.name} is currently {state}"
                raise AllocationError(f"claim {self._name(self._requests[i])}, request {wanted.name}: {problem}")
        return [d for d in self._devices if self._is_selectable(i, wanted, d) and self._consumed(wanted, d) is not None]

    def _satisfy(self, i: int) -> bool:
        """Satisfy the request `i` and all later ones."""
        if i == len(self._requests):
            return True
        return any(self._choose(i, wanted, 0, 0) for wanted in self._requests[i].alternatives)

    def _choose(self, i: int, wanted: Alternative, number: int, start: int) -> bool:
        """Choose the device `number` of a request and all later devices. The first candidate is that at `start`."""
        count = self._count(i, wanted)
        if wanted.count is None and not count:
            return False
        if number == count:
            return self._satisfy(i + 1)
        claim = self._requests[i].claim
        if len(self.results[claim]) + count - number > _MOST_RESULTS:
            return False
        for at, device in self._candidates(i, wanted, number, start):
            taken = self._take(i, wanted, device)
            if taken is None:
                continue
            if self._choose(i, wanted, number + 1, at + 1):
                return True
            self._release(wanted, device, taken)
        return False

    def _candidates(self, i: int, wanted: Alternative, number: int, start: int) -> Iterator[tuple[int, Device]]:
        if wanted.count is None:
            yield number, self._all[i, wanted.name][number]
            return
        for at in range(start, len(self._devices)):
            if self._is_selectable(i, wanted, self._devices[at]):
                yield at, self._devices[at]

    def _is_selectable(self, i: int, wanted: Alternative, device: Device) -> bool:
        """Return whether the expressions of the class and of the request are true for a device."""
        key = (device.id, i, wanted.name)
        if key not in self._matches:
            of_class = selectors_of(self.classes[wanted.device_class].get("spec") or {})
            try:
                self._matches[key] = all(
                    device_matches(expression, device.id.driver, device.raw)
                    for expression in (*of_class, *wanted.selectors)
                )
            except ExpressionError as error:
                where = f"{device.id.driver}/{device.id.pool}/{device.id.device}"
                raise AllocationError(f"claim {self._name(self._requests[i])}: device {where}: {error}") from error
        return self._matches[key]

    def _consumed(self, wanted: Alternative, device: Device) -> dict[str, str] | None:
        """Return what the request consumes of a device, or None if that is not free."""
        used = dict(self.usage.amounts.get(device.id, {}))
        for name, amount in self._shared.amounts.get(device.id, {}).items():
            used[name] = used.get(name, 0) + amount
        return consumption(wanted.amounts, device.raw.get("capacity") or {}, used)

    def _take(self, i: int, wanted: Alternative, device: Device) -> _Taken | None:
        """Choose a device for a request, or return None if that is not possible."""
        claim = self._requests[i].claim
        users = self._exclusive.setdefault(device.id, set())
        in_use = claim in users if wanted.admin else device.id in self.usage.taken or bool(users)
        amounts = self._consumed(wanted, device)
        if in_use or amounts is None or not wanted.tolerates(device):
            return None
        already = device.shared and (self.usage.is_used(device.id) or self._shared.is_used(device.id))
        counted = bool(device.raw.get("consumesCounters")) and not already
        if counted and not self._counters.take(device):
            return None
        if not self._constrain(claim, wanted, device):
            if counted:
                self._counters.release(device)
            if wanted.count is None:
                problem = f"cannot add device {device.id.device} because a claim constraint would not be satisfied"
                raise AllocationError(f"claim {self._name(self._requests[i])}, request {wanted.name}: {problem}")
            return None
        share = ""
        if device.shared:
            share = str(uuid.uuid4())
            self._shared.consume(device.id, amounts)
        else:
            users.add(claim)
        chosen = Chosen(wanted, device, share, amounts if device.shared else {})
        self.results[claim].append(chosen)
        return _Taken(chosen, claim, counted)

    def _constrain(self, claim: int, wanted: Alternative, device: Device) -> bool:
        """Add a device to the constraints of its claim. If one forbids it, return False and add it to none."""
        for i, constraint in enumerate(self._constraints[claim]):
            if not constraint.add(wanted, device):
                for earlier in self._constraints[claim][:i]:
                    earlier.remove(wanted)
                return False
        return True

    def _release(self, wanted: Alternative, device: Device, taken: _Taken) -> None:
        """Undo `_take`."""
        self.results[taken.claim].pop()
        if device.shared:
            self._shared.consume(device.id, taken.chosen.consumed, -1)
        else:
            self._exclusive[device.id].discard(taken.claim)
        if taken.counted:
            self._counters.release(device)
        for constraint in self._constraints[taken.claim]:
            constraint.remove(wanted)
