"""The resources that an agent serves as device ids: which ids each one has, its plugin and its registration."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from deviceplugin.allocation.allocator import Allocations, Node
from deviceplugin.allocation.whole_cards import WholeCards
from deviceplugin.cards.card_watch import CardWatch
from deviceplugin.event_loop import Wakeup
from deviceplugin.inventory.offers import WHOLE_CARDS, as_ids, budget
from deviceplugin.inventory.reporter import Reporter
from deviceplugin.kubelet.checkpoint import read_checkpoint
from deviceplugin.kubelet.device_ids import MAX_IDS, device_ids
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.service import PartitionService
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.registration import Registration
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.settings import Settings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class ServedResources:
    """Used on one event loop; `registrations` and `wanted` from any thread.

    folder: the kubelet's device-plugins folder. synced: whether all pods of the node are known. warn: makes an Event of
    the node.

    Attributes:
        plugins: by resource. They include the resources of slices, which `begin` adds.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        node: Node,
        cards: CardWatch,
        partitions: NodePartitions,
        slices: PartitionService,
        whole: WholeCards,
        reporter: Reporter,
        synced: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._settings, self._node, self._cards, self._slices = settings, node, cards, slices
        self._partitions = partitions
        self._whole, self._reporter, self._synced, self._warn = whole, reporter, synced, warn
        self._resumed = False
        self._allocations: dict[str, Allocations] = {}
        self.plugins: dict[str, Plugin] = {}
        served = as_ids((), settings)
        left: dict[str, Callable[[], str]] = {
            r.name: partial(reporter.undrained, r.name) for r in served if r.follows_settings
        }
        left[WHOLE_CARDS] = whole.left
        self._own = [
            Registration(folder, self.begin(r.name), left=left.get(r.name, lambda: ""), changed=node.changed)
            for r in served
        ]

    def begin(self, resource: str) -> Plugin:
        """Make the plugin of a resource that is not served yet."""
        self._allocations[resource] = allocations = Allocations(resource, self._node)
        if self._resumed:
            allocations.resume()
        self.plugins[resource] = Plugin(resource, allocations)
        return self.plugins[resource]

    def resume(self) -> None:
        """Let containers start: all pods of the node and its cards are known now."""
        self._resumed = True
        for allocations in self._allocations.values():
            allocations.resume()

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget what was answered for all other pods: they are gone."""
        for allocations in self._allocations.values():
            allocations.keep_only(uids)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return (*self._own, *self._slices.registrations)

    def required(self) -> list[Registration]:
        """Return the registrations that this agent has to have.

        A resource that another plugin serves does not count, once it is known who serves it.
        """
        known = self._whole.server and self._reporter.capacity(WHOLE_CARDS) is not None
        return [r for r in self.registrations if not (known and r.left())]

    async def serve(self, cards_changed: Wakeup) -> None:
        """Register, and offer ids, until cancelled.

        Nothing is registered before the cards are known: with no ids the kubelet would fail the pods that run here.
        """
        while self._cards.cards is None:
            await cards_changed.wait()
        cards = self._whole_gpus()
        complete = self._offer(cards)
        async with asyncio.TaskGroup() as group:
            for registration in self._own:
                group.create_task(registration.run())
            group.create_task(self._follow_cards(cards, cards_changed, complete=complete))

    async def _follow_cards(self, offered: tuple[Card, ...], changed: Wakeup, *, complete: bool) -> None:
        while True:
            cards = self._whole_gpus()
            if cards == offered and await changed.wait(None if complete else _RETRY_SECONDS):
                continue
            complete, offered = self._offer(cards), cards

    def _whole_gpus(self) -> tuple[Card, ...]:
        gpus = self._cards.cards or ()
        whole = self._partitions.whole(gpus)
        return gpus if whole is None else whole

    def _offer(self, cards: Sequence[Card]) -> bool:
        """Give the plugins the ids of these cards; return whether it is known which ids of unhealthy cards are held."""
        complete, shares = True, budget(cards, self._settings, MAX_IDS - self._slices.ids)
        for resource in as_ids(cards, self._settings):
            try:
                held, taken = self._held_ids(resource.name, cards)
            except RetryLater as error:
                log.warning("which ids are held is not known: %s", error)
                held, taken, complete = {}, set(), False
            plugin = self.plugins[resource.name]
            total, limit = sum(amount for _, amount in resource.amounts), shares[resource.name]
            if total > limit:
                self._warn(
                    f"{total} units of {resource.name}, of which {limit} are offered: a node has at most {MAX_IDS} ids "
                    "of all resources together; disable the dialects that are not used"
                )
            before = [i for i, healthy in plugin.devices.items() if not healthy]
            plugin.offer(device_ids(resource, cards, limit, held, taken, before))
        return complete

    def _held_ids(self, resource: str, cards: Sequence[Card]) -> tuple[dict[int, list[str]], set[str]]:
        """Return the ids that pods hold of each unhealthy card, and all ids that pods hold. Raises RetryLater."""
        unhealthy = [card for card in cards if not card.healthy]
        if unhealthy and not self._synced():
            raise RetryLater("the pods of this node are not known yet")
        rows = read_checkpoint(self._node.checkpoint, resource)
        held: dict[int, list[str]] = {}
        for given in rows:
            known = self._node.pods.by_uid(given.uid)
            for card in unhealthy:
                shares = (known.shares if known else None) or ()
                if any(share.container == given.container and share.is_on(card) for share in shares):
                    held.setdefault(card.index, []).extend(sorted(given.ids))
        return held, {i for given in rows for i in given.ids}
