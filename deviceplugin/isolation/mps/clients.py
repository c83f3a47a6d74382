"""Keeps track of which containers are clients of which MPS daemon, and lets them start once it answers.

The allocator calls `Mps.ready` before a container starts and `Mps.given` when it may; the MPS partitioner names the
cards that are cut. Clients survive the agent: the CDI files say which daemon a container was given.
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
from deviceplugin.isolation.mps.limits import Client, Unenforceable, client_of, daemon_of, edits
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.slice_names import is_mps
from mgpu.settings import DevicePluginSettings

Key = tuple[str, str]
"""(pod UID, container)."""


class Mps:
    """The containers of the node that are clients of MPS daemons.

    Used on one event loop, except for the methods that are documented as thread-safe.

    A card has a daemon while it is cut into slices, and from the moment that a container is to start as its client
    until that container's pod has ended or is gone. A container stays a client when the settings change.

    Args:
        daemons: the daemons of all cards.
        files: say which containers an earlier agent made clients.
        folder: the setting `deviceplugin.mpsDir`.
        node: all GPUs of the node.
        pods: the pods of the node.
        changed: is woken when pods change.
        unenforced: reports a pod whose shares cannot be enforced, and why.
        enforce: whether shares of cards are held to their limits; slices always are.
    """

    def __init__(
        self,
        daemons: Daemons,
        files: CdiFiles,
        folder: Path,
        node: NodeGpus,
        pods: NodePods,
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
        self._changed = changed
        self._unenforced = unenforced
        self._enforce = enforce
        self._clients: dict[Key, str] = {}
        self._given: set[Key] = set()
        self._cut: frozenset[str] = frozenset()
        self.recover()

    def recover(self) -> None:
        """Read from the CDI files which containers another agent has made clients."""
        named = {key: daemon_of(env, self._folder) for key, env in self._files.environments().items()}
        self._clients = {key: card for key, card in named.items() if card is not None}
        self._given = {*self._clients}

    def set_partitioned_cards(self, cards: Collection[str]) -> None:
        """Set which cards, by UUID, are partitioned into slices. Thread-safe."""
        if self._cut != (cut := frozenset(cards)):
            self._cut = cut
            self._changed.wake()

    def is_healthy(self, card: str) -> bool:
        """Return whether the card's daemon answers. Thread-safe."""
        return self._daemons.well(card)

    def unbounded(self) -> bool:
        """Return whether containers can fill the node's own file system through the MPS folders. Thread-safe."""
        return self._daemons.unbounded()

    async def ready(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:
        """Return what these containers get as clients, once their daemons answer. Raises Refused at the deadline."""
        clients = {t.key: client for t in targets if (client := self._client(t)) is not None}
        if not clients:
            return {}
        # Registered before the wait, so that the daemons of these cards are started.
        self._clients |= {key: client.card for key, client in clients.items()}
        self._keep()
        for target in targets:
            if target.key in clients:
                try:
                    await self._daemons.ready(clients[target.key].card, deadline)
                except Refused as error:
                    raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from None
        return {key: edits(client, self._folder) for key, client in clients.items()}

    def given(self, keys: Iterable[Key]) -> None:
        """Note that these containers may start as the clients that `ready` made them."""
        self._given |= self._clients.keys() & {*keys}
        self._keep()

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all pods but these."""
        self._clients = {key: card for key, card in self._clients.items() if key[0] in uids}

    async def run(self) -> None:
        """Start and restart the daemons that are needed, until cancelled. Daemons that run then keep running.

        Call it when all pods of the node are known.
        """
        async with asyncio.TaskGroup() as group:
            self._keep()
            group.create_task(self._daemons.run())
            while True:
                await self._changed.wait()
                self._keep()

    def _keep(self) -> None:
        clients = {key: card for key, card in self._clients.items() if self._pods.is_active(key[0])}
        self._given &= self._clients.keys()
        used = {card for key, card in clients.items() if key in self._given}
        self._daemons.keep({*clients.values(), *self._cut}, used)

    def _client(self, target: Target) -> Client | None:
        shares = [share for share in target.gpu_pod.shares or () if share.container == target.container]
        try:
            return client_of(shares, self._node.gpus, enforce=self._enforce)
        except Unenforceable as error:
            if any(is_mps(share.type) for share in shares):
                raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from error
            self._unenforced(target.gpu_pod, f"container {target.container} is not held to its share: {error}")
            return None


def mps_of(
    own: DevicePluginSettings,
    files: CdiFiles,
    node: NodeGpus,
    pods: NodePods,
    changed: Wakeup,
    warn_node: Callable[[str], None],
    warn_pod: Callable[[GpuPod, str], None],
) -> Mps:
    """Return the `Mps` that the settings describe."""
    folder = Path(own.mps_dir)
    mounts = KernelMounts() if own.mps_require_mounts else None
    daemons = Daemons(folder, shlex.split(own.mps_control), warn_node, changed.wake, mounts=mounts)
    return Mps(daemons, files, folder, node, pods, changed, warn_pod, enforce=own.enforce == "mps")
