"""Reads what ResourceClaims request, and which devices allocated ResourceClaims use."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mgpu.model.quantities import parse_quantity
from playground.scheduling.claims.pools import Device, DeviceId

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to satisfy a request: the request itself, or one of its `firstAvailable`.

    Attributes:
        name: The name as in allocation results: `gpu`, or `gpu/small` for one of several alternatives.
        request: The name of the request.
        device_class: The name of the DeviceClass.
        count: The number of devices, or None for all that match.
        amounts: The requested capacity.
        selectors: The CEL expressions of the request.
        tolerations: The device tolerations.
        admin: Whether the devices may be in use.
    """

    name: str
    request: str
    device_class: str
    count: int | None
    amounts: Mapping[str, Any]
    selectors: tuple[str, ...]
    tolerations: tuple[Raw, ...]
    admin: bool

    def tolerates(self, device: Device) -> bool:
        """Return whether the request tolerates all taints of a device that keep it from being allocated."""
        taints = device.raw.get("taints") or ()
        active = [taint for taint in taints if taint.get("effect") in ("NoSchedule", "NoExecute")]
        return all(any(_tolerates(row, taint) for row in self.tolerations) for taint in active)


def _tolerates(toleration: Raw, taint: Raw) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if (toleration.get("operator") or "Equal") == "Exists":
        return True
    return (toleration.get("value") or "") == (taint.get("value") or "")


def requests_of_claim(claim: Raw) -> list[tuple[Alternative, ...]]:
    """Return the alternatives of each request of a claim."""
    found: list[tuple[Alternative, ...]] = []
    for row in claim["spec"]["devices"].get("requests") or ():
        name = row["name"]
        if row.get("exactly") is not None:
            found.append((_alternative(name, name, row["exactly"]),))
            continue
        rows = row.get("firstAvailable") or ()
        found.append(tuple(_alternative(f"{name}/{one['name']}", name, one) for one in rows))
    return found


def _alternative(name: str, request: str, row: Raw) -> Alternative:
    return Alternative(
        name,
        request,
        row["deviceClassName"],
        None if row.get("allocationMode") == "All" else int(row.get("count") or 1),
        (row.get("capacity") or {}).get("requests") or {},
        selectors_of(row),
        tuple(row.get("tolerations") or ()),
        bool(row.get("adminAccess")),
    )


def selectors_of(row: Raw) -> tuple[str, ...]:
    """Return the CEL expressions of a request or of the spec of a DeviceClass."""
    return tuple(selector["cel"]["expression"] for selector in row.get("selectors") or ())


@dataclass(slots=True)
class Constraint:
    """A constraint between the devices of a claim, with the values of the devices that were chosen so far.

    Attributes:
        attribute: The fully qualified name of the attribute.
        distinct: Whether the values must differ. Otherwise they must be equal.
        requests: The names of the requests that the constraint concerns; if there are none, it concerns all.
    """

    attribute: str
    distinct: bool
    requests: frozenset[str]
    values: list[Raw] = field(default_factory=list)

    def concerns(self, wanted: Alternative) -> bool:
        return not self.requests or bool(self.requests & {wanted.name, wanted.request})

    def add(self, wanted: Alternative, device: Device) -> bool:
        """Add a device that is chosen for a request. Return False if the constraint forbids it."""
        if not self.concerns(wanted):
            return True
        value = device.attribute(self.attribute)
        if value is None or (value in self.values if self.distinct else self.values and value != self.values[0]):
            return False
        self.values.append(value)
        return True

    def remove(self, wanted: Alternative) -> None:
        """Undo the last `add` that returned True for this request."""
        if self.concerns(wanted):
            self.values.pop()


def constraints_of(claim: Raw) -> list[Constraint]:
    """Return the constraints of a claim, without any device."""
    found = []
    for row in claim["spec"]["devices"].get("constraints") or ():
        distinct = row.get("matchAttribute") is None
        name = row["distinctAttribute"] if distinct else row["matchAttribute"]
        found.append(Constraint(name, distinct, frozenset(row.get("requests") or ())))
    return found


@dataclass(slots=True)
class Usage:
    """What the allocated claims use.

    Attributes:
        taken: The devices that no other request can use.
        amounts: The consumed capacity of each device that several requests share.
        shares: The number of these requests.
    """

    taken: set[DeviceId] = field(default_factory=set)
    amounts: dict[DeviceId, dict[str, Fraction]] = field(default_factory=dict)
    shares: dict[DeviceId, int] = field(default_factory=dict)

    def add(self, allocation: Raw) -> None:
        """Add the allocation of a claim. Devices with administrative access are not in use."""
        for row in allocation["devices"].get("results") or ():
            if row.get("adminAccess"):
                continue
            device = DeviceId(row["driver"], row["pool"], row["device"])
            if row.get("shareID"):
                self.consume(device, row.get("consumedCapacity") or {})
            else:
                self.taken.add(device)

    def consume(self, device: DeviceId, amounts: Mapping[str, Any], sign: int = 1) -> None:
        """Add the consumption of one request of a shared device, or subtract it if `sign` is -1."""
        self.shares[device] = self.shares.get(device, 0) + sign
        used = self.amounts.setdefault(device, {})
        for name, amount in amounts.items():
            used[name] = used.get(name, Fraction(0)) + sign * parse_quantity(amount)

    def is_used(self, device: DeviceId) -> bool:
        return device in self.taken or self.shares.get(device, 0) > 0


def usage_of(allocations: Iterable[Raw]) -> Usage:
    """Return what allocations use together."""
    found = Usage()
    for allocation in allocations:
        found.add(allocation)
    return found


def referenced_classes(claim: Raw) -> Iterator[tuple[str, str]]:
    """Yield the name of each request or alternative of a claim, and the name of its DeviceClass."""
    for alternatives in requests_of_claim(claim):
        for wanted in alternatives:
            yield wanted.name, wanted.device_class
