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
from typing import Protocol

from deviceplugin.cards import NodeGpus
from deviceplugin.delivery.cdi import Edits
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.backend import Ability, Measured, Unable
from deviceplugin.isolation.limits import LimitedContainer, Unenforceable
from deviceplugin.isolation.mps.control import MULTI_USER, STATIC_PARTITIONS, option_sets
from deviceplugin.isolation.mps.daemons import Daemons
from deviceplugin.isolation.mps.folders import KernelMounts
from deviceplugin.isolation.mps.limits import (
    Client,
    client_edits,
    find_daemon,
    find_partition,
    share_client,
    slice_client_of,
    unlimited,
)
from deviceplugin.isolation.mps.partition_owners import PartitionOwners
from deviceplugin.pods.identity import Refused, Target
from mgpu.model.isolation import MPS
from mgpu.settings import DevicePluginSettings

Key = tuple[str, str]
"""The UID of a pod, and the name of one of its containers."""


class ActivePods(Protocol):
    """The part of `NodePods` that is used here. The UIDs may also be those of claims."""

    def is_active(self, uid: str) -> bool:
        """Return whether the pod or the claim with this UID is still used."""


class Mps:
    """The containers of the node that are clients of MPS daemons.

    Use it on one event loop, except for the methods that are documented as thread-safe.

    A card has a daemon while it is partitioned into slices, and while it has clients. A container is a client from the
    call of `ready` until its pod has ended or its pod's object is gone, and while its pod is a remnant. A change of the
    settings does not affect a client.

    Args:
        folder: The setting `deviceplugin.mpsDir`.
        remnants: A function that returns the UIDs of the remnants (`Remnants.uids`).
        partitions: The setting `deviceplugin.mpsPartitions`. It only decides what `ability` says. Whether a client has
            a static SM partition depends on its daemon, which may have been started with another setting.
    """

    name = MPS

    def __init__(
        self,
        daemons: Daemons,
        folder: Path,
        node: NodeGpus,
        pods: ActivePods,
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
        self._wants_partitions = partitions
        self._partitions = PartitionOwners(daemons, lambda: self._running_clients().keys())
        self._clients: dict[Key, str] = {}
        self._started: set[Key] = set()
        self._partitioned: frozenset[str] = frozenset()

    def ability(self) -> Ability | Unable:
        if reason := self._daemons.unable_reason():
            return Unable(reason)
        cautions = []
        if self._daemons.lack(MULTI_USER):
            cautions.append("pods of several users on a card run one after the other")
        if self._wants_partitions and self._daemons.lack(STATIC_PARTITIONS):
            cautions.append("a daemon has no static SM partitions, so compute is limited by percentages on its card")
        return Ability(memory=True, compute=True, several_cards=False, caution="; ".join(cautions))

    def recover(self, environments: Mapping[Key, Mapping[str, str]]) -> None:
        cards = {key: find_daemon(env, self._folder) for key, env in environments.items()}
        self._clients = {key: card for key, card in cards.items() if card is not None}
        found = {key: (card, find_partition(environments[key])) for key, card in self._clients.items()}
        self._partitions.recover({key: place for key, place in found.items() if place[1]})
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
        return await self._ready([(c.target, share_client(c.limits[0])) for c in containers], deadline)

    def lift(self, variables: Iterable[str]) -> Mapping[str, str]:
        return unlimited(variables)

    def mark_started(self, keys: Iterable[Key]) -> None:
        """Record that these containers may start, so that their daemons are not killed while they run."""
        self._started |= self._clients.keys() & {*keys}
        self._update_daemons()

    def release(self, keys: Collection[Key]) -> None:
        self._clients = {key: card for key, card in self._clients.items() if key not in keys}
        self._partitions.look()

    def keep_only(self, uids: Collection[str]) -> None:
        self._clients = {key: card for key, card in self._clients.items() if key[0] in uids}
        self._partitions.look()

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
            group.create_task(self._partitions.run())
            while True:
                await self._changed.wait()
                self._update_daemons()
                self._partitions.look()

    def _update_daemons(self) -> None:
        clients = self._running_clients()
        self._started &= self._clients.keys()
        used = {card for key, card in clients.items() if key in self._started}
        self._daemons.set_needed({*clients.values(), *self._partitioned}, used)

    async def _ready(self, clients: Sequence[tuple[Target, Client]], deadline: float) -> Mapping[Key, Edits]:
        """Register the containers as clients, wait for their daemons, and return their edits. Raises Refused."""
        if not clients:
            return {}
        # The clients are registered before the wait, so that the daemons of their cards are started.
        self._clients |= {target.key: client.card for target, client in clients}
        self._update_daemons()
        edits: dict[Key, Edits] = {}
        for target, client in clients:
            try:
                await self._daemons.ready(client.card, deadline)
                partition = await self._partitions.assign(target.key, client, deadline)
            except Refused as error:
                raise Refused(f"{target}: {error}", target.gpu_pod.pod.uid) from None
            edits[target.key] = client_edits(replace(client, partition=partition), self._folder)
        return edits

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
    pods: ActivePods,
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
