"""Computes what a pod requests of a node's resources, and what a node has allocatable, from decoded JSON.

The sums must be equal to kube-scheduler's (KEP-753, KEP-2837). `mgpu.model.field_reader` and the playground call these
functions, and the scheduler computes with `CpuMemory`.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from mgpu.model.quantities import MAX_QUANTITY, QuantityError, parse_quantity

Raw = Mapping[str, Any]
Requests = dict[str, int]
"""The amount of each resource, by its name. Cpu is in thousandths of a CPU, and everything else in whole units (bytes,
pods, devices)."""

_CPU_AND_MEMORY = ("cpu", "memory")
MAX_PER_POD = MAX_QUANTITY // 1000
"""The most cpu (in milli) or memory (in bytes) that mgpu counts for one pod, which is more than any node has. Without
this limit, an amount such as 9E of cpu would not fit into 64 bits in milli."""


class CpuMemory(NamedTuple):
    """An amount of cpu in milli and of memory in bytes."""

    cpu: int = 0
    memory: int = 0

    def minus(self, other: "CpuMemory") -> "CpuMemory":
        """Return the difference, at least 0.

        `MAX_QUANTITY`, which stands for an amount that a node does not report, remains unchanged.
        """
        return CpuMemory(
            *(have if have == MAX_QUANTITY else max(0, have - taken) for have, taken in zip(self, other, strict=True))
        )


NO_CPU_MEMORY = CpuMemory()
UNBOUNDED = CpuMemory(MAX_QUANTITY, MAX_QUANTITY)


def requests_of(pod: Raw, names: Collection[str] | None = None) -> Requests:
    """Return what a pod requests of the resources of its node.

    An init container runs beside the sidecars that started before it, and the app containers run beside all sidecars.
    The result is the largest sum of requests at any time. Pod-level requests replace this sum, and the overhead is
    added. Limits replace missing requests, as the API server's defaults do.

    Args:
        names: the resources to return; None returns all resources and `pods: 1`.
    Raises:
        QuantityError: if an amount is not a quantity.
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
    """Return the cpu and memory that a pod requests, each at most `MAX_PER_POD`. Raises QuantityError."""
    needed = requests_of(pod, _CPU_AND_MEMORY)
    return CpuMemory(*(min(MAX_PER_POD, needed.get(name, 0)) for name in _CPU_AND_MEMORY))


def allocatable(node: Raw, names: Collection[str] | None = None) -> Requests:
    """Return the node's allocatable resources, or its capacity if it reports none. Raises QuantityError."""
    status = node.get("status") or {}
    return _amounts(status.get("allocatable") or status.get("capacity"), names)


def allocatable_cpu_memory(node: Raw) -> CpuMemory:
    """Return the allocatable cpu and memory, each at most `MAX_QUANTITY`. Raises QuantityError.

    `MAX_QUANTITY` also stands for an amount that the node does not report.
    """
    amounts = allocatable(node, _CPU_AND_MEMORY)
    return CpuMemory(*(min(MAX_QUANTITY, amounts.get(name, MAX_QUANTITY)) for name in _CPU_AND_MEMORY))


def add_requests(used: Requests, more: Requests) -> Requests:
    """Return the sum. Callers must not modify the result, because it can be one of the arguments."""
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


@lru_cache(maxsize=4096, typed=True)  # typed, because True equals 1 but is not a quantity
def _amount(value: object, scale: int) -> int:
    """Return the amount in units of 1/scale, rounded up as in Kubernetes."""
    return int(-(-parse_quantity(value) * scale // 1))
