"""The device plugin of the seed: a resource for each type of slices, from the first slice of it on."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from deviceplugin.event_loop import Wakeup
from deviceplugin.kubelet.checkpoint import FILE, Given, read_known
from deviceplugin.partitioning.slice_ids import after, slice_ids
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.registration import Registration
from mgpu.model.errors import RetryLater
from mgpu.model.slice_names import Slice, resource_of

Ids = Mapping[str, bool]


class SlicePlugins:
    """`offer` and `known` are for one thread, `run` is for the loop.

    folder: the kubelet's device-plugins folder. begin: makes a resource's plugin, on the loop. A resource that has no
    slices any more is served with no ids: the kubelet would otherwise keep it, as unhealthy, for minutes.
    """

    def __init__(self, folder: Path, begin: Callable[[str], Plugin]) -> None:
        self._folder, self._begin = folder, begin
        self._ids: dict[str, Ids] = {}
        self._fresh: dict[str, Iterator[int]] = {}
        self._serving: dict[str, tuple[Plugin, Registration]] = {}
        self._changed = Wakeup()

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return tuple(registration for _, (_, registration) in sorted(self._serving.items()))

    @property
    def count(self) -> int:
        """How many ids there are."""
        return sum(map(len, self._ids.values()))

    def rows(self, resources: Iterable[str], alive: Callable[[str], bool]) -> dict[str, list[Given]]:
        """What the kubelet's checkpoint says that living pods hold of each of these resources. Raises RetryLater."""
        return {name: [row for row in self._read(name)[0] if alive(row.uid)] for name in resources}

    def offer(self, slices: Collection[Slice], unwell: Collection[Slice], alive: Callable[[str], bool]) -> None:
        """These slices, with their pods, are all that there are. unwell: of them, those that nobody can be given now.

        alive: whether a pod, by the kubelet's UID, may still hold its ids. Raises RetryLater.
        """
        by_resource: dict[str, list[tuple[str, bool]]] = {name: [] for name in self._ids}
        for s in slices:
            by_resource.setdefault(resource_of(s.name), []).append((s.pod, s not in unwell))
        for resource, rows in sorted(by_resource.items()):
            given, offered = self._read(resource)
            held = {i: row.uid for row in given if alive(row.uid) for i in row.ids}
            before = self._ids.get(resource, {})
            if resource not in self._fresh:
                self._fresh[resource] = after((*(offered or ()), *(i for row in given for i in row.ids)))
            self._ids = {**self._ids, resource: slice_ids(rows, before, held, self._fresh[resource])}
        self._changed.wake()

    def known(self, name: str) -> bool:
        """Whether the kubelet knows all ids of such slices that are offered now: it then admits their pods."""
        resource = resource_of(name)
        serving, ids = self._serving.get(resource), self._ids.get(resource)
        if serving is None or not serving[1].registered or serving[0].devices != ids:
            return False
        try:
            offered = self._read(resource)[1]
        except RetryLater:
            return False
        return offered is not None and offered >= {i for i, healthy in ids.items() if healthy}

    async def run(self) -> None:
        """Until cancelled."""
        self._changed.bind()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for resource, ids in sorted(self._ids.items()):
                        if resource not in self._serving:
                            plugin = self._begin(resource)
                            registration = Registration(self._folder, plugin)
                            plugin.offer(ids)
                            self._serving = {**self._serving, resource: (plugin, registration)}
                            group.create_task(registration.run())
                        elif self._serving[resource][0].devices != ids:
                            self._serving[resource][0].offer(ids)
                    await self._changed.wait()
        finally:
            self._changed.unbind()

    def _read(self, resource: str) -> tuple[list[Given], frozenset[str] | None]:
        """Of a kubelet that has never allocated anything there is no checkpoint."""
        file = self._folder / FILE
        return read_known(file, resource) if file.exists() else ([], None)
