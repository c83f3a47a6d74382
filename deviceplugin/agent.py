"""The node agent: cards, pods, the kubelet and the API server, put together."""

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from deviceplugin.allocation.allocator import Node
from deviceplugin.allocation.whole_cards import OURS, WholeCards
from deviceplugin.cards import CardSource
from deviceplugin.cards.card_watch import CardWatch
from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.delivery.exchange import Exchange
from deviceplugin.delivery.toolkit import read_toolkit
from deviceplugin.delivery.visibility import exposure_of
from deviceplugin.event_loop import HANGING_SECONDS, UNRESPONSIVE_SECONDS, Heartbeat, Wakeup
from deviceplugin.handover.node_ownership import NodeOwnership, Outcome, Phase
from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.inventory.reporter import Reporter
from deviceplugin.isolation.limits_files import LimitsFiles
from deviceplugin.isolation.mps.clients import mps_of
from deviceplugin.kubelet.checkpoint import FILE
from deviceplugin.kubelet.pod_resources import PodResources, pod_resources_socket
from deviceplugin.metrics import CardHoldings
from deviceplugin.mig.mig_driver import MigDriver
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.partition_worker import PartitionInputs
from deviceplugin.partitioning.service import PartitionService
from deviceplugin.plugin.registration import CHECK_SECONDS
from deviceplugin.pods.capacity_check import Grants, handed, holding
from deviceplugin.pods.container_runtime import ContainerRuntime
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import Receipts
from deviceplugin.pods.record_writer import RecordWriter
from deviceplugin.pods.remnants import ForcedStops, Remnants, remove_gone_pods
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from deviceplugin.served_resources import ServedResources
from mgpu import dialects
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import Api
from mgpu.kube.events import Recorder, node_reference, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import write_entries
from mgpu.model.ledger import Holding, Share
from mgpu.model.node_slices import LABEL
from mgpu.model.slice_names import MIG, MPS
from mgpu.serving.record_keys import warn_if_unsealed
from mgpu.settings import Settings

log = logging.getLogger(__name__)

_NODE_SECONDS = 5.0


class _Part(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Agent:
    """`run` until `stop`. settings.deviceplugin must name the node."""

    def __init__(
        self,
        settings: Settings,
        source: CardSource,
        api: Api,
        driver: MigDriver,
        records: RecordVerifier = UNSEALED,
    ) -> None:
        own = settings.deviceplugin
        self._settings, self._node_name = settings, own.node
        self._folder = Path(own.kubelet_dir) / "device-plugins"
        self._recorder = Recorder(api, "mgpu-deviceplugin", own.node)
        self._cards_changed, self._pods_changed = Wakeup(), Wakeup()
        self._started: list[_Part] = []
        self._ownership = NodeOwnership(self._folder, own.node)
        self._heartbeat = Heartbeat()
        self._source = source
        self._partitions = NodePartitions(enabled=settings.dialects.slices.enabled)
        self._cards = CardWatch(source, self._take_cards, self._warn_node)
        self._pods = NodePods(settings, self._take_pods, records)
        self._sealed_by = records
        self._reflector = Reflector(
            api, "/api/v1/pods", self._pods.take, self._pods.drop, {"fieldSelector": f"spec.nodeName={own.node}"}
        )
        self._reporter = Reporter(
            api,
            own.node,
            settings,
            lambda: self._reflector.synced,
            self._pods.held,
            self._told_of_whole_cards,
            self._partitions.whole,
            lambda: self._slices.wake(),
            lambda: self._runtime.has_cdi,
            read_toolkit,
            lambda: self._mps.unbounded(),
        )
        self._records = RecordWriter(api, self._pods)
        self._limits = LimitsFiles(
            own.limits_dir,
            self._pods,
            self._reflector,
            self._cards,
            lambda problem: self._warn_node(problem, "MgpuLimits"),
        )
        self._owners = PodResources(pod_resources_socket(own))
        self._runtime = ContainerRuntime(Path(own.cri_socket) if own.cri_socket else None)
        files = CdiFiles(Path(own.cdi_dir))
        self._remnants = Remnants(Receipts(Path(own.cdi_dir)), self._pods, self._runtime, self._pods_changed)
        self._stops = ForcedStops(
            self._remnants, self._runtime, self._reflector, lambda why: self._warn_node(why, "MgpuStop")
        )
        self._grants = Grants(handed(files.environments()) if own.cdi else {})
        self._mps = mps_of(
            own, files, self._cards, self._pods, self._pods_changed, self._warn_mps, self._warn_unenforced
        )
        self._whole = WholeCards(
            own.whole_cards,
            self._folder,
            self._pods,
            self._owners,
            UnrecordedPods(self._runtime, self._pods, self._cards, self._grants, self._partitions),
            lambda: self._reporter.capacity(WHOLE_CARDS),
        )
        self._node = self._node_with(files, driver)
        self._slices = self._slices_with(files, api, driver)
        self._resources = ServedResources(
            settings,
            self._folder,
            self._node,
            self._cards,
            self._partitions,
            self._slices,
            self._whole,
            self._reporter,
            lambda: self._reflector.synced,
            self._warn_node,
        )

    def _node_with(self, files: CdiFiles, driver: MigDriver) -> Node:
        cdi = self._settings.deviceplugin.cdi
        return Node(
            pods=self._pods,
            cards=lambda: self._partitions.devices(self._gpus()),
            gpus=self._gpus,
            owners=self._owners,
            checkpoint=self._folder / FILE,
            delivery=files if cdi else self._exchange(),
            grants=self._grants,
            changed=self._pods_changed,
            refused=self._warn_pod,
            resend=lambda resource: self._resources.plugins[resource].resend(),
            given=self._mark_given,
            foreign=self._whole.holdings,
            undetermined=self._whole.is_undetermined,
            remnants=self._remnants,
            mps=self._mps if cdi else None,
            exposure=exposure_of(self._settings.deviceplugin),
            leftovers=LingeringProcesses(self._pods, driver),
        )

    def _exchange(self) -> Exchange:
        return Exchange(
            self._pods, self._gpus, self._settings, self._records.write, sealed=self._sealed_by.keys is not None
        )

    def _slices_with(self, files: CdiFiles, api: Api, driver: MigDriver) -> PartitionService:
        inputs = PartitionInputs(
            watch=self._reporter,
            cards=self._cards,
            pods=self._pods,
            pod_list=self._reflector,
            files=files,
            unrecorded=self._whole,
            remnants=self._remnants,
            warn=lambda problem: self._warn_node(problem, "MgpuSlices"),
            changed=self._cut_anew,
        )
        return PartitionService(
            self._settings,
            api,
            inputs,
            self._partitions,
            driver,
            self._folder,
            lambda resource: self._resources.begin(resource),
            self._node.mps,
        )

    def _unrecorded_holdings(self) -> tuple[Holding, ...]:
        """Return what pods hold of which the API says nothing: another plugin's, and those that were deleted."""
        return (*self._whole.holdings(), *self._remnants.holdings())

    async def run(self, *, requests: bool = True) -> Outcome:
        """Stand by until this node is free, then serve it until `stop`, or until another agent takes over.

        Streams are ended and sockets removed before it returns. An agent runs once.

        Args:
            asks: whether to ask the agent that serves the node to hand it over (`deviceplugin.handover.takeover`). One
            that has handed the node over itself does not: it waits for the other one's end.
        """
        for wakeup in (self._cards_changed, self._pods_changed):
            wakeup.bind()
        self._start(self._reflector, self._cards)
        self._reporter.watch()
        # Also while this agent stands by or hands over: it says that it is ready meanwhile.
        pulse = asyncio.create_task(self._heartbeat.run())
        try:
            has_turn = await self._ownership.acquire(requests=requests, is_prepared=self._is_prepared)
            return await self._serve_node() if has_turn else Outcome.STOPPED
        finally:
            pulse.cancel()
            self._close()
            await self._owners.close()
            await self._runtime.close()
            self._ownership.release()
            log.info("stopped", extra={"node": self._node_name})

    def _is_prepared(self) -> bool:
        return self._cards.cards is not None and self._reflector.synced and self._reporter.node is not None

    async def _serve_node(self) -> Outcome:
        if self._settings.deviceplugin.cdi:  # what another agent has handed out while this one stood by
            self._node.grants.recover(handed(CdiFiles(Path(self._settings.deviceplugin.cdi_dir)).environments()))
        self._mps.recover()
        self._remnants.recover()
        self._start(self._reporter, self._records, self._slices, self._limits)
        log.info("started", extra={"node": self._node_name})
        warn_if_unsealed(self._sealed_by)
        if self._settings.deviceplugin.enforce == "mps" and self._node.mps is None:
            self._warn_mps("deviceplugin.enforce is mps, and nothing is enforced: the runtime has no CDI")
        serving = (self._resources.serve(self._cards_changed), self._slices.run())
        works = (
            self._follow_pods(),
            self._follow_whole_cards(),
            self._runtime.follow(self._reporter.update),
        )
        return await self._ownership.serve(self._resources, serving, works, self._stop_writers)

    def stop(self) -> None:
        """From any thread, or a signal handler of the loop."""
        self._ownership.stop()

    def divided(self) -> str:
        """How this node's cards are cut (MIG, MPS; ""), as its label says; waits for the Node at first."""
        node = self._reporter.await_node(_NODE_SECONDS) or {}
        mode = ((node.get("metadata") or {}).get("labels") or {}).get(LABEL)
        return mode if mode in (MIG, MPS) else ""

    @property
    def node(self) -> str:
        return self._node_name

    @property
    def watch(self) -> Reflector:
        """Of the node's pods."""
        return self._reflector

    def card_holdings(self) -> CardHoldings:
        """The cards and who holds them, as far as that is decided."""
        if not self._ownership.serves:
            return CardHoldings((), (), ())  # the agent that serves reports them
        gpus, foreign = self._gpus(), self._unrecorded_holdings()
        devices, theirs = self._partitions.devices(gpus), {held.uid for held in foreign}
        pods = (known for known in self._pods.all() if known.shares is not None and not known.pod.ended)
        return CardHoldings(gpus, devices, (*(holding(p, devices) for p in pods if p.pod.uid not in theirs), *foreign))

    def unhealthy_reason(self) -> str | None:
        """Return why the process should be restarted, or None."""
        if self._heartbeat.silence() > HANGING_SECONDS:
            return f"the event loop has not run for {self._heartbeat.silence():.0f} s"
        if self._slices.stalled:
            return "cutting the cards hangs"
        return "reading the cards hangs" if self._cards.stalled else None

    def not_ready_reason(self) -> str | None:
        """Return what is missing until pods can start on this node, or None."""
        if self._heartbeat.silence() > UNRESPONSIVE_SECONDS:
            return f"the event loop has not run for {self._heartbeat.silence():.0f} s"
        if self._cards.cards is None:
            return f"cards: {self._cards.problem}"
        if not self._reflector.synced:
            return "the pods of this node are not known yet"
        if self._ownership.phase is Phase.STANDING_BY:
            return "another agent serves this node; this one stands by"
        if self._ownership.phase is Phase.WAITING:
            return None
        states = [
            registration.state or "the kubelet has not asked for the devices"
            for registration in self._resources.required()
            if not registration.registered
        ]
        if self._ownership.phase is Phase.TAKING_OVER:
            states.append("taking over from the agent before")
        if not self._reporter.reported:
            states.append(self._reporter.problem)
        return "; ".join(states) or None

    def unreported_reason(self) -> str | None:
        """Return what the API server has not been told of this node; None where it knows everything."""
        return self._reporter.problem or None

    async def _follow_pods(self) -> None:
        """Nothing starts before all pods and cards are known, and what was of gone pods goes."""
        while not self._reflector.synced:
            await self._pods_changed.wait(1.0)
        self._limits.wake()
        async with asyncio.TaskGroup() as group:
            keepers = (self._node.delivery, self._node.grants, self._mps, self._resources)
            group.create_task(remove_gone_pods(self._pods, self._remnants, keepers, self._pods_changed))
            group.create_task(self._mps.run())
            while self._cards.cards is None:
                await self._pods_changed.wait()
            self._remnants.resume(self._running(), self._node.cards())
            group.create_task(self._remnants.follow(self._reporter.update))
            if self._settings.deviceplugin.cri_socket:
                group.create_task(self._stops.follow())
            self._resources.resume()
            while True:
                # Before this agent was there too.
                for known in self._pods.all():
                    if known.ran:
                        self._mark_given(known)
                self._note_others()
                self._slices.wake()
                await self._pods_changed.wait()

    def _running(self) -> list[tuple[GpuPod, tuple[Share, ...]]]:
        """Return the pods that have run, with what they are known to hold.

        What a pod without a record holds is found out later (`UnrecordedPods`): a receipt for every card, of a pod that
        was handed none, would outlive the pod.
        """
        cards, pods = self._node.cards(), (known for known in self._pods.all() if known.ran and not known.pod.ended)
        held = [(known, self._grants.kept(known, cards) or holding(known, cards).shares) for known in pods]
        known = [(known, tuple(share for share in shares if share.card is not None)) for known, shares in held]
        return [(pod, shares) for pod, shares in known if shares]

    def _note_others(self) -> None:
        """Write receipts of pods whose cards do not come through this agent's answers."""
        present, cards = self._pods.present(), self._gpus()
        for held in self._whole.holdings():
            if held.uid in present:
                self._remnants.note(held.uid, held.shares, cards)
        for row in self._pods.limited():
            self._remnants.note(row.uid, (Share(row.name, row.card, row.request, row.memory),), cards)

    async def _follow_whole_cards(self) -> None:
        """Who serves them, and what another plugin gave out: whenever pods or the kubelet's checkpoint change."""
        warned = ""
        while True:
            if await self._whole.look(synced=self._reflector.synced):
                for uid in self._whole.bare:
                    self._remnants.clear(uid)
                self._reporter.update()
                self._pods_changed.wake()
                if self._whole.why not in (warned, "") and self._settings.deviceplugin.whole_cards == OURS:
                    self._warn_node(f"{self._whole.left()}, while deviceplugin.wholeCards is {OURS}")
                warned = self._whole.why
            plugin = self._resources.plugins.get(WHOLE_CARDS)
            if plugin is not None:
                silent = bool(self._whole.left())
                if plugin.silent and not silent:
                    plugin.end_streams()  # the other plugin's registration took the place of this one's
                plugin.silent = silent
            await self._pods_changed.wait(CHECK_SECONDS)

    def _told_of_whole_cards(self) -> tuple[str, str | None]:
        """For the reporter, on its thread."""
        if (given := self._whole.given) is None:
            return self._whole.server, None
        rows = (*given, *self._remnants.rows())
        return self._whole.server, write_entries(rows) if rows else ""

    def _mark_given(self, known: GpuPod) -> None:
        """Write what the record of the pod's vocabulary says once the node has handed the cards out."""
        if known.request and (annotations := dialects.acknowledgement(known.pod, known.request)):
            self._pods.amend(known, annotations)
            self._records.write(known, annotations)

    def _take_cards(self, cards: tuple[Card, ...]) -> None:
        self._reporter.update(cards, self._source.driver)
        self._slices.wake()
        self._limits.wake()
        self._cards_changed.wake()
        self._pods_changed.wake()

    def _take_pods(self) -> None:
        self._reporter.update()
        self._limits.wake()
        self._pods_changed.wake()

    def _cut_anew(self) -> None:
        """Which cards are whole, or which slices there are, has changed."""
        self._reporter.update()
        self._cards_changed.wake()
        self._pods_changed.wake()

    def _gpus(self) -> tuple[Card, ...]:
        """Those too that are cut into slices."""
        return self._cards.cards or ()

    def _warn_node(self, problem: str, reason: str = "MgpuCards") -> None:
        log.warning("%s", problem, extra={"node": self._node_name})
        self._recorder.warn(node_reference(self._node_name), reason, problem)

    def _warn_pod(self, known: GpuPod, why: str, reason: str = "MgpuStartRefused") -> None:
        reference = pod_reference(known.pod.namespace, known.pod.name, known.pod.uid)
        self._recorder.warn(reference, reason, why)

    def _warn_mps(self, problem: str) -> None:
        self._warn_node(problem, "MgpuMps")
        self._reporter.update()  # `mgpu doctor` names nodes whose MPS folders have no bound

    def _warn_unenforced(self, known: GpuPod, why: str) -> None:
        self._warn_pod(known, why, "MgpuNotEnforced")

    def _start(self, *parts: _Part) -> None:
        for part in parts:
            part.start()
            self._started.append(part)

    def _stop_writers(self) -> None:
        """Write nothing more: neither to the API server nor to cards and files."""
        for part in (self._reporter, self._records, self._slices, self._limits):
            if part in self._started:
                self._started.remove(part)
                part.stop()

    def _close(self) -> None:
        for wakeup in (self._cards_changed, self._pods_changed):
            wakeup.unbind()
        for part in self._started:
            part.stop()
        if self._reporter not in self._started:  # it has watched all the same
            self._reporter.stop()
        self._recorder.stop()
