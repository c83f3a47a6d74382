"""The node agent: its parts are built here, connected by events, and run until another agent takes the node over.

The order of construction follows the dependencies: what the kubelet, the API server and the node say first, then what
is derived from it, then what serves the kubelet, then what reports. No part is given anything that is built later.
Changes travel as events (`deviceplugin.changes`); the table in `Agent._subscribe` has all of them.

`deviceplugin.agent_process` runs agents, one after the other. `deviceplugin.reconciler` has what an agent does when
pods change, `deviceplugin.handover` when it serves the node at all.
"""

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from deviceplugin.allocation.allocator import AllocationContext
from deviceplugin.allocation.whole_cards import WholeCards
from deviceplugin.cards import CardSource
from deviceplugin.cards.card_watch import CardWatch
from deviceplugin.changes import Change, Changes
from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.delivery.exchange import RecordExchange
from deviceplugin.delivery.visibility import exposure_of, read_toolkit
from deviceplugin.event_loop import HANGING_SECONDS, UNRESPONSIVE_SECONDS, Heartbeat, Wakeup
from deviceplugin.handover.node_ownership import NodeOwnership, Outcome, Phase
from deviceplugin.inventory.node_objects import NodeObjects
from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.inventory.reporter import NodeFacts, Reporter
from deviceplugin.isolation.limits_files import LimitsFiles
from deviceplugin.isolation.mps.clients import mps_of
from deviceplugin.kubelet.checkpoint import FILE
from deviceplugin.kubelet.pod_resources import PodResources, pod_resources_socket
from deviceplugin.metrics import CardHoldings
from deviceplugin.mig.mig_driver import MigDriver
from deviceplugin.node_devices import NodeDevices
from deviceplugin.node_events import NodeEvents
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.partition_worker import PartitionInputs
from deviceplugin.partitioning.service import PartitionService
from deviceplugin.plugin.plugin_set import PluginSet
from deviceplugin.pods.capacity_check import Grants, handed, holding
from deviceplugin.pods.container_runtime import ContainerRuntime
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import Receipts
from deviceplugin.pods.record_writer import RecordWriter
from deviceplugin.pods.remnants import ForcedStops, Remnants
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from deviceplugin.reconciler import Reconciler
from deviceplugin.served_resources import ServedResources
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import Api
from mgpu.kube.events import Recorder
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import write_entries
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.serving.record_keys import warn_if_unsealed
from mgpu.settings import Settings

log = logging.getLogger(__name__)


class _Part(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Agent:
    """Call `run` once, on an event loop; everything else may be called from any thread.

    Args:
        settings: `settings.deviceplugin` must name the node.
        objects: the Node and its Device, not started yet.
        source: reads the cards.
        driver: reads and makes MIG instances.
        records: judges the seals of allocation records.
    """

    def __init__(
        self,
        settings: Settings,
        objects: NodeObjects,
        source: CardSource,
        api: Api,
        driver: MigDriver,
        records: RecordVerifier = UNSEALED,
    ) -> None:
        own = settings.deviceplugin
        self._settings = settings
        self._own = own
        self._objects = objects
        self._source = source
        self._judge = records
        self._folder = Path(own.kubelet_dir) / "device-plugins"
        self._files = CdiFiles(Path(own.cdi_dir))
        self._started: list[_Part] = []
        self._ownership = NodeOwnership(self._folder, own.node)
        self._heartbeat = Heartbeat()
        self._changes = Changes()
        self._cards_changed = Wakeup()
        self._pods_changed = Wakeup()
        self._events = NodeEvents(Recorder(api, "mgpu-deviceplugin", own.node), own.node)
        self._build_sources(api)
        self._build_accounts(driver)
        self._build_serving(api, driver)
        self._reporter = Reporter(api, objects, settings, self._facts, self._pods.held)
        self._reconciler = Reconciler(
            self._watch,
            self._pods,
            self._devices,
            self._remnants,
            self._whole_cards,
            self._grants,
            self._records,
            self._plugin_set,
            self._resources,
            self._events,
            self._changes,
            self._pods_changed,
            own,
        )
        self._subscribe()

    def _build_sources(self, api: Api) -> None:
        """Build what follows the API server, the cards, the kubelet and the container runtime."""
        own = self._own
        self._cards = CardWatch(self._source, self._cards_read, self._events.warn_node)
        self._partitions = NodePartitions(enabled=self._settings.dialects.slices.enabled)
        self._devices = NodeDevices(self._cards, self._partitions)
        self._pods = NodePods(self._settings, self._pods_read, self._judge)
        query = {"fieldSelector": f"spec.nodeName={own.node}"}
        self._watch = Reflector(api, "/api/v1/pods", self._pods.take, self._pods.drop, query)
        self._records = RecordWriter(api, self._pods)
        self._owners = PodResources(pod_resources_socket(own))
        self._runtime = ContainerRuntime(Path(own.cri_socket) if own.cri_socket else None)

    def _build_accounts(self, driver: MigDriver) -> None:
        """Build what knows which pod has which cards."""
        own = self._own
        receipts = Receipts(Path(own.cdi_dir))
        self._remnants = Remnants(receipts, self._pods, self._runtime, self._pods_changed)
        self._stops = ForcedStops(self._remnants, self._runtime, self._watch, self._warn_of_stops)
        self._lingering = LingeringProcesses(self._pods, driver)
        self._grants = Grants(handed(self._files.environments()) if own.cdi else {})
        self._whole_cards = WholeCards(
            own.whole_cards,
            self._folder,
            self._pods,
            self._owners,
            UnrecordedPods(self._runtime, self._pods, self._cards, self._grants, self._partitions),
            self._whole_cards_of_node,
        )

    def _build_serving(self, api: Api, driver: MigDriver) -> None:
        """Build what answers the kubelet and what holds containers to their shares."""
        own = self._own
        self._limits = LimitsFiles(own.limits_dir, self._pods, self._watch, self._cards, self._warn_of_limits)
        self._mps = mps_of(
            own, self._files, self._cards, self._pods, self._pods_changed, self._warn_of_mps, self._unenforced
        )
        is_sealed = self._judge.keys is not None
        exchange = RecordExchange(self._pods, self._devices.gpus, self._settings, self._records.write, sealed=is_sealed)
        self._context = AllocationContext(
            pods=self._pods,
            devices=self._devices,
            owners=self._owners,
            checkpoint=self._folder / FILE,
            delivery=self._files if own.cdi else exchange,
            grants=self._grants,
            changed=self._pods_changed,
            listener=self,
            unrecorded=self._whole_cards,
            mps=self._mps if own.cdi else None,
            exposure=exposure_of(own),
            lingering=self._lingering,
            remnants=self._remnants,
        )
        self._plugin_set = PluginSet(self._context)
        inputs = PartitionInputs(
            watch=self._objects,
            cards=self._cards,
            pods=self._pods,
            pod_list=self._watch,
            files=self._files,
            unrecorded=self._whole_cards,
            remnants=self._remnants,
            warn=self._warn_of_slices,
            changed=self._partitions_changed,
        )
        self._slices = PartitionService(
            self._settings,
            api,
            inputs,
            self._partitions,
            driver,
            self._folder,
            self._plugin_set.add,
            self._context.mps,
        )
        self._resources = ServedResources(
            self._settings,
            self._folder,
            self._context,
            self._plugin_set,
            self._devices,
            self._slices,
            self._whole_cards,
            self._objects,
            self._watch,
            self._events,
            self._cards_changed,
        )

    def _subscribe(self) -> None:
        """Connect each change with what must look again."""
        report, limit, partition = self._reporter.update, self._limits.wake, self._slices.wake
        wake_cards, wake_pods = self._cards_changed.wake, self._pods_changed.wake
        self._changes.subscribe(Change.CARDS, report, partition, limit, wake_cards, wake_pods)
        self._changes.subscribe(Change.PODS, report, limit, wake_pods)
        self._changes.subscribe(Change.PARTITIONS, report, wake_cards, wake_pods)
        self._changes.subscribe(Change.HOLDINGS, report)
        self._changes.subscribe(Change.RECONCILED, limit, partition)
        self._objects.on_node_change.append(report)
        self._objects.on_node_change.append(partition)
        self._objects.on_device_change.append(report)

    async def run(self, *, requests: bool = True) -> Outcome:
        """Stand by until the node is free, then serve it until `stop`, or until another agent takes over.

        When it returns, streams have ended and sockets are removed.

        Args:
            requests: whether to ask the agent that serves the node to hand it over (`deviceplugin.handover.takeover`).
        """
        for wakeup in (self._cards_changed, self._pods_changed):
            wakeup.bind()
        # What this agent must know before it serves. It also answers its probes while it stands by or hands over.
        self._start(self._watch, self._cards, self._objects)
        pulse = asyncio.create_task(self._heartbeat.run())
        try:
            if await self._ownership.acquire(requests=requests, is_prepared=self._is_prepared):
                return await self._serve_node()
            return Outcome.STOPPED
        finally:
            pulse.cancel()
            self._close()
            await self._owners.close()
            await self._runtime.close()
            self._ownership.release()
            log.info("stopped", extra={"node": self._own.node})

    def stop(self) -> None:
        """End `run`. May be called by a signal handler of the loop."""
        self._ownership.stop()

    def _is_prepared(self) -> bool:
        return self._cards.cards is not None and self._watch.synced and self._objects.node is not None

    async def _serve_node(self) -> Outcome:
        # Another agent may have started pods since this one was built.
        if self._own.cdi:
            self._grants.recover(handed(self._files.environments()))
        self._mps.recover()
        self._remnants.recover()
        self._start(self._reporter, self._records, self._slices, self._limits)
        log.info("started", extra={"node": self._own.node})
        warn_if_unsealed(self._judge)
        if self._own.enforce == "mps" and self._context.mps is None:
            self._warn_of_mps("deviceplugin.enforce is mps, and nothing is enforced: the runtime has no CDI")
        keepers = (self._context.delivery, self._grants, self._mps, self._plugin_set)
        serving = (self._resources.serve(), self._slices.run())
        works = [
            self._reconciler.follow_pods(keepers, self._mps.run()),
            self._reconciler.follow_whole_cards(),
            self._runtime.follow(self._reporter.update),
        ]
        if self._own.cri_socket:
            works.append(self._reconciler.follow_forced_stops(self._stops))
        return await self._ownership.serve(self._resources, serving, works, self._stop_writers)

    # For probes and metrics

    @property
    def node(self) -> str:
        """The node's name."""
        return self._own.node

    @property
    def watch(self) -> Reflector:
        """The watch of the node's pods."""
        return self._watch

    def card_holdings(self) -> CardHoldings:
        """Return the cards and what pods hold of them; nothing while another agent serves, which reports them."""
        if not self._ownership.serves:
            return CardHoldings((), (), ())
        devices = self._devices.devices()
        unrecorded = self._unrecorded_holdings()
        theirs = {held.uid for held in unrecorded}
        pods = [gpu_pod for gpu_pod in self._pods.all() if gpu_pod.shares is not None and not gpu_pod.pod.ended]
        recorded = [holding(gpu_pod, devices) for gpu_pod in pods if gpu_pod.pod.uid not in theirs]
        return CardHoldings(self._devices.gpus(), devices, (*recorded, *unrecorded))

    def unhealthy_reason(self) -> str | None:
        """Return why the process should be restarted, or None."""
        if self._heartbeat.silence() > HANGING_SECONDS:
            return f"the event loop has not run for {self._heartbeat.silence():.0f} s"
        if self._slices.stalled:
            return "partitioning the cards hangs"
        return "reading the cards hangs" if self._cards.stalled else None

    def not_ready_reason(self) -> str | None:
        """Return what is missing until pods can start on this node, or None."""
        if self._heartbeat.silence() > UNRESPONSIVE_SECONDS:
            return f"the event loop has not run for {self._heartbeat.silence():.0f} s"
        if self._cards.cards is None:
            return f"cards: {self._cards.problem}"
        if not self._watch.synced:
            return "the pods of this node are not known yet"
        if self._ownership.phase is Phase.STANDING_BY:
            return "another agent serves this node; this one stands by"
        if self._ownership.phase is Phase.WAITING:
            return None  # see `Phase`
        reasons = [
            registration.problem or "the kubelet has not asked for the devices"
            for registration in self._resources.required()
            if not registration.registered
        ]
        if self._ownership.phase is Phase.TAKING_OVER:
            reasons.append("taking over from the previous agent")
        if not self._reporter.reported:
            reasons.append(self._reporter.problem or "nothing reported yet")
        return "; ".join(reasons) or None

    def unreported_reason(self) -> str | None:
        """Return why the API server does not have the node's cards as they are, or None."""
        return self._reporter.problem

    # What the parts ask for

    def _whole_cards_of_node(self) -> int | None:
        return self._objects.capacity(WHOLE_CARDS)

    def _unrecorded_holdings(self) -> tuple[Holding, ...]:
        """Return what pods hold without a record: from another plugin, or because they were deleted and still run."""
        return (*self._whole_cards.holdings(), *self._remnants.holdings())

    def _facts(self) -> NodeFacts:
        """Return what is known of the node, for the reporter and on its thread. Raises RetryLater."""
        cards = self._devices.known_gpus()
        whole = self._devices.whole()
        server = self._whole_cards.server
        if cards is None:
            raise RetryLater("the cards are not known yet")
        if not self._watch.synced:
            raise RetryLater("the pods of this node are not known yet")
        if server is None:
            raise RetryLater("who serves whole cards is not known yet")
        if whole is None:
            raise RetryLater("which cards are partitioned is not known yet")
        given = self._whole_cards.given
        rows = (*(given or ()), *self._remnants.rows())
        return NodeFacts(
            cards,
            self._source.driver,
            whole,
            server,
            None if given is None else (write_entries(rows) if rows else ""),
            self._runtime.has_cdi,
            read_toolkit(),
            self._mps.unbounded(),
        )

    # What the parts publish

    def _cards_read(self, _cards: tuple[Card, ...]) -> None:
        self._changes.publish(Change.CARDS)

    def _pods_read(self) -> None:
        self._changes.publish(Change.PODS)

    def _partitions_changed(self) -> None:
        self._changes.publish(Change.PARTITIONS)

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None:
        """Tell the pod's owner why its container does not start (`StartListener`)."""
        self._events.warn_pod(gpu_pod, reason, "MgpuStartRefused")

    def start_granted(self, gpu_pod: GpuPod) -> None:
        """Record that the node has given the pod's card out (`StartListener`)."""
        self._reconciler.mark_assigned(gpu_pod)

    def _unenforced(self, gpu_pod: GpuPod, reason: str) -> None:
        self._events.warn_pod(gpu_pod, reason, "MgpuNotEnforced")

    def _warn_of_stops(self, problem: str) -> None:
        self._events.warn_node(problem, "MgpuStop")

    def _warn_of_limits(self, problem: str) -> None:
        self._events.warn_node(problem, "MgpuLimits")

    def _warn_of_slices(self, problem: str) -> None:
        self._events.warn_node(problem, "MgpuSlices")

    def _warn_of_mps(self, problem: str) -> None:
        self._events.warn_node(problem, "MgpuMps")
        # `mgpu doctor` names the nodes whose MPS directories have no bound.
        self._changes.publish(Change.HOLDINGS)

    # Start and end

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
        self._events.stop()
