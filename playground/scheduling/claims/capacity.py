"""Computes how much of a device's capacity a request consumes.

A request without an amount consumes the default of the capacity's policy, or all of the capacity. Otherwise the policy
rounds the amount up. Source: k8s.io/dynamic-resource-allocation/structured, consumable_capacity.go.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mgpu.model.quantities import parse_quantity

Raw = Mapping[str, Any]
Amounts = Mapping[str, Fraction]
"""Amounts by the names of capacities."""
_UNITS = ((60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki"))


def consumption(requested: Mapping[str, Any], capacity: Mapping[str, Raw], used: Amounts) -> dict[str, str] | None:
    """Return the quantities that a request consumes of a device, or None if they are not free.

    Args:
        requested: The quantities of the request.
        capacity: The capacity of the device.
        used: What is already consumed of the device.
    """
    if not requested.keys() <= capacity.keys():
        return None
    found: dict[str, str] = {}
    for name, row in capacity.items():
        policy = row.get("requestPolicy") or {}
        amount = _consumed(requested.get(name), str(row["value"]), policy)
        if _violates(amount, policy) or used.get(name, Fraction(0)) + parse_quantity(amount) > parse_quantity(
            row["value"]
        ):
            return None
        found[name] = amount
    return found


def _consumed(requested: Any, total: str, policy: Raw) -> str:
    if requested is None:
        return str(policy.get("default") or total)
    bounds = policy.get("validRange") or {}
    options = policy.get("validValues") or ()
    if bounds.get("min") is not None:
        return _rounded_up(str(requested), bounds)
    wanted = parse_quantity(requested)
    return next((str(option) for option in options if wanted <= parse_quantity(option)), str(requested))


def _rounded_up(requested: str, bounds: Raw) -> str:
    low = parse_quantity(bounds["min"])
    step = bounds.get("step")
    wanted = parse_quantity(requested)
    if wanted < low:
        return str(bounds["min"])
    if step is None:
        return requested
    width = parse_quantity(step)
    return _binary(int(low + width * -(-(wanted - low) // width)))


def _binary(amount: int) -> str:
    """Return a whole number as a quantity with the largest binary unit that divides it."""
    for shift, unit in _UNITS:
        if amount and amount % (1 << shift) == 0:
            return f"{amount >> shift}{unit}"
    return str(amount)


def _violates(amount: str, policy: Raw) -> bool:
    """Return whether a policy does not allow an amount. It always allows its default."""
    value = parse_quantity(amount)
    bounds = policy.get("validRange")
    options = policy.get("validValues")
    default = policy.get("default")
    if default is not None and value == parse_quantity(default):
        return False
    if bounds is not None:
        above = bounds.get("max") is not None and value > parse_quantity(bounds["max"])
        step = bounds.get("step")
        between = step is not None and (value - parse_quantity(bounds["min"])) % parse_quantity(step) != 0
        return above or between
    return bool(options) and value not in [parse_quantity(option) for option in options or ()]
