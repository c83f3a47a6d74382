"""What the agent does whenever its pods or the server of whole cards change.

`Agent` runs these coroutines while it serves the node. Each is a loop that looks at the present state and waits for the
next change, so a change that is missed is made up for by the next look.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from deviceplugin.allocation.whole_cards import OURS, WholeCards
from deviceplugin.changes import Change, Changes
from deviceplugin.event_loop import Wakeup
from deviceplugin.node_devices import NodeDevices
from deviceplugin.node_events import NodeEvents
from deviceplugin.plugin.plugin_set import PluginSet
from deviceplugin.plugin.registration import CHECK_SECONDS
from deviceplugin.pods.capacity_check import Grants, holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.record_writer import RecordWriter
from deviceplugin.pods.remnants import ForcedStops, PodStore, Remnants, remove_gone_pods
from deviceplugin.served_resources import ServedResources
from mgpu import dialects
from mgpu.kube.reflector import Reflector
from mgpu.model.ledger import Share
from mgpu.settings import DevicePluginSettings


class Reconciler:
    """Used on one event loop.

    Args:
        watch: of the node's pods.
        pods_changed: wakes when pods, cards or partitions change.
    """

    def __init__(
        self,
        watch: Reflector,
        pods: NodePods,
        devices: NodeDevices,
        remnants: Remnants,
        whole_cards: WholeCards,
        grants: Grants,
        records: RecordWriter,
        plugin_set: PluginSet,
        resources: ServedResources,
        events: NodeEvents,
        changes: Changes,
        pods_changed: Wakeup,
        settings: DevicePluginSettings,
    ) -> None:
        self._watch = watch
        self._pods = pods
        self._devices = devices
        self._remnants = remnants
        self._whole_cards = whole_cards
        self._grants = grants
        self._records = records
        self._plugin_set = plugin_set
        self._resources = resources
        self._events = events
        self._changes = changes
        self._pods_changed = pods_changed
        self._settings = settings
        self._resumed = asyncio.Event()

    async def follow_pods(self, stores: Sequence[PodStore], mps: Coroutine[Any, Any, None]) -> None:
        """Let containers start once all pods and cards are known; then follow the pods, until cancelled.

        Args:
            stores: what keeps something of each pod. They forget the pods that are gone.
            mps: keeps the MPS daemons running, once all pods are known.
        """
        while not self._watch.synced:
            await self._pods_changed.wait(1.0)
        self._changes.publish(Change.RECONCILED)
        async with asyncio.TaskGroup() as group:
            group.create_task(remove_gone_pods(self._pods, self._remnants, stores, self._pods_changed))
            group.create_task(mps)
            while self._devices.known_gpus() is None:
                await self._pods_changed.wait()
            # Remnants before starts: a deleted pod that still runs must hold its cards from the first start on.
            self._remnants.resume(self._holdings_of_running_pods(), self._devices.devices())
            group.create_task(self._remnants.follow(self._holdings_changed))
            self._plugin_set.resume()
            self._resumed.set()
            while True:
                for gpu_pod in self._pods.all():
                    if gpu_pod.ran:  # perhaps before this agent was there
                        self.mark_assigned(gpu_pod)
                self._note_cards_from_others()
                self._changes.publish(Change.RECONCILED)
                await self._pods_changed.wait()

    async def follow_forced_stops(self, stops: ForcedStops) -> None:
        """Stop the containers of pods that were deleted by force, once remnants are known; until cancelled."""
        await self._resumed.wait()
        await stops.follow()

    async def follow_whole_cards(self) -> None:
        """Find out who serves whole cards, and what another plugin gave out; until cancelled.

        The kubelet's checkpoint announces no changes, so it is looked at again and again.
        """
        warned: str | None = None
        while True:
            if await self._whole_cards.look(synced=self._watch.synced):
                for uid in self._whole_cards.bare:
                    self._remnants.clear(uid)
                self._holdings_changed()
                self._pods_changed.wake()
                reason = self._whole_cards.reason
                if reason not in (warned, None) and self._settings.whole_cards == OURS:
                    problem = self._whole_cards.not_served_reason()
                    self._events.warn_node(f"{problem}, while deviceplugin.wholeCards is {OURS}")
                warned = reason
            self._resources.follow_server_of_whole_cards()
            await self._pods_changed.wait(CHECK_SECONDS)

    def mark_assigned(self, gpu_pod: GpuPod) -> None:
        """Write what the record of the pod's vocabulary says once the node has handed the cards out."""
        if gpu_pod.request and (annotations := dialects.acknowledgement(gpu_pod.pod, gpu_pod.request)):
            self._pods.amend(gpu_pod, annotations)
            self._records.write(gpu_pod, annotations)

    def _holdings_of_running_pods(self) -> list[tuple[GpuPod, tuple[Share, ...]]]:
        """Return the pods that have run, with the cards that they are known to hold.

        What a pod without a record holds is found out later (`UnrecordedPods`): a receipt for every card, of a pod that
        was handed none, would outlive the pod.
        """
        devices = self._devices.devices()
        found = []
        for gpu_pod in self._pods.all():
            if gpu_pod.ran and not gpu_pod.pod.ended:
                shares = self._grants.kept(gpu_pod, devices) or holding(gpu_pod, devices).shares
                certain = tuple(share for share in shares if share.card is not None)
                if certain:
                    found.append((gpu_pod, certain))
        return found

    def _note_cards_from_others(self) -> None:
        """Write receipts of pods whose cards do not come from this agent's answers."""
        present = self._pods.present()
        gpus = self._devices.gpus()
        for held in self._whole_cards.holdings():
            if held.uid in present:
                self._remnants.note(held.uid, held.shares, gpus)
        for pod in self._pods.limited():
            self._remnants.note(pod.uid, (Share(pod.name, pod.card, pod.request, pod.memory),), gpus)

    def _holdings_changed(self) -> None:
        self._changes.publish(Change.HOLDINGS)
