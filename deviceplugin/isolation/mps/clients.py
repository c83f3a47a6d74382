"""Which containers are clients of which MPS daemon, and that it answers before they start."""

import asyncio
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from deviceplugin.delivery.cdi import CdiFiles, Edits
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.mps.daemons import Daemons
from deviceplugin.isolation.mps.folders import KernelMounts
from deviceplugin.isolation.mps.limits import Client, Unenforceable, client_of, daemon_of, edits
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.cards import Card
from mgpu.model.slice_names import is_mps
from mgpu.settings import DevicePluginSettings

Key = tuple[str, str]
"""Pod UID, container."""


class Mps:
    """On one event loop, except where it says otherwise.

    A card has a daemon while it is cut into slices, and from the moment that a container asks to start as its client
    until that container's pod has ended or is gone. Who was given one stands in the CDI files, whatever the settings
    say now.

    gpus: all of the node. changed: wakes when its pods do. enforce: shares of cards are held to their limits; slices
    always are. unenforced: hears of pods whose shares cannot be, and why.
    """

    def __init__(
        self,
        daemons: Daemons,
        files: CdiFiles,
        folder: Path,
        gpus: Callable[[], Sequence[Card]],
        pods: NodePods,
        changed: Wakeup,
        unenforced: Callable[[GpuPod, str], None],
        *,
        enforce: bool,
    ) -> None:
        self._daemons, self._folder, self._gpus, self._pods = daemons, folder, gpus, pods
        self._changed, self._unenforced, self._enforce = changed, unenforced, enforce
        self._files = files
        self._clients: dict[Key, str] = {}
        self._given: set[Key] = set()
        self._cut: frozenset[str] = frozenset()
        self.recover()

    def recover(self) -> None:
        """Take over the clients that another agent has made up to now, by their CDI files."""
        named = {key: daemon_of(env, self._folder) for key, env in self._files.environments().items()}
        self._clients = {key: card for key, card in named.items() if card}
        self._given = {*self._clients}

    def cut(self, cards: Collection[str]) -> None:
        """The cards that are cut into slices, by UUID, all of them. From any thread."""
        if self._cut != (cut := frozenset(cards)):
            self._cut = cut
            self._changed.wake()

    def well(self, card: str) -> bool:
        """Whether the card's daemon answers, as far as is known. From any thread."""
        return self._daemons.well(card)

    def unbounded(self) -> bool:
        """Return whether containers of this node may fill the node's own file system by MPS. From any thread."""
        return self._daemons.unbounded()

    async def ready(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:
        """What these containers get as clients, once all of their daemons answer. Raises Refused at the deadline."""
        clients = {t.key: client for t in targets if (client := self._client(t)) is not None}
        if not clients:
            return {}
        self._clients |= {key: client.card for key, client in clients.items()}
        self._keep()
        for target in targets:
            if target.key in clients:
                try:
                    await self._daemons.ready(clients[target.key].card, deadline)
                except Refused as error:
                    raise Refused(f"{target}: {error}", target.known.pod.uid) from None
        return {key: edits(client, self._folder) for key, client in clients.items()}

    def given(self, keys: Iterable[Key]) -> None:
        """These containers may start, as the clients that they were made ready as."""
        self._given |= self._clients.keys() & {*keys}
        self._keep()

    def keep_only(self, uids: Collection[str]) -> None:
        """All other pods are gone."""
        self._clients = {key: card for key, card in self._clients.items() if key[0] in uids}

    async def run(self) -> None:
        """Once all pods of the node are known; until cancelled, and then what runs goes on."""
        async with asyncio.TaskGroup() as group:
            self._keep()
            group.create_task(self._daemons.run())
            while True:
                await self._changed.wait()
                self._keep()

    def _keep(self) -> None:
        clients = {key: card for key, card in self._clients.items() if self._runs(key[0])}
        self._given &= self._clients.keys()
        used = {card for key, card in clients.items() if key in self._given}
        self._daemons.keep({*clients.values(), *self._cut}, used)

    def _runs(self, uid: str) -> bool:
        known = self._pods.by_uid(uid)
        return known is not None and not known.pod.ended

    def _client(self, target: Target) -> Client | None:
        shares = [share for share in target.known.shares or () if share.container == target.container]
        try:
            return client_of(shares, self._gpus(), enforce=self._enforce)
        except Unenforceable as error:
            if any(is_mps(share.type) for share in shares):
                raise Refused(f"{target}: {error}", target.known.pod.uid) from error
            self._unenforced(target.known, f"container {target.container} is not held to its share: {error}")
            return None


def mps_of(
    own: DevicePluginSettings,
    files: CdiFiles,
    gpus: Callable[[], Sequence[Card]],
    pods: NodePods,
    changed: Wakeup,
    warn_node: Callable[[str], None],
    warn_pod: Callable[[GpuPod, str], None],
) -> Mps:
    """As the settings have it."""
    folder = Path(own.mps_dir)
    mounts = KernelMounts() if own.mps_require_mounts else None
    daemons = Daemons(folder, shlex.split(own.mps_control), warn_node, changed.wake, mounts=mounts)
    return Mps(daemons, files, folder, gpus, pods, changed, warn_pod, enforce=own.enforce == "mps")
