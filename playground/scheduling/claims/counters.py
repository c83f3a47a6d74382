"""Counts the shared counters of pools, which devices consume that are partitions of the same hardware."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from mgpu.model.quantities import parse_quantity
from playground.scheduling.claims.device_requests import Usage
from playground.scheduling.claims.pools import Device, Pool

_Counter = tuple[str, str, str, str]
"""The driver, the pool, the counter set and the name of a counter."""


class Counters:
    """What is left of the counters of pools. A device that is in use has consumed its counters once."""

    def __init__(self, pools: Sequence[Pool], usage: Usage) -> None:
        self._left: dict[_Counter, Fraction] = {}
        for pool in pools:
            for name, counters in pool.counters.items():
                for counter, row in counters.items():
                    self._left[pool.driver, pool.name, name, counter] = parse_quantity(row["value"])
            for device in (*pool.devices, *pool.others):
                if usage.is_used(device.id):
                    self._change(device, -1)

    def take(self, device: Device) -> bool:
        """Consume the counters of a device. Return False, and consume nothing, if one of them is not sufficient."""
        self._change(device, -1)
        if all(self._left.get(key, Fraction(0)) >= 0 for key, _ in _consumed(device)):
            return True
        self.release(device)
        return False

    def release(self, device: Device) -> None:
        """Undo `take`."""
        self._change(device, 1)

    def _change(self, device: Device, sign: int) -> None:
        for key, amount in _consumed(device):
            self._left[key] = self._left.get(key, Fraction(0)) + sign * amount


def _consumed(device: Device) -> Iterator[tuple[_Counter, Fraction]]:
    for row in device.raw.get("consumesCounters") or ():
        for name, counter in row["counters"].items():
            key = (device.id.driver, device.id.pool, row["counterSet"], name)
            yield key, parse_quantity(counter["value"])
