"""The isolation back end `hami-core`: a library in the container limits memory and compute.

The library is one that the administrator provides on the node (`deviceplugin.hamiCoreDir`). docs/isolation.md says how
programs escape it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from deviceplugin.cards import NodeGpus
from deviceplugin.delivery.cdi import Edits
from deviceplugin.isolation.backend import Ability, Key, Measured, Unable
from deviceplugin.isolation.hami_core.edits import CACHE, LIBRARY, SHARED, container_edits, unlimited
from deviceplugin.isolation.hami_core.folders import Folders, KernelMounts, NoMounts
from deviceplugin.isolation.hami_core.shared_region import CardUse, UnknownRegion, read_region, write_limits
from deviceplugin.isolation.limits import LimitedContainer
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused
from mgpu.model.isolation import HAMI_CORE
from mgpu.settings import DevicePluginSettings

log = logging.getLogger(__name__)

_MIB = 1 << 20
_CAUTION = "programs can escape the library (docs/isolation.md)"
_DISABLED = "the pod sets CUDA_DISABLE_CONTROL=true, which deviceplugin.hamiCoreDisable heeds"


class Pods(Protocol):
    """The part of `NodePods` that is used here."""

    def by_uid(self, uid: str) -> GpuPod | None: ...


class HamiCoreBackend:
    """The back end. Use it on one event loop, except for `ability` and `measure`, which are thread-safe.

    Args:
        library: The library on the host; None if `deviceplugin.hamiCoreDir` is not set.
        heeds_disable: Whether a container that sets CUDA_DISABLE_CONTROL to true is not limited.
        unenforced: A function that reports that a limit of a pod is not in force, and the reason.
    """

    name = HAMI_CORE

    def __init__(
        self,
        library: Path | None,
        folders: Folders,
        node: NodeGpus,
        unenforced: Callable[[GpuPod, str], None],
        *,
        heeds_disable: bool = False,
    ) -> None:
        self._library = library
        self._folders = folders
        self._node = node
        self._unenforced = unenforced
        self._heeds_disable = heeds_disable
        self._keys: set[Key] = set()

    def ability(self) -> Ability | Unable:
        if self._library is None:
            return Unable("deviceplugin.hamiCoreDir is not set")
        if not self._library.is_file():
            return Unable(f"{self._library} does not exist, or the agent does not see it")
        # The containers of a claim would share one file, in which the library tells processes apart by their numbers.
        return Ability(True, True, several_cards=True, resizable=True, sharable=False, caution=_CAUTION)

    async def prepare(self, containers: Sequence[LimitedContainer], deadline: float) -> Mapping[Key, Edits]:  # noqa: ARG002
        found: dict[Key, Edits] = {}
        for container in containers:
            target = container.target
            if self._heeds_disable and target.container in target.gpu_pod.control_disabled:
                text = f"the share of container {target.container} is not enforced: {_DISABLED}"
                self._unenforced(target.gpu_pod, text)
                continue
            assert self._library is not None
            try:
                folder = await asyncio.to_thread(self._folders.create, target.key)
            except OSError as error:
                what = f"{error.strerror}: {error.filename}"
                raise Refused(f"{target}: HAMi-core's folder cannot be made: {what}", target.gpu_pod.pod.uid) from error
            found[target.key] = container_edits(container.limits, self._library, self._folders.preload, folder)
        self._keys |= found.keys()
        return found

    def lift(self, variables: Iterable[str]) -> Mapping[str, str]:
        return unlimited(variables)

    def mark_started(self, keys: Iterable[Key]) -> None:
        """Do nothing: the library limits each process when it starts."""

    def release(self, keys: Collection[Key]) -> None:
        """Forget the containers. Their folders stay until their pods are gone, since mounts of them may exist."""
        self._keys -= {*keys}

    def keep_only(self, uids: Collection[str]) -> None:
        self._keys = {key for key in self._keys if key[0] in uids}
        self._folders.keep_only(uids)

    def recover(self, environments: Mapping[Key, Mapping[str, str]]) -> None:
        self._keys |= environments.keys()

    async def run(self) -> None:
        """Return at once: the library works without the agent."""

    async def resize(self, container: LimitedContainer) -> Unable | None:
        wanted = {limit.card.uuid: max(1, limit.memory // _MIB) * _MIB for limit in container.limits if limit.memory}
        file = self._file(container.target.key)
        try:
            found = await asyncio.to_thread(read_region, file)
            for uuid, limit in sorted(wanted.items()):
                used = found.get(uuid, CardUse(0, 0, 0)).memory
                if used > limit:
                    amounts = f"it uses {used // _MIB} MiB of card {uuid}, more than {limit // _MIB} MiB"
                    return Unable(f"{container.target}: {amounts}")
            await asyncio.to_thread(write_limits, file, wanted)
        except UnknownRegion as error:
            return Unable(f"{container.target}: {error}")
        return None

    def measure(self) -> Sequence[Measured]:
        """Return what the library has recorded. A container can write there, so only its order of size can be wrong."""
        cards = {card.uuid: card for card in self._node.gpus}
        rows: list[Measured] = []
        for key in sorted(self._keys):
            try:
                found = read_region(self._file(key))
            except UnknownRegion as error:
                log.debug("%s", error, extra={"pod": key[0], "container": key[1]})
                continue
            for uuid, use in sorted(found.items()):
                if uuid in cards:
                    memory = min(use.memory, cards[uuid].memory)
                    rows.append(Measured(key, uuid, memory, min(use.sm, 100) / 100, use.limit or None))
        return rows

    def _file(self, key: Key) -> Path:
        return self._folders.of(key) / SHARED / CACHE


def make_hami_core(
    settings: DevicePluginSettings, node: NodeGpus, unenforced: Callable[[GpuPod, str], None]
) -> HamiCoreBackend:
    library = Path(settings.hami_core_dir) / LIBRARY if settings.hami_core_dir else None
    mounts = KernelMounts() if settings.hami_core_require_mounts else NoMounts()
    folders = Folders(Path(settings.hami_core_state_dir), mounts)
    heeds = settings.hami_core_disable == "heed"
    return HamiCoreBackend(library, folders, node, unenforced, heeds_disable=heeds)
