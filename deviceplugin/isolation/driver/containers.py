"""The running containers of the node, with their cgroups, from the container runtime."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.isolation.driver.cgroup_paths import cgroup_folder
from deviceplugin.pods.container_runtime import ContainerRuntime
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
"""The interval of polls if the runtime announces no containers."""


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container that runs.

    Attributes:
        uid: The UID of the pod in the API.
        name: The name of the container in the pod.
        cgroup: The folder of its cgroup; None if the runtime does not report it.
    """

    id: str
    uid: str
    name: str
    cgroup: Path | None


class Containers:
    """The running containers. Use it on one event loop.

    Args:
        cgroups: The root of the host's cgroups.
        api_uids: A function that returns the UIDs of the API by those of the kubelet, which differ for static pods.
    """

    def __init__(self, runtime: ContainerRuntime, cgroups: Path, api_uids: Callable[[], Mapping[str, str]]) -> None:
        self._runtime = runtime
        self._cgroups = cgroups
        self._api_uids = api_uids
        self._folders: dict[str, Path | None] = {}

    async def running(self) -> Sequence[RunningContainer]:
        """Return the containers that run. The cgroup of each is asked for once. Raises RetryLater."""
        rows = await self._runtime.running_containers()
        uids = self._api_uids()
        self._folders = {row.id: self._folders[row.id] for row in rows if row.id in self._folders}
        for row in rows:
            if row.id not in self._folders and row.uid in uids:
                path = await self._runtime.cgroup_path(row.id)
                self._folders[row.id] = cgroup_folder(self._cgroups, path)
        return [
            RunningContainer(row.id, uids[row.uid], row.name, self._folders.get(row.id))
            for row in rows
            if row.uid in uids
        ]

    async def follow(self, announced: Callable[[], None]) -> None:
        """Call `announced` whenever the runtime announces a container, and if it cannot, at short intervals."""
        while True:
            try:
                async for _ in self._runtime.events():
                    announced()
            except RetryLater as error:
                log.debug("the container runtime announces no containers: %s", error)
            announced()
            await asyncio.sleep(_POLL_SECONDS)
