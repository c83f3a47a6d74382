"""What pods reserve of a node's resources, and what a node has: kube-scheduler's sums over decoded JSON.

For cpu and memory in mgpu's own decisions, and for all resources in the playground's scheduler and kubelet.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from mgpu.model.quantities import MAX_QUANTITY, QuantityError, parse_quantity

Raw = Mapping[str, Any]
Requests = dict[str, int]
"""Resource name → amount: cpu in thousandths, everything else in whole units (bytes, pods, devices)."""

_OF_ROOM = ("cpu", "memory")
MAX_PER_POD = MAX_QUANTITY // 1000
"""The most cpu or memory that is counted for one pod. 9E of cpu in each container would not fit into 64 bits in milli;
more than any node has means the same."""


class CpuMemory(NamedTuple):
    """An amount of cpu in milli and of memory in bytes."""

    cpu: int = 0
    memory: int = 0

    def minus(self, other: "CpuMemory") -> "CpuMemory":
        """Return what is left of it, at least 0. What a node does not report (`MAX`) stays unbounded."""
        return CpuMemory(
            *(have if have == MAX_QUANTITY else max(0, have - taken) for have, taken in zip(self, other, strict=True))
        )


NO_CPU_MEMORY = CpuMemory()
UNBOUNDED = CpuMemory(MAX_QUANTITY, MAX_QUANTITY)


def requests_of(pod: Raw, names: Collection[str] | None = None) -> Requests:
    """Return what a pod reserves on its node.

    Source: KEP-753 and KEP-2837. Init containers run beside the sidecars before them, app containers beside all
    sidecars. Pod-level requests replace that sum, and the overhead is added. A container's limits stand in for missing
    requests, as in the API server's defaults.

    Args:
        names: the resources to return; None: all of them, and `pods: 1`.
    Raises:
        QuantityError
    """
    spec = pod.get("spec") or {}
    running: Requests = {}
    peak: Requests = {}
    for container in filter(None, spec.get("initContainers") or ()):
        at_once = add_requests(running, _requests(container, names))
        peak = _largest(peak, at_once)
        if container.get("restartPolicy") == "Always":
            running = at_once
    for container in filter(None, spec.get("containers") or ()):
        running = add_requests(running, _requests(container, names))
    total = _largest(peak, running)
    of_pod = spec.get("resources") or {}
    total = {**_amounts(of_pod.get("limits"), names), **total, **_amounts(of_pod.get("requests"), names)}
    total = add_requests(total, _amounts(spec.get("overhead"), names))
    return {**total, "pods": 1} if names is None else total


def requested_cpu_memory(pod: Raw) -> CpuMemory:
    """Return the cpu and memory of `requests_of`, each at most `MOST`. Raises QuantityError."""
    needed = requests_of(pod, _OF_ROOM)
    return CpuMemory(*(min(MAX_PER_POD, needed.get(name, 0)) for name in _OF_ROOM))


def allocatable(node: Raw, names: Collection[str] | None = None) -> Requests:
    """Return the node's allocatable, or its capacity where it reports none. Raises QuantityError."""
    status = node.get("status") or {}
    return _amounts(status.get("allocatable") or status.get("capacity"), names)


def allocatable_cpu_memory(node: Raw) -> CpuMemory:
    """Return the cpu and memory of `allocatable`; MAX of what the node does not report, or reports more of.

    Raises QuantityError.
    """
    there = allocatable(node, _OF_ROOM)
    return CpuMemory(*(min(MAX_QUANTITY, there.get(name, MAX_QUANTITY)) for name in _OF_ROOM))


def add_requests(used: Requests, more: Requests) -> Requests:
    """Return the sum. It may be one of the two tables itself, so callers do not change it."""
    if not used or not more:
        return used or more
    return {name: used.get(name, 0) + more.get(name, 0) for name in {**used, **more}}


def _largest(one: Requests, other: Requests) -> Requests:
    if not one or not other:
        return one or other
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def _requests(holder: Raw, names: Collection[str] | None) -> Requests:
    resources = holder.get("resources") or {}
    return {**_amounts(resources.get("limits"), names), **_amounts(resources.get("requests"), names)}


def _amounts(raw: Raw | None, names: Collection[str] | None) -> Requests:
    found = {}
    for name, value in (raw or {}).items():
        if names is not None and name not in names:
            continue
        try:
            found[name] = _amount(value, 1000 if name == "cpu" else 1)
        except QuantityError as error:
            raise QuantityError(f"{name}: {error}") from error
    return found


@lru_cache(maxsize=4096, typed=True)  # typed: True is no quantity, 1 is
def _amount(value: object, scale: int) -> int:
    """Return the amount in units of 1/scale, rounded up as Kubernetes does."""
    return int(-(-parse_quantity(value) * scale // 1))
