"""Collects the devices that a node can use from ResourceSlices.

The order of pools, slices and devices is that in which kube-scheduler tries the devices: the pools by driver and name,
the slices of a pool by name, and the devices as in their slice. Source: k8s.io/dynamic-resource-allocation/structured,
pools_incubating.go.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from playground.fit import selector_matches

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """The identity of a device. The order is by driver, pool and device."""

    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device with the slice that publishes it.

    Attributes:
        raw: The device in the ResourceSlice.
        spec: The spec of the ResourceSlice.
    """

    id: DeviceId
    raw: Raw
    spec: Raw

    @property
    def shared(self) -> bool:
        """Whether several requests may use the device at the same time."""
        return bool(self.raw.get("allowMultipleAllocations"))

    @property
    def place(self) -> Raw:
        """The object with the fields `nodeName`, `nodeSelector` and `allNodes` of the device."""
        return self.raw if self.spec.get("perDeviceNodeSelection") else self.spec

    def attribute(self, name: str) -> Raw | None:
        """Return an attribute by its fully qualified name. The domain of an attribute without one is the driver."""
        attributes = self.raw.get("attributes") or {}
        domain, _, identifier = name.rpartition("/")
        found = attributes.get(name)
        return attributes.get(identifier) if found is None and domain == self.id.driver else found


@dataclass(frozen=True, slots=True)
class Pool:
    """The devices of one pool that a node can use.

    Attributes:
        complete: Whether all slices of the pool are there.
        others: The devices of the pool that the node cannot use.
        counters: The counters of the pool, by the name of the counter set.
        problem: Why no device of the pool can be used, or "".
    """

    driver: str
    name: str
    devices: tuple[Device, ...] = ()
    complete: bool = True
    others: tuple[Device, ...] = ()
    counters: Mapping[str, Mapping[str, Raw]] = field(default_factory=dict)
    problem: str = ""

    @property
    def usable(self) -> bool:
        return self.complete and not self.problem


class SliceIndex:
    """Slices, of which those that may concern one node are found without a look at all others."""

    def __init__(self, slices: Iterable[Raw]) -> None:
        self._by_pool: dict[tuple[str, str], list[Raw]] = {}
        self._by_node: dict[str, set[tuple[str, str]]] = {}
        for one in slices:
            pool = _pool_of(one)
            self._by_pool.setdefault(pool, []).append(one)
            self._by_node.setdefault(one["spec"].get("nodeName") or "", set()).add(pool)

    def of_node(self, node: str) -> list[Raw]:
        """Return all slices of the pools of which a slice is for this node or for several nodes."""
        pools = self._by_node.get(node, set()) | self._by_node.get("", set())
        return [one for pool in sorted(pools) for one in self._by_pool[pool]]


def _pool_of(one: Raw) -> tuple[str, str]:
    return one["spec"]["driver"], one["spec"]["pool"]["name"]


def gather_pools(slices: Iterable[Raw], node: Raw) -> list[Pool]:
    """Return the pools with devices that a node can use, in the order in which they are tried."""
    by_pool: dict[tuple[str, str], list[Raw]] = {}
    for one in slices:
        by_pool.setdefault(_pool_of(one), []).append(one)
    found = (_pool(name, by_pool[name], node) for name in sorted(by_pool))
    return [pool for pool in found if pool is not None]


def _pool(name: tuple[str, str], slices: Sequence[Raw], node: Raw) -> Pool | None:
    """Return a pool, or None if the node cannot use a device of its newest generation."""
    newest = max(one["spec"]["pool"]["generation"] for one in slices)
    current = sorted(
        (one for one in slices if one["spec"]["pool"]["generation"] == newest),
        key=lambda one: str(one["metadata"]["name"]),
    )
    devices = [device for one in current for device in _devices(one["spec"])]
    here = tuple(device for device in devices if _is_for(device.place, node))
    if not here:
        return None
    if len(current) != current[0]["spec"]["pool"]["resourceSliceCount"]:
        return Pool(*name, complete=False)
    counters: dict[str, Mapping[str, Raw]] = {}
    for row in (row for one in current for row in one["spec"].get("sharedCounters") or ()):
        if row["name"] in counters:
            return Pool(*name, problem=f"duplicate counter set name {row['name']}")
        counters[row["name"]] = row["counters"]
    names = [device.id.device for device in here]
    repeated = next((device for i, device in enumerate(names) if device in names[:i]), None)
    if repeated is not None:
        return Pool(*name, problem=f"duplicate device name {repeated}")
    if problem := _counter_problem(devices, counters):
        return Pool(*name, problem=problem)
    others = tuple(device for device in devices if device not in here)
    return Pool(*name, here, others=others, counters=counters)


def _devices(spec: Raw) -> Iterable[Device]:
    for raw in spec.get("devices") or ():
        yield Device(DeviceId(spec["driver"], spec["pool"]["name"], raw["name"]), raw, spec)


def _is_for(place: Raw, node: Raw) -> bool:
    if place.get("nodeName"):
        return bool(place["nodeName"] == node["metadata"]["name"])
    if place.get("allNodes"):
        return True
    return place.get("nodeSelector") is not None and selector_matches(place["nodeSelector"], node)


def _counter_problem(devices: Sequence[Device], counters: Mapping[str, Mapping[str, Raw]]) -> str:
    for row in (row for device in devices for row in device.raw.get("consumesCounters") or ()):
        known = counters.get(row["counterSet"])
        if known is None:
            return f"counter set {row['counterSet']} not found"
        missing = next((name for name in row["counters"] if name not in known), None)
        if missing is not None:
            return f"counter {missing} not found in counter set {row['counterSet']}"
    return ""
