"""Runs the device plugins of slices. Each type of slices is a resource, served once the node has a slice of the type.

A device id may stand for any slice of its type; the pod's allocation record determines which slice a container gets.
Pods keep the ids that they hold. A new id gets a higher number than all ids that this agent has offered or has found in
the kubelet's checkpoint, so that no id in the checkpoint can be confused with a newer one. `partition_worker` sets the
slices that are offered (`SlicePlugins.offer`).
"""

import time
from asyncio import TaskGroup
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path

from deviceplugin.allocation.checkpoint_pods import CheckpointPods
from deviceplugin.event_loop import Wakeup
from deviceplugin.kubelet.checkpoint import FILE, PodDevicesEntry, read_entries
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.registration import Registration
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater
from mgpu.model.slice_names import Slice, resource_of

Ids = Mapping[str, bool]
"""Whether a device id is healthy, by id."""


class SlicePlugins:
    """The device plugins of all types of slices.

    The worker's thread calls `entries`, `offer` and `is_registered`; `run` belongs to the event loop.

    A resource without slices is served without ids. If its plugin ended instead, the kubelet would keep reporting the
    resource, as unhealthy, for minutes.

    Args:
        make_plugin: A function that creates the plugin of a resource. It is called on the event loop.
    """

    def __init__(self, folder: Path, make_plugin: Callable[[str], Plugin], pods: NodePods) -> None:
        self._folder = folder
        self._make_plugin = make_plugin
        self._checkpoint_pods = CheckpointPods(pods)
        self._ids: dict[str, Ids] = {}
        self._numbers: dict[str, Iterator[int]] = {}
        self._serving: dict[str, tuple[Plugin, Registration]] = {}
        self._changed = Wakeup()

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return tuple(registration for _, (_, registration) in sorted(self._serving.items()))

    @property
    def count(self) -> int:
        return sum(map(len, self._ids.values()))

    def entries(self, resources: Iterable[str]) -> list[PodDevicesEntry]:
        """Return the entries of these resources in the kubelet's checkpoint. Raises RetryLater."""
        return [entry for resource in resources for entry in self._read(resource)[0]]

    def offer(self, slices: Collection[Slice], unhealthy: Collection[Slice]) -> None:
        """Set the slices that are offered to the kubelet. Raises RetryLater.

        Args:
            slices: The slices, with their pods.
            unhealthy: The slices that must not be given out now.
        """
        by_resource: dict[str, list[tuple[str, bool]]] = {name: [] for name in self._ids}
        for s in slices:
            by_resource.setdefault(resource_of(s.name), []).append((s.pod, s not in unhealthy))
        checkpoint = {resource: self._read(resource) for resource in sorted(by_resource)}
        uids = (entry.uid for entries, _ in checkpoint.values() for entry in entries)
        running = self._checkpoint_pods.running(uids, time.monotonic())
        for resource, (entries, registered) in checkpoint.items():
            held = {i: entry.uid for entry in entries if entry.uid in running for i in entry.ids}
            # The first new number is above all numbers that earlier agents gave and that are still in the checkpoint.
            if resource not in self._numbers:
                self._numbers[resource] = numbers_after((*(registered or ()), *(i for e in entries for i in e.ids)))
            previous = self._ids.get(resource, {})
            ids = slice_ids(by_resource[resource], previous, held, self._numbers[resource])
            self._ids = {**self._ids, resource: ids}
        self._changed.wake()

    def is_registered(self, name: str) -> bool:
        """Return whether the kubelet knows all healthy ids of slices with this name.

        If it does not, it may fail a pod that requests such slices.
        """
        resource = resource_of(name)
        serving, ids = self._serving.get(resource), self._ids.get(resource)
        if serving is None or not serving[1].is_registered or serving[0].device_list.ids != ids:
            return False
        try:
            registered = self._read(resource)[1]
        except RetryLater:
            return False
        return registered is not None and registered >= {i for i, healthy in ids.items() if healthy}

    async def run(self) -> None:
        """Register and serve the resources, until cancelled."""
        self._changed.bind()
        try:
            async with TaskGroup() as group:
                while True:
                    for resource, ids in sorted(self._ids.items()):
                        if resource not in self._serving:
                            plugin = self._make_plugin(resource)
                            registration = Registration(self._folder, plugin)
                            plugin.device_list.offer(ids)
                            self._serving = {**self._serving, resource: (plugin, registration)}
                            group.create_task(registration.run())
                        elif self._serving[resource][0].device_list.ids != ids:
                            self._serving[resource][0].device_list.offer(ids)
                    await self._changed.wait()
        finally:
            self._changed.unbind()

    def _read(self, resource: str) -> tuple[list[PodDevicesEntry], frozenset[str] | None]:
        """Return the resource's entries and registered ids in the checkpoint. Raises RetryLater.

        The file does not exist before the kubelet's first allocation. In that case the result is ([], None).
        """
        file = self._folder / FILE
        return read_entries(file, resource) if file.exists() else ([], None)


def slice_ids(
    slices: Iterable[tuple[str, bool]], previous: Iterable[str], held: Mapping[str, str], numbers: Iterator[int]
) -> dict[str, bool]:
    """Return every id of a type of slices, and whether it is healthy.

    Args:
        slices: For each slice the UID of its pod ("" for a free slice), and whether the slice is healthy.
        previous: The ids that were offered before. Of those that no pod holds, the lowest stay, until there are as many
            ids as slices.
        held: The UID of the pod that holds an id, by id. These ids always stay.
        numbers: The numbers of new ids.
    """
    rows = sorted(slices)
    free = sorted({*previous} - held.keys(), key=_id_order)[: max(0, len(rows) - len(held))]
    free += (str(next(numbers)) for _ in range(len(rows) - len(held) - len(free)))
    ids = dict.fromkeys([*sorted(held, key=_id_order), *free], True)
    for pod, healthy in rows:
        if not healthy:
            # Prefer an id of the slice's pod, so that the kubelet reports the unhealthy device in that pod's status.
            of_pod = (i for i in ids if ids[i] and held.get(i, "") == pod)
            chosen = next(of_pod, None) or next((i for i in reversed(ids) if ids[i]), None)
            if chosen is not None:
                ids[chosen] = False
    return ids


def numbers_after(ids: Iterable[str]) -> Iterator[int]:
    """Return the numbers above all of these ids, in ascending order."""
    return count(1 + max((int(i) for i in ids if i.isdecimal()), default=-1))


def _id_order(name: str) -> tuple[int, str]:
    """Return the sort key that puts decimal ids into the order of their numbers."""
    return len(name), name
