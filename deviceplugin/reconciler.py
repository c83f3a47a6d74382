"""Keeps receipts, acknowledgements and the device list of whole cards up to date, and stops containers of remnants.

`deviceplugin.agent` runs the coroutines while the agent serves the node. Each of them reads the present state, acts on
it, and waits for the next change. So it makes no difference if several changes are handled at once.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from deviceplugin.advertised_resources import AdvertisedResources
from deviceplugin.allocation.whole_cards import CLAIMS, OURS
from deviceplugin.changes import Change
from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.isolation.resizing import Resizer
from deviceplugin.node_state import NodeState
from deviceplugin.plugin.plugin_set import PluginSet
from deviceplugin.plugin.registration import CHECK_SECONDS
from deviceplugin.pods.capacity_check import holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.record_writer import RecordWriter
from deviceplugin.pods.remnants import ForcedStops, PodStore, remove_gone_pods
from mgpu.model.ledger import Share


class Reconciler:
    """The coroutines that react to changes of pods and of whole cards. Use it on one event loop."""

    def __init__(
        self, state: NodeState, records: RecordWriter, plugin_set: PluginSet, resources: AdvertisedResources
    ) -> None:
        self._state = state
        self._records = records
        self._plugin_set = plugin_set
        self._resources = resources
        self._resumed = asyncio.Event()

    async def follow_pods(self, stores: Sequence[PodStore], mps: Coroutine[Any, Any, None]) -> None:
        """Allow containers to start once all pods and cards have been read, then react to pod changes until cancelled.

        After each change, the data of pods that are gone is removed, and receipts and acknowledgements are written.

        Args:
            stores: The parts that store data of each pod. They remove the data of pods that are gone.
            mps: A coroutine that keeps the MPS daemons running. It starts once all pods have been read.
        """
        state = self._state
        while not state.pod_watch.synced:
            await state.pods_changed.wait(1.0)
        state.changes.publish(Change.RECONCILED)
        async with asyncio.TaskGroup() as group:
            group.create_task(remove_gone_pods(state.pods, state, stores, state.pods_changed))
            group.create_task(mps)
            while not state.devices.are_read:
                await state.pods_changed.wait()
            # Deleted pods that still run must hold their cards before any container starts.
            state.remnants.resume(self._shares_of_running_pods(), state.devices.devices())
            group.create_task(state.remnants.follow(self._publish_holdings))
            self._plugin_set.resume()
            self._resumed.set()
            while True:
                for gpu_pod in state.pods.all():
                    if gpu_pod.started_containers:  # An earlier agent may have let them start.
                        self._records.acknowledge(gpu_pod)
                self._write_receipts_for_others()
                state.changes.publish(Change.RECONCILED)
                await state.pods_changed.wait()

    async def follow_forced_stops(self, stops: ForcedStops) -> None:
        """Stop the containers of pods that were deleted by force, until cancelled.

        The coroutine first waits until `follow_pods` has resumed the search for remnants.
        """
        await self._resumed.wait()
        await stops.follow()

    async def follow_resizes(self, resizer: Resizer) -> None:
        """Put live resizes into force, until cancelled. They wait until `follow_pods` has resumed."""
        await self._resumed.wait()
        await resizer.run()

    async def follow_whole_cards(self) -> None:
        """Find out which plugin serves whole cards, and which cards another plugin gave out, until cancelled.

        The kubelet does not announce changes of its checkpoint, so the file is polled.
        """
        state = self._state
        whole_cards = state.whole_cards
        warned: str | None = None
        while True:
            if await whole_cards.update(synced=state.pod_watch.synced):
                for uid in whole_cards.bare:
                    state.remnants.remove_receipt(uid)
                self._publish_holdings()
                state.pods_changed.wake()
                reason = whole_cards.reason
                setting = state.settings.deviceplugin.whole_cards
                if reason not in (warned, None) and setting in (OURS, CLAIMS):
                    problem = f"NVIDIA's plugin serves {WHOLE_CARDS}: {reason}"
                    state.events.warn_node(f"{problem}, while deviceplugin.wholeCards is {setting}")
                warned = reason
            self._resources.update_whole_cards_stream()
            await state.pods_changed.wait(CHECK_SECONDS)

    def _shares_of_running_pods(self) -> list[tuple[GpuPod, tuple[Share, ...]]]:
        """Return the pods that have run, each with the shares whose card is certain.

        Other shares are left out: `UnrecordedPods` finds out later what a pod without a record holds. A share of an
        unknown card counts on every card. A receipt with such a share would outlive the pod, even if it is a bare pod.
        """
        devices = self._state.devices.devices()
        found = []
        for gpu_pod in self._state.pods.all():
            if gpu_pod.started_containers and not gpu_pod.pod.ended:
                shares = self._state.grants.delivered_shares(gpu_pod, devices) or holding(gpu_pod, devices).shares
                certain = tuple(share for share in shares if share.card is not None)
                if certain:
                    found.append((gpu_pod, certain))
        return found

    def _write_receipts_for_others(self) -> None:
        """Write receipts of pods whose cards do not come from this agent's answers."""
        remnants, pods, gpus = self._state.remnants, self._state.pods, self._state.devices.gpus()
        present = pods.presences()
        for held in self._state.whole_cards.holdings():
            if held.uid in present:
                remnants.try_write_receipt(held.uid, held.shares, gpus)
        for pod in pods.limited_pods():
            remnants.try_write_receipt(pod.uid, (Share(pod.name, pod.card, pod.request, pod.memory),), gpus)

    def _publish_holdings(self) -> None:
        self._state.changes.publish(Change.HOLDINGS)
