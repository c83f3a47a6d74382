"""The device plugins of slices: one resource for each type of slices, from the first slice of the type on.

The device ids of a type stand for any slice of it: the pod's record says which one a container gets. Pods keep the ids
that they hold. A number is never used again, so that an id in the kubelet's checkpoint always belongs to the list in
which it was first offered.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path

from deviceplugin.event_loop import Wakeup
from deviceplugin.kubelet.checkpoint import FILE, PodDevicesEntry, read_entries
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.registration import Registration
from mgpu.model.errors import RetryLater
from mgpu.model.slice_names import Slice, resource_of

Ids = Mapping[str, bool]
"""Device id → whether it is healthy."""


class SlicePlugins:
    """`offer` and `known` are for the worker's thread, `run` is for the event loop.

    A resource that has no slices any more is served without ids: if its plugin went away, the kubelet would keep the
    resource as unhealthy for minutes.

    Args:
        folder: the kubelet's device-plugins folder.
        begin: makes a resource's plugin, on the loop.
    """

    def __init__(self, folder: Path, begin: Callable[[str], Plugin]) -> None:
        self._folder = folder
        self._begin = begin
        self._ids: dict[str, Ids] = {}
        self._fresh: dict[str, Iterator[int]] = {}
        self._serving: dict[str, tuple[Plugin, Registration]] = {}
        self._changed = Wakeup()

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return tuple(registration for _, (_, registration) in sorted(self._serving.items()))

    @property
    def count(self) -> int:
        """How many ids are offered."""
        return sum(map(len, self._ids.values()))

    def rows(self, resources: Iterable[str], alive: Callable[[str], bool]) -> dict[str, list[PodDevicesEntry]]:
        """Return what living pods hold of each resource, by the kubelet's checkpoint. Raises RetryLater."""
        return {name: [row for row in self._read(name)[0] if alive(row.uid)] for name in resources}

    def offer(self, slices: Collection[Slice], unwell: Collection[Slice], alive: Callable[[str], bool]) -> None:
        """Offer exactly these slices. Raises RetryLater.

        Args:
            slices: with their pods.
            unwell: those of them that must not be given out now.
            alive: whether a pod, by the kubelet's UID, may still hold its ids.
        """
        by_resource: dict[str, list[tuple[str, bool]]] = {name: [] for name in self._ids}
        for s in slices:
            by_resource.setdefault(resource_of(s.name), []).append((s.pod, s not in unwell))
        for resource, rows in sorted(by_resource.items()):
            given, offered = self._read(resource)
            held = {i: row.uid for row in given if alive(row.uid) for i in row.ids}
            before = self._ids.get(resource, {})
            # An agent that starts continues after the numbers of its predecessors, which the checkpoint still has.
            if resource not in self._fresh:
                self._fresh[resource] = numbers_after((*(offered or ()), *(i for row in given for i in row.ids)))
            self._ids = {**self._ids, resource: slice_ids(rows, before, held, self._fresh[resource])}
        self._changed.wake()

    def known(self, name: str) -> bool:
        """Return whether the kubelet knows all ids that are offered of such slices, and so admits their pods."""
        resource = resource_of(name)
        serving, ids = self._serving.get(resource), self._ids.get(resource)
        if serving is None or not serving[1].is_registered or serving[0].device_list.ids != ids:
            return False
        try:
            offered = self._read(resource)[1]
        except RetryLater:
            return False
        return offered is not None and offered >= {i for i, healthy in ids.items() if healthy}

    async def run(self) -> None:
        """Register and serve the resources, until cancelled."""
        self._changed.bind()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for resource, ids in sorted(self._ids.items()):
                        if resource not in self._serving:
                            plugin = self._begin(resource)
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
        """Read the checkpoint. A kubelet that has never allocated anything has none."""
        file = self._folder / FILE
        return read_entries(file, resource) if file.exists() else ([], None)


def slice_ids(
    slices: Iterable[tuple[str, bool]], before: Iterable[str], held: Mapping[str, str], fresh: Iterator[int]
) -> dict[str, bool]:
    """Return every id of a type of slices, and whether it is healthy.

    Args:
        slices: of each the UID of the pod that has it ("" for none), and its health.
        before: the ids so far. Those that are free stay as long as they are needed.
        held: id → UID of the pod that holds it.
        fresh: numbers that no id has had.
    """
    rows = sorted(slices)
    free = sorted({*before} - held.keys(), key=in_order)[: max(0, len(rows) - len(held))]
    free += (str(next(fresh)) for _ in range(len(rows) - len(held) - len(free)))
    ids = dict.fromkeys([*sorted(held, key=in_order), *free], True)
    for pod, healthy in rows:
        if not healthy:
            # Its pod's own id, so that the kubelet reports the unhealthy device on the right pod; else a free one.
            own = (i for i in ids if ids[i] and held.get(i, "") == pod)
            found = next(own, None) or next((i for i in reversed(ids) if ids[i]), None)
            if found is not None:
                ids[found] = False
    return ids


def numbers_after(ids: Iterable[str]) -> Iterator[int]:
    """Return numbers above all of these."""
    return count(1 + max((int(i) for i in ids if i.isdecimal()), default=-1))


def in_order(name: str) -> tuple[int, str]:
    """Return the sort key that puts decimal ids into the order of their numbers."""
    return len(name), name
