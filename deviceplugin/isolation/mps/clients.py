"""Keeps track of which containers are clients of which MPS daemon, and lets them start once the daemon answers.

The allocator calls `Mps.ready` before a container starts and `Mps.mark_started` when it may start.
`partitioning.mps_partitioner` sets which cards need a daemon for slices. Clients outlive the agent. The next agent
finds them, because their CDI files name the daemon.
"""

import asyncio
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from deviceplugin.cards import NodeGpus
from deviceplugin.delivery.cdi import CdiFiles, Edits
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.mps.daemons import Daemons
from deviceplugin.isolation.mps.folders import KernelMounts
from deviceplugin.isolation.mps.limits import Client, Unenforceable, client_edits, client_of, find_daemon
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.slice_names import is_mps
from mgpu.settings import DevicePluginSettings

Key = tuple[str, str]
"""The UID of a pod, and the name of one of its containers."""


class Mps:
    """The containers of the node that are clients of MPS daemons.

    Use it on one event loop, except for the methods that are documented as thread-safe.

    A card has a daemon while it is partitioned into slices, and while it has clients. A container is a client from the
    call of `ready` until its pod has ended or its pod's object is gone, and while its pod is a remnant. A change of the
    settings does not affect a client.

    Args:
        files: The CDI files, in which the clients of an earlier agent are found.
        folder: The setting `deviceplugin.mpsDir`.
        remnants: A function that returns the UIDs of the remnants (`Remnants.uids`).
        unenforced: A function that reports that a pod's shares cannot be enforced, and the reason.
        enforce: Whether shares of cards are limited. MPS slices are always limited.
    """

    def __init__(
        self,
        daemons: Daemons,
        files: CdiFiles,
        folder: Path,
        node: NodeGpus,
        pods: NodePods,
        remnants: Callable[[], Collection[str]],
        changed: Wakeup,
        unenforced: Callable[[GpuPod, str], None],
        *,
        enforce: bool,
    ) -> None:
        self._daemons = daemons
        self._files = files
        self._folder = folder
        self._node = node
        self._pods = pods
        self._remnants = remnants
        self._changed = changed
        self._unenforced = unenforced
        self._enforce = enforce
        self._clients: dict[Key, str] = {}
        self._started: set[Key] = set()
        self._partitioned: frozenset[str] = frozenset()
        self.recover()

    def recover(self) -> None:
        """Find the clients of an earlier agent in the CDI files."""
        cards = {key: find_daemon(env, self._folder) for key, env in self._files.environments().items()}
        self._clients = {key: card for key, card in cards.items() if card is not None}
        self._started = {*self._clients}

    def set_partitioned_cards(self, cards: Collection[str]) -> None:
        """Set which cards, by UUID, are partitioned into slices. Thread-safe."""
        if self._partitioned != frozenset(cards):
            self._partitioned = frozenset(cards)
            self._changed.wake()

    def is_healthy(self, card: str) -> bool:
        """Return whether the card's daemon answers. Thread-safe."""
        return self._daemons.is_healthy(card)

    def has_unlimited_folder(self) -> bool:
        """Return whether an MPS folder that containers can write to lacks the required size limit. Thread-safe."""
        return self._daemons.has_unlimited_folder()

    async def ready(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:
        """Wait for the daemons of these containers; return the edits of those containers that are clients.

        Raises Refused if a daemon does not answer before the deadline, a time of the event loop's clock, or if a
        container has slices that cannot be enforced.
        """
        clients = {t.key: client for t in targets if (client := self._client(t)) is not None}
        if not clients:
            return {}
        # The clients are registered before the wait, so that the daemons of their cards are started.
        self._clients |= {key: client.card for key, client in clients.items()}
        self._update_daemons()
        for target in targets:
            if target.key in clients:
                try:
                    await self._daemons.ready(clients[target.key].card, deadline)
                except Refused as error:
                    raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from None
        return {key: client_edits(client, self._folder) for key, client in clients.items()}

    def mark_started(self, keys: Iterable[Key]) -> None:
        """Record that these containers may start, so that their daemons are not killed while they run."""
        self._started |= self._clients.keys() & {*keys}
        self._update_daemons()

    def keep_only(self, uids: Collection[str]) -> None:
        self._clients = {key: card for key, card in self._clients.items() if key[0] in uids}

    async def run(self) -> None:
        """Start and restart the daemons that are needed, until cancelled. The daemons outlive the cancellation.

        Call this after all pods of the node have been read.
        """
        async with asyncio.TaskGroup() as group:
            self._update_daemons()
            group.create_task(self._daemons.run())
            while True:
                await self._changed.wait()
                self._update_daemons()

    def _update_daemons(self) -> None:
        remnants = self._remnants()
        clients = {
            key: card for key, card in self._clients.items() if key[0] in remnants or self._pods.is_active(key[0])
        }
        self._started &= self._clients.keys()
        used = {card for key, card in clients.items() if key in self._started}
        self._daemons.set_needed({*clients.values(), *self._partitioned}, used)

    def _client(self, target: Target) -> Client | None:
        """Return the container as a client; None if it is not a client. Report a share that cannot be enforced.

        Raises Refused if the container has slices that cannot be enforced.
        """
        shares = [share for share in target.gpu_pod.shares or () if share.container == target.container]
        try:
            return client_of(shares, self._node.gpus, enforce=self._enforce)
        except Unenforceable as error:
            if any(is_mps(share.type) for share in shares):
                raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from error
            self._unenforced(target.gpu_pod, f"the share of container {target.container} is not enforced: {error}")
            return None


def make_mps(
    settings: DevicePluginSettings,
    files: CdiFiles,
    node: NodeGpus,
    pods: NodePods,
    remnants: Callable[[], Collection[str]],
    changed: Wakeup,
    warn_node: Callable[[str], None],
    warn_pod: Callable[[GpuPod, str], None],
) -> Mps:
    folder = Path(settings.mps_dir)
    mounts = KernelMounts() if settings.mps_require_mounts else None
    daemons = Daemons(folder, shlex.split(settings.mps_control), warn_node, changed.wake, mounts=mounts)
    return Mps(daemons, files, folder, node, pods, remnants, changed, warn_pod, enforce=settings.enforce == "mps")
