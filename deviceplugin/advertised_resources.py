"""The resources that the agent advertises to the kubelet as device ids, with their registrations.

`deviceplugin.agent` creates them, and derives the agent's readiness from the registrations. `deviceplugin.reconciler`
calls `update_whole_cards_stream`, and `handover.node_ownership` withdraws, renews and retires the registrations. The
resources of the dialects exist from the start, and those of slices appear with the partitions
(`partitioning.slice_plugins`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from deviceplugin.inventory.offers import WHOLE_CARDS, id_limits, id_resources
from deviceplugin.kubelet.checkpoint import read_checkpoint
from deviceplugin.kubelet.device_ids import MAX_IDS, device_ids
from deviceplugin.node_state import NodeState
from deviceplugin.partitioning.service import PartitionService
from deviceplugin.plugin.plugin_server import Plugin
from deviceplugin.plugin.plugin_set import PluginSet
from deviceplugin.plugin.registration import Registration
from mgpu.dialects.protocol import NodeResource
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_NO_CARD = -1
"""In place of the index of a card."""


class AdvertisedResources:
    """The plugins and registrations of all resources.

    Use it on one event loop. Any thread may read `registrations` and call `required`.
    """

    def __init__(self, state: NodeState, plugin_set: PluginSet, slices: PartitionService) -> None:
        self._state = state
        self._plugin_set = plugin_set
        self._slices = slices
        resources = id_resources((), state.settings)
        conditions: dict[str, Callable[[], str | None]] = {
            r.name: partial(self._not_drained_reason, r.name) for r in resources if r.follows_settings
        }
        conditions[WHOLE_CARDS] = state.whole_cards.not_served_reason
        self._own = [
            Registration(
                state.plugin_folder,
                plugin_set.add(r.name),
                not_served_reason=conditions.get(r.name, lambda: None),
                changed=state.pods_changed,
            )
            for r in resources
        ]

    @property
    def plugins(self) -> dict[str, Plugin]:
        """The plugins by resource, including those of slices."""
        return self._plugin_set.plugins

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """All registrations, including those of slices."""
        return (*self._own, *self._slices.registrations)

    def required(self) -> list[Registration]:
        """Return the registrations without which pods cannot start here.

        A resource that this agent does not serve now is left out once the server of whole cards and the Node's capacity
        are known.
        """
        state = self._state
        is_certain = state.whole_cards.server is not None and state.objects.capacity(WHOLE_CARDS) is not None
        return [r for r in self.registrations if not (is_certain and r.not_served_reason())]

    def update_whole_cards_stream(self) -> None:
        """Send the device list of whole cards only while this agent serves them."""
        plugin = self.plugins.get(WHOLE_CARDS)
        if plugin is None:
            return
        silent = self._state.whole_cards.not_served_reason() is not None
        if plugin.device_list.silent and not silent:
            plugin.end_streams()  # the kubelet follows the other plugin, so this one must register again
        plugin.device_list.silent = silent

    async def serve(self) -> None:
        """Register the resources of the dialects and offer their ids, until cancelled.

        Nothing is registered before the cards have been read: if a resource were registered again without ids, the
        kubelet would fail the pods that hold ids of it.
        """
        while not self._state.devices.are_read:
            await self._state.cards_changed.wait()
        async with asyncio.TaskGroup() as group:
            offered = self._offered_gpus()
            is_complete = self._offer(offered)
            for registration in self._own:
                group.create_task(registration.run())
            group.create_task(self._follow_cards(offered, is_complete=is_complete))
            group.create_task(self._follow_resizes())

    async def _follow_cards(self, offered: tuple[Card, ...], *, is_complete: bool) -> None:
        while True:
            gpus = self._offered_gpus()
            if gpus == offered and await self._state.cards_changed.wait(None if is_complete else _RETRY_SECONDS):
                continue
            is_complete = self._offer(gpus)
            offered = gpus

    async def _follow_resizes(self) -> None:
        """Offer other ids when resized pods have freed more or less of a resource."""
        resources = [resource.name for resource in id_resources((), self._state.settings) if resource.of_memory]
        before = [0 for _ in resources]
        while True:
            freed = [self._state.freed_amount(name) for name in resources]
            if freed != before:
                self._offer(self._offered_gpus())
                before = freed
            await self._state.pods_changed.wait()

    def _offered_gpus(self) -> tuple[Card, ...]:
        whole = self._state.devices.whole()
        return self._state.devices.gpus() if whole is None else whole

    def _offer(self, gpus: Sequence[Card]) -> bool:
        """Offer the ids for these GPUs. Return False if the ids that pods hold could not be read."""
        is_complete = True
        limits = id_limits(gpus, self._state.settings, MAX_IDS - self._slices.ids)
        spare = MAX_IDS - self._slices.ids - sum(limits.values())
        for resource in id_resources(gpus, self._state.settings):
            held: dict[int, list[str]] = {}
            taken: set[str] = set()
            try:
                held, taken = self._held_ids(resource.name, gpus)
            except RetryLater as error:
                log.warning("cannot read yet which ids pods hold: %s", error)
                is_complete = False
            device_list = self.plugins[resource.name].device_list
            total = sum(amount for _, amount in resource.amounts)
            limit = limits[resource.name]
            if total > limit:
                self._state.events.warn_node(
                    f"only {limit} of {total} units of {resource.name} are offered, because a node has at most "
                    f"{MAX_IDS} device ids in all; disable the dialects that are not used"
                )
            if resource.of_memory:
                # What a resized pod had freed is gone when it ends. Until then, the ids that other pods hold must stay.
                freed = max(self._state.freed_amount(resource.name), len(taken) - total)
                more = max(0, min(freed, spare))
                resource, limit, spare = _with_units(resource, more), limit + more, spare - more
            unhealthy = [i for i, healthy in device_list.ids.items() if not healthy]
            device_list.offer(device_ids(resource, gpus, limit, held, taken, unhealthy))
        return is_complete

    def _held_ids(self, resource: str, gpus: Sequence[Card]) -> tuple[dict[int, list[str]], set[str]]:
        """Return, by index of an unhealthy GPU, the ids that pods on it hold, and then the ids that any pods hold.

        When a card fails, the ids of the pods on it must become unhealthy first, because the kubelet reports that in
        the status of these pods. Raises RetryLater if a GPU is unhealthy and the pods have not been listed yet.
        """
        unhealthy = [gpu for gpu in gpus if not gpu.healthy]
        if unhealthy and not self._state.pod_watch.synced:
            raise RetryLater("the pods of this node have not been listed yet")
        entries = read_checkpoint(self._state.checkpoint, resource)
        held: dict[int, list[str]] = {}
        for entry in entries:
            gpu_pod = self._state.pods.by_uid(entry.uid)
            shares = (gpu_pod.shares if gpu_pod else None) or ()
            for gpu in unhealthy:
                if any(share.container == entry.container and share.is_on(gpu) for share in shares):
                    held.setdefault(gpu.index, []).extend(sorted(entry.ids))
        return held, {i for entry in entries for i in entry.ids}

    def _not_drained_reason(self, resource: str) -> str | None:
        held = self._state.pods.held_amount(resource)
        return self._state.objects.not_drained_reason(resource, pods_synced=self._state.pod_watch.synced, held=held)


def _with_units(resource: NodeResource, more: int) -> NodeResource:
    """Return the resource with more units, which belong to no card in particular."""
    return replace(resource, amounts=(*resource.amounts, (_NO_CARD, more))) if more else resource
