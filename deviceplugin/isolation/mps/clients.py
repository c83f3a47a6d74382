"""Keeps track of which containers are clients of which MPS daemon, and lets them start once the daemon answers.

`isolation.isolation` calls `Mps` before a container starts and when it may start. `partitioning.mps_partitioner` sets
which cards need a daemon for slices. Clients outlive the agent. The next agent finds them, because their CDI files name
the daemon.
"""

import asyncio
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deviceplugin.cards import NodeGpus
from deviceplugin.delivery.cdi import Edits
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.backend import Ability, Measured, Unable
from deviceplugin.isolation.limits import LimitedContainer, Unenforceable
from deviceplugin.isolation.mps.daemons import MULTI_USER, STATIC_PARTITIONS, Daemons, option_sets
from deviceplugin.isolation.mps.folders import KernelMounts
from deviceplugin.isolation.mps.limits import (
    Client,
    client_edits,
    find_daemon,
    find_partition,
    share_client,
    slice_client_of,
)
from deviceplugin.isolation.mps.partitions import chunks_of
from deviceplugin.pods.identity import Refused, Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.isolation import MPS
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
        folder: The setting `deviceplugin.mpsDir`.
        remnants: A function that returns the UIDs of the remnants (`Remnants.uids`).
        partitions: The setting `deviceplugin.mpsPartitions`: whether a share of compute is a static SM partition.
    """

    name = MPS

    def __init__(
        self,
        daemons: Daemons,
        folder: Path,
        node: NodeGpus,
        pods: NodePods,
        remnants: Callable[[], Collection[str]],
        changed: Wakeup,
        *,
        partitions: bool = False,
    ) -> None:
        self._daemons = daemons
        self._folder = folder
        self._node = node
        self._pods = pods
        self._remnants = remnants
        self._changed = changed
        self._with_partitions = partitions
        self._partitions: dict[Key, tuple[str, str]] = {}
        self._partition_changes = asyncio.Lock()
        self._clients: dict[Key, str] = {}
        self._started: set[Key] = set()
        self._partitioned: frozenset[str] = frozenset()

    def ability(self) -> Ability | Unable:
        cautions = []
        if self._daemons.lack(MULTI_USER):
            cautions.append("pods of several users on a card run one after the other")
        if self._with_partitions and self._daemons.lack(STATIC_PARTITIONS):
            cautions.append("the control program has no static SM partitions, so compute is limited by percentages")
        return Ability(memory=True, compute=True, several_cards=False, caution="; ".join(cautions))

    def recover(self, environments: Mapping[Key, Mapping[str, str]]) -> None:
        cards = {key: find_daemon(env, self._folder) for key, env in environments.items()}
        self._clients = {key: card for key, card in cards.items() if card is not None}
        found = {key: (card, find_partition(environments[key])) for key, card in self._clients.items()}
        self._partitions = {key: place for key, place in found.items() if place[1]}
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

    async def ready_slices(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:
        """Wait for the daemons of the containers with MPS slices, and return the edits of these.

        Raises Refused if a daemon does not answer before the deadline, a time of the event loop's clock, or if a
        container has slices that cannot be enforced.
        """
        return await self._ready([(t, client) for t in targets if (client := self._slice_client(t))], deadline)

    async def prepare(self, containers: Sequence[LimitedContainer], deadline: float) -> Mapping[Key, Edits]:
        clients = [(c.target, share_client(c.limits[0])) for c in containers]
        edits = dict(await self._ready(clients, deadline))
        if self._with_partitions:
            for container, (target, client) in zip(containers, clients, strict=True):
                partition = await self._partition(container)
                edits[target.key] = client_edits(replace(client, partition=partition), self._folder)
        return edits

    def mark_started(self, keys: Iterable[Key]) -> None:
        """Record that these containers may start, so that their daemons are not killed while they run."""
        self._started |= self._clients.keys() & {*keys}
        self._update_daemons()

    def release(self, keys: Collection[Key]) -> None:
        self._clients = {key: card for key, card in self._clients.items() if key not in keys}

    def keep_only(self, uids: Collection[str]) -> None:
        self._clients = {key: card for key, card in self._clients.items() if key[0] in uids}

    async def resize(self, container: LimitedContainer) -> Unable | None:
        return Unable(f"{container.target}: MPS limits a container only at its start")

    def measure(self) -> Sequence[Measured]:
        """Return nothing: MPS does not report what its clients use."""
        return ()

    async def run(self) -> None:
        """Start and restart the daemons that are needed, until cancelled. The daemons outlive the cancellation.

        Call this after all pods of the node have been read.
        """
        async with asyncio.TaskGroup() as group:
            self._update_daemons()
            group.create_task(self._daemons.run())
            while True:
                await self._remove_unused_partitions()
                await self._changed.wait()
                self._update_daemons()

    def _update_daemons(self) -> None:
        clients = self._running_clients()
        self._started &= self._clients.keys()
        used = {card for key, card in clients.items() if key in self._started}
        self._daemons.set_needed({*clients.values(), *self._partitioned}, used)

    async def _partition(self, container: LimitedContainer) -> str:
        """Return the container's static SM partition, which is created if it does not exist.

        Returns "" if the container has no share of compute, or if its daemon has no partitions. Raises Refused if the
        chunks do not suffice.
        """
        key, limit = container.target.key, container.limits[0]
        if limit.compute is None:
            return ""
        async with self._partition_changes:
            listed = await self._daemons.partitions(limit.card.uuid)
            if listed is None:
                return ""
            card, id_ = self._partitions.get(key, ("", ""))
            if card == limit.card.uuid and id_ in listed.ids:
                return id_
            chunks = chunks_of(limit.compute, limit.card.core, listed.chunks)
            try:
                made = await self._daemons.add_partition(limit.card.uuid, chunks)
            except Refused as error:
                raise Refused(f"{container.target}: {error}", container.target.gpu_pod.pod.uid) from None
            self._partitions[key] = limit.card.uuid, made
            return made

    async def _remove_unused_partitions(self) -> None:
        """Remove the partitions whose containers are gone.

        An agent may have died between the creation of a partition and the CDI file of its container. No file names
        such a partition, so it is removed too.
        """
        if not self._with_partitions:
            return
        async with self._partition_changes:
            clients = self._running_clients()
            self._partitions = {key: place for key, place in self._partitions.items() if key in clients}
            for card in sorted({*clients.values()}):
                if not self._daemons.is_healthy(card):
                    continue
                listed = await self._daemons.partitions(card)
                used = {id_ for of, id_ in self._partitions.values() if of == card}
                for id_ in sorted((listed.ids if listed else frozenset()) - used):
                    await self._daemons.remove_partition(card, id_)

    async def _ready(self, clients: Sequence[tuple[Target, Client]], deadline: float) -> Mapping[Key, Edits]:
        """Register the containers as clients, and wait for their daemons. Raises Refused."""
        if not clients:
            return {}
        # The clients are registered before the wait, so that the daemons of their cards are started.
        self._clients |= {target.key: client.card for target, client in clients}
        self._update_daemons()
        for target, client in clients:
            try:
                await self._daemons.ready(client.card, deadline)
            except Refused as error:
                raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from None
        return {target.key: client_edits(client, self._folder) for target, client in clients}

    def _running_clients(self) -> Mapping[Key, str]:
        """Return the clients whose pods have not ended."""
        remnants = self._remnants()
        return {key: card for key, card in self._clients.items() if key[0] in remnants or self._pods.is_active(key[0])}

    def _slice_client(self, target: Target) -> Client | None:
        """Return the container with an MPS slice as a client; None if it has none. Raises Refused."""
        try:
            return slice_client_of(target.shares, self._node.gpus)
        except Unenforceable as error:
            raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from error


def make_mps(
    settings: DevicePluginSettings,
    node: NodeGpus,
    pods: NodePods,
    remnants: Callable[[], Collection[str]],
    changed: Wakeup,
    warn_node: Callable[[str], None],
) -> Mps:
    folder = Path(settings.mps_dir)
    mounts = KernelMounts() if settings.mps_require_mounts else None
    attempts = option_sets(settings.mps_multi_user, partitions=settings.mps_partitions)
    command = shlex.split(settings.mps_control)
    daemons = Daemons(folder, command, warn_node, changed.wake, mounts=mounts, attempts=attempts)
    return Mps(daemons, folder, node, pods, remnants, changed, partitions=settings.mps_partitions)
