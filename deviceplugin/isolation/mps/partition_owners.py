"""Gives each client of a daemon with static SM partitions its own partition, and removes those that no container has.

Such a daemon lets a client start only in a partition. The CDI file of a container names its partition, so that the next
agent finds it. An agent may die between the creation of a partition and the CDI file: no container has the partition
then, and the next agent removes it. `clients.Mps` calls `PartitionOwners`.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from deviceplugin.isolation.backend import Key, Unable
from deviceplugin.isolation.mps.control import Control
from deviceplugin.isolation.mps.daemons import Daemons
from deviceplugin.isolation.mps.limits import Client
from deviceplugin.isolation.mps.partitions import Partitions, chunks_of
from deviceplugin.pods.identity import Refused


class PartitionOwners:
    """The containers that have a static SM partition. Use it on one event loop.

    Args:
        clients: A function that returns the containers that are clients of daemons, and whose pods have not ended.
    """

    def __init__(self, daemons: Daemons, clients: Callable[[], Collection[Key]]) -> None:
        self._daemons = daemons
        self._times = daemons.times
        self._clients = clients
        self._owned: dict[Key, tuple[str, str]] = {}
        self._checked: set[str] = set()
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()

    def recover(self, owned: Mapping[Key, tuple[str, str]]) -> None:
        """Set the partitions of the containers of earlier agents, as pairs of the card's UUID and the partition."""
        self._owned = dict(owned)
        self._checked = set()

    def look(self) -> None:
        """Look soon for partitions that no container has. Call it when clients or daemons have changed."""
        self._changed.set()

    async def assign(self, key: Key, client: Client, deadline: float) -> str:
        """Return the partition of the client, which is created if it does not exist; "" if its daemon has none.

        Raises Refused if there are not enough chunks, or if the daemon does not answer before the deadline, a time of
        the event loop's clock.
        """
        control = self._daemons.partitionable().get(client.card)
        if control is None:
            return ""
        try:
            async with asyncio.timeout_at(deadline), self._lock:
                found = await self._assigned(key, client, control)
        except TimeoutError:
            found = Unable("it does not answer")
        if isinstance(found, str):
            return found
        self.look()  # The daemon may have created a partition without the agent having read the answer.
        raise Refused(f"the MPS daemon of card {client.card} gives no static SM partition: {found.reason}")

    async def run(self) -> None:
        """Remove partitions whose containers are gone, until cancelled."""
        while True:
            self._changed.clear()
            is_done = await self._remove_unused()
            try:
                async with asyncio.timeout(None if is_done else self._times.health):
                    await self._changed.wait()
            except TimeoutError:
                pass  # It is time for the next attempt.

    async def _assigned(self, key: Key, client: Client, control: Control) -> str | Unable:
        card = client.card
        listed = await control.partitions(self._times.partition)
        if isinstance(listed, Unable):
            return listed
        if (kept := self._kept(key, card, listed)) is not None:
            return kept
        chunks = chunks_of(client.part, listed.chunks)
        if chunks > listed.free:
            self._forget_ended()
            listed = await self._clean(card, control)
            if isinstance(listed, Unable):
                return listed
        if chunks > listed.free:
            return Unable(f"it needs {chunks} chunks of SMs, and {listed.free} of {listed.chunks} are free")
        was_checked = card in self._checked
        self._checked.discard(card)
        made = await control.add_partition(chunks, self._times.partition)
        if isinstance(made, Unable):
            return made
        if was_checked:
            self._checked.add(card)
        # A daemon that was restarted can give the name of an earlier partition again.
        others = {other: place for other, place in self._owned.items() if place != (card, made)}
        self._owned = others | {key: (card, made)}
        return made

    def _kept(self, key: Key, card: str, listed: Partitions) -> str | None:
        """Return the partition that the container already has; None if it has none, or if another one claims it too."""
        place = self._owned.get(key)
        if place is None or place[0] != card or place[1] not in listed.ids:
            return None
        return place[1] if [*self._owned.values()].count(place) == 1 else None

    def _forget_ended(self) -> None:
        clients = {*self._clients()}
        self._checked -= {place[0] for key, place in self._owned.items() if key not in clients}
        self._owned = {key: place for key, place in self._owned.items() if key in clients}

    async def _remove_unused(self) -> bool:
        """Remove the partitions that no container has. Return whether none of them is left."""
        async with self._lock:
            self._forget_ended()
            waiting = {c: control for c, control in self._daemons.partitionable().items() if c not in self._checked}
            for card, control in waiting.items():
                await self._clean(card, control)
            return self._checked >= waiting.keys()

    async def _clean(self, card: str, control: Control) -> Partitions | Unable:
        """Remove the card's partitions that no container has, and return those that are left."""
        used = {id_ for of, id_ in self._owned.values() if of == card}
        listed = await control.partitions(self._times.partition)
        if isinstance(listed, Unable):
            return listed
        for id_ in sorted(listed.ids - used):
            await control.remove_partition(id_, self._times.partition)
        if listed.ids - used:
            listed = await control.partitions(self._times.partition)
        if isinstance(listed, Partitions) and not listed.ids - used:
            self._checked.add(card)
        return listed
