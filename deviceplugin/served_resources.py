"""The resources that the agent serves as device ids: which ids each one offers, and its registration.

The resources of the dialects exist from the start; those of slices come and go with the partitions
(`deviceplugin.partitioning.slice_plugins`). `deviceplugin.handover` hands all of them over to another agent.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from deviceplugin.allocation.allocator import AllocationContext
from deviceplugin.allocation.whole_cards import WholeCards
from deviceplugin.event_loop import Wakeup
from deviceplugin.inventory.node_objects import NodeObjects
from deviceplugin.inventory.offers import WHOLE_CARDS, as_ids, budget
from deviceplugin.kubelet.checkpoint import read_checkpoint
from deviceplugin.kubelet.device_ids import MAX_IDS, device_ids
from deviceplugin.node_devices import NodeDevices
from deviceplugin.node_events import NodeEvents
from deviceplugin.partitioning.service import PartitionService
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.plugin_set import PluginSet
from deviceplugin.plugin.registration import Registration
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.settings import Settings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class ServedResources:
    """Used on one event loop; `registrations` and `required` may be called from any thread.

    Args:
        folder: the kubelet's device-plugins folder.
        watch: of the node's pods.
        cards_changed: wakes when cards or partitions change.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        context: AllocationContext,
        plugin_set: PluginSet,
        devices: NodeDevices,
        slices: PartitionService,
        whole_cards: WholeCards,
        objects: NodeObjects,
        watch: Reflector,
        events: NodeEvents,
        cards_changed: Wakeup,
    ) -> None:
        self._settings = settings
        self._context = context
        self._plugin_set = plugin_set
        self._devices = devices
        self._slices = slices
        self._whole_cards = whole_cards
        self._objects = objects
        self._watch = watch
        self._events = events
        self._cards_changed = cards_changed
        served = as_ids((), settings)
        conditions: dict[str, Callable[[], str | None]] = {
            r.name: partial(self._not_drained_reason, r.name) for r in served if r.follows_settings
        }
        conditions[WHOLE_CARDS] = whole_cards.not_served_reason
        self._own = [
            Registration(
                folder, plugin_set.add(r.name), not_served_reason=conditions.get(r.name), changed=context.changed
            )
            for r in served
        ]

    @property
    def plugins(self) -> dict[str, Plugin]:
        """The plugins by resource, those of slices included."""
        return self._plugin_set.plugins

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """All registrations, those of slices included."""
        return (*self._own, *self._slices.registrations)

    def required(self) -> list[Registration]:
        """Return the registrations without which pods cannot start here.

        A resource that another plugin serves is not among them, once it is certain who serves it.
        """
        is_certain = self._whole_cards.server is not None and self._objects.capacity(WHOLE_CARDS) is not None
        return [r for r in self.registrations if not (is_certain and r.not_served_reason())]

    def follow_server_of_whole_cards(self) -> None:
        """Send no device list of whole cards while another plugin serves them."""
        plugin = self.plugins.get(WHOLE_CARDS)
        if plugin is None:
            return
        silent = self._whole_cards.not_served_reason() is not None
        if plugin.device_list.silent and not silent:
            plugin.end_streams()  # the other plugin's registration has taken the place of this one's
        plugin.device_list.silent = silent

    async def serve(self) -> None:
        """Register the resources, and offer ids, until cancelled.

        Nothing is registered before the cards are known: if a resource comes back without ids, the kubelet fails the
        pods that hold some.
        """
        while self._devices.known_gpus() is None:
            await self._cards_changed.wait()
        async with asyncio.TaskGroup() as group:
            offered = self._offered_gpus()
            is_complete = self._offer(offered)
            for registration in self._own:
                group.create_task(registration.run())
            group.create_task(self._follow_cards(offered, is_complete=is_complete))

    async def _follow_cards(self, offered: tuple[Card, ...], *, is_complete: bool) -> None:
        while True:
            gpus = self._offered_gpus()
            if gpus == offered and await self._cards_changed.wait(None if is_complete else _RETRY_SECONDS):
                continue
            is_complete = self._offer(gpus)
            offered = gpus

    def _offered_gpus(self) -> tuple[Card, ...]:
        whole = self._devices.whole()
        return self._devices.gpus() if whole is None else whole

    def _offer(self, gpus: Sequence[Card]) -> bool:
        """Offer the ids of these GPUs; return whether it was known which ids of unhealthy ones are held."""
        is_complete = True
        limits = budget(gpus, self._settings, MAX_IDS - self._slices.ids)
        for resource in as_ids(gpus, self._settings):
            held: dict[int, list[str]] = {}
            taken: set[str] = set()
            try:
                held, taken = self._held_ids(resource.name, gpus)
            except RetryLater as error:
                log.warning("ids that pods hold are not known yet: %s", error)
                is_complete = False
            device_list = self.plugins[resource.name].device_list
            total = sum(amount for _, amount in resource.amounts)
            limit = limits[resource.name]
            if total > limit:
                self._events.warn_node(
                    f"{total} units of {resource.name}, of which {limit} are offered: a node has at most {MAX_IDS} ids "
                    "of all resources together; disable the dialects that are not used"
                )
            unhealthy = [i for i, healthy in device_list.ids.items() if not healthy]
            device_list.offer(device_ids(resource, gpus, limit, held, taken, unhealthy))
        return is_complete

    def _held_ids(self, resource: str, gpus: Sequence[Card]) -> tuple[dict[int, list[str]], set[str]]:
        """Return the ids that pods hold of each unhealthy GPU, and all ids that pods hold. Raises RetryLater.

        When a card fails, the ids of its own pods must turn unhealthy first: the kubelet reports that in their status.
        """
        unhealthy = [gpu for gpu in gpus if not gpu.healthy]
        if unhealthy and not self._watch.synced:
            raise RetryLater("the pods of this node are not known yet")
        entries = read_checkpoint(self._context.checkpoint, resource)
        held: dict[int, list[str]] = {}
        for entry in entries:
            gpu_pod = self._context.pods.by_uid(entry.uid)
            shares = (gpu_pod.shares if gpu_pod else None) or ()
            for gpu in unhealthy:
                if any(share.container == entry.container and share.is_on(gpu) for share in shares):
                    held.setdefault(gpu.index, []).extend(sorted(entry.ids))
        return held, {i for entry in entries for i in entry.ids}

    def _not_drained_reason(self, resource: str) -> str | None:
        held = self._context.pods.held(resource)
        return self._objects.not_drained_reason(resource, pods_synced=self._watch.synced, held=held)
