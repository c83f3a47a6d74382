"""Brings the limit of one running container on one card into force. The calls block, so call them on a thread."""

from typing import NamedTuple

from deviceplugin.isolation.backend import Measured, Unable
from deviceplugin.isolation.driver.containers import RunningContainer
from deviceplugin.isolation.driver.memory_limits import Limit, MemoryLimits
from deviceplugin.isolation.driver.toolkit_hook import whole_mib
from deviceplugin.isolation.limits import CardLimit

_MIB = 1 << 20
_NO_CGROUP = "the container runtime does not report its cgroup"
_TOO_LOW = "the driver did not take the limit; it does not lower one below the present use"


class Enforced(NamedTuple):
    """What has come of an attempt.

    Attributes:
        measured: What the container uses of the card; None if it could not be read.
        problem: Why the limit is not in force, as a clause; "" if it is.
    """

    measured: Measured | None
    problem: str


def amount(limit: CardLimit) -> int:
    """Return the limit in bytes, in whole MiB as NVIDIA's hook sets it."""
    return min(whole_mib(limit.memory or 0) * _MIB, limit.card.memory)


def enforce(limits: MemoryLimits, container: RunningContainer, limit: CardLimit) -> Enforced:
    """Set the limit unless it is in force."""
    if container.cgroup is None:
        return Enforced(None, _NO_CGROUP)
    found = limits.read(limit.card.uuid, container.cgroup)
    if isinstance(found, Unable) or found.hard != amount(limit):
        found = limits.set(limit.card.uuid, container.cgroup, amount(limit))
    if isinstance(found, Unable):
        return Enforced(None, found.reason)
    is_held = found.hard is not None and found.hard <= amount(limit)
    measured = Measured((container.uid, container.name), limit.card.uuid, found.used, None, found.hard)
    return Enforced(measured, "" if is_held else _TOO_LOW)


def resize(limits: MemoryLimits, container: RunningContainer, limit: CardLimit) -> str:
    """Change the limit. Return why that is not possible, or ""."""
    if container.cgroup is None:
        return _NO_CGROUP
    found = limits.read(limit.card.uuid, container.cgroup)
    if isinstance(found, Limit) and found.used > amount(limit):
        used, most = found.used // _MIB, amount(limit) // _MIB
        return f"it uses {used} MiB of card {limit.card.index}, more than {most} MiB"
    return enforce(limits, container, limit).problem
