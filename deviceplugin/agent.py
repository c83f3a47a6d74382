"""The node agent: answers the kubelet and reports the node, until it is stopped or another agent takes the node over.

`deviceplugin.agent_process` runs agents, one after the other. `Agent` creates the parts and connects them:
`NodeState` contains the parts that observe the node, `Reconciler` reacts to changes of pods, and `NodeOwnership`
decides when the agent serves the node. Parts publish changes as events (`deviceplugin.changes`), and `Agent._subscribe`
makes all subscriptions. A part refers only to parts that were created before it.
"""

import asyncio
import logging
from functools import partial
from typing import Protocol

from deviceplugin.advertised_resources import AdvertisedResources
from deviceplugin.allocation.allocator import AllocationContext
from deviceplugin.cards import CardSource
from deviceplugin.changes import Change
from deviceplugin.delivery.exchange import RecordExchange
from deviceplugin.delivery.visibility import make_exposure, read_toolkit
from deviceplugin.dra.claim_limits import ClaimLimits
from deviceplugin.event_loop import HANGING_SECONDS, UNRESPONSIVE_SECONDS, Heartbeat
from deviceplugin.handover.node_ownership import NodeOwnership, Outcome, Phase
from deviceplugin.inventory.node_objects import NodeObjects
from deviceplugin.inventory.reporter import NodeFacts, Reporter
from deviceplugin.isolation.backend import Backend
from deviceplugin.isolation.driver.backend import DriverEvents, NodeParts, make_driver
from deviceplugin.isolation.driver.memory_limits import MemoryLimits
from deviceplugin.isolation.hami_core.backend import make_hami_core
from deviceplugin.isolation.isolation import Isolation, Policy
from deviceplugin.isolation.limits_files import LimitsFiles
from deviceplugin.isolation.mps.clients import Mps, make_mps
from deviceplugin.isolation.resizing import REASON as RESIZE_REFUSED
from deviceplugin.isolation.resizing import Resizer
from deviceplugin.metrics import CardHoldings
from deviceplugin.mig.mig_driver import MigDriver
from deviceplugin.node_claims import make_claim_driver, make_slice_removal
from deviceplugin.node_state import NodeState
from deviceplugin.partitioning.partition_worker import PartitionInputs
from deviceplugin.partitioning.service import PartitionService
from deviceplugin.plugin.plugin_set import PluginSet
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.record_writer import RecordWriter
from deviceplugin.pods.remnants import ForcedStops
from deviceplugin.reconciler import Reconciler
from deviceplugin.usage.container_use import ContainerUse, NodeShares, Usage
from deviceplugin.usage.usage_reader import UsageInputs, UsageReader, UsageSource
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.device_checkpoints import write_entries
from mgpu.model.errors import RetryLater
from mgpu.model.isolation import DRIVER, NONE
from mgpu.model.resource_claims import DRA
from mgpu.serving.record_keys import warn_if_unsealed
from mgpu.settings import Settings
from mgpu.version import IsolationReport

log = logging.getLogger(__name__)

_NOT_ENFORCED = "MgpuNotEnforced"
"""The reason of the Events about shares that nothing enforces."""


class _Part(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Agent:
    """One agent, from its start until it is stopped or has handed the node over.

    Call `run` once, on an event loop. All other methods may be called from any thread.

    Args:
        settings: The settings; `settings.deviceplugin` must name the node.
        objects: The Node and its Device. The agent starts their watches.
        usage_source: Where to read what processes use of the cards; None not to read it.
        limits: The driver's memory limits; None if nothing simulates them for simulated cards.
    """

    def __init__(
        self,
        settings: Settings,
        objects: NodeObjects,
        source: CardSource,
        api: Api,
        driver: MigDriver,
        records: RecordVerifier = UNSEALED,
        usage_source: UsageSource | None = None,
        limits: MemoryLimits | None = None,
    ) -> None:
        state = NodeState(settings, objects, source, api, records)
        self._state = state
        self._own = settings.deviceplugin
        self._source = source
        self._verifier = records
        self._started: list[_Part] = []
        self._heartbeat = Heartbeat()
        self._ownership = NodeOwnership(state.plugin_folder, state.node)
        self._records = RecordWriter(api, state.pods)
        self._claim_limits = ClaimLimits(state.claims, state.claim_users, state.devices.gpus)
        self._mps = self._make_mps()
        self._isolation = self._make_isolation(limits)
        self._usage = self._make_usage(usage_source) if usage_source and self._own.usage_seconds else None
        self._resizer = self._make_resizer()
        self._context = self._make_context(driver)
        self._plugin_set = PluginSet(self._context)
        self._claims = make_claim_driver(state, api, self._isolation, self._context.lingering, driver)
        self._removal = make_slice_removal(state, api)
        self._slices = self._make_slices(api, driver)
        self._limits = LimitsFiles(
            self._own.limits_dir,
            state.pods,
            state.pod_watch,
            state.cards,
            partial(state.events.warn_node, reason="MgpuLimits"),
        )
        self._stops = ForcedStops(
            state.remnants, state.runtime, state.pod_watch, partial(state.events.warn_node, reason="MgpuStop")
        )
        self._resources = AdvertisedResources(state, self._plugin_set, self._slices)
        self._reconciler = Reconciler(state, self._records, self._plugin_set, self._resources)
        self._reporter = Reporter(api, objects, settings, self._facts, state.pods.held_amount, state.freed_amount)
        self._subscribe()

    def _make_mps(self) -> Mps:
        state = self._state
        return make_mps(self._own, state.cards, state, state.remnants.uids, state.pods_changed, self._warn_of_mps)

    def _make_isolation(self, limits: MemoryLimits | None) -> Isolation:
        state = self._state
        unlimited = partial(state.events.warn_named_pod, reason=_NOT_ENFORCED)
        runtime, pods, cards = state.runtime, state.pods, state.cards
        found: list[Backend] = [self._mps, make_hami_core(self._own, cards, self._warn_of_limits)]
        if limits is not None:
            events = DriverEvents(self._warn_of_limits, unlimited)
            changed = state.pods_changed
            parts = NodeParts(
                runtime, pods, cards, changed, self._is_driver_chosen, self._claim_limits, state.claim_users.uids
            )
            found.append(make_driver(self._own, limits, parts, events))
        return Isolation(
            {backend.name: backend for backend in found},
            self._mps,
            Policy(self._own.isolation, self._own.isolation_required, state.objects.isolation_label),
            state,
            state.cards,
            self._warn_of_limits,
        )

    def _make_resizer(self) -> Resizer:
        state = self._state
        return Resizer(
            state.pods,
            self._isolation,
            state.remnants,
            self._records,
            state.devices.devices,
            state.offers_freed_amounts,
            state.pods_changed,
            partial(state.events.warn_pod, reason=RESIZE_REFUSED),
        )

    def _is_driver_chosen(self) -> bool:
        return self._isolation.chosen().name == DRIVER

    def _make_usage(self, source: UsageSource) -> UsageReader:
        state = self._state
        return UsageReader(
            source,
            UsageInputs(
                shares=self._node_shares,
                measure=self._isolation.measure,
                running=state.runtime.running_containers,
                is_held=lambda use: self._isolation.backend_of(use.key) != NONE,
            ),
            self._warn_of_use,
            partial(state.changes.publish, Change.HOLDINGS),
        )

    def _make_context(self, driver: MigDriver) -> AllocationContext:
        state = self._state
        has_cdi = self._own.cdi
        is_sealed = self._verifier.keys is not None
        exchange = RecordExchange(state.pods, state.devices.gpus, state.settings, self._records.write, sealed=is_sealed)
        return AllocationContext(
            pods=state.pods,
            devices=state.devices,
            owners=state.pod_resources,
            checkpoint=state.checkpoint,
            delivery=state.cdi_files if has_cdi else exchange,
            grants=state.grants,
            changed=state.pods_changed,
            listener=self,
            unrecorded=state.whole_cards,
            isolation=self._isolation if has_cdi else None,
            exposure=make_exposure(self._own),
            lingering=LingeringProcesses(state.pods, driver, state.claims.holdings),
            remnants=state.remnants,
            claims=state.claims.holdings,
        )

    def _make_slices(self, api: Api, driver: MigDriver) -> PartitionService:
        state = self._state
        inputs = PartitionInputs(
            watch=state.objects,
            cards=state.cards,
            pods=state.pods,
            pod_list=state.pod_watch,
            files=state.cdi_files,
            unrecorded=state.whole_cards,
            remnants=state.remnants,
            warn=partial(state.events.warn_node, reason="MgpuSlices"),
            changed=partial(state.changes.publish, Change.PARTITIONS),
            claims=state.claims.holdings,
        )
        return PartitionService(
            state.settings,
            api,
            inputs,
            state.partitions,
            driver,
            state.plugin_folder,
            self._plugin_set.add,
            self._mps if self._own.cdi else None,
            self._claims.owned_instances if self._claims is not None else frozenset,
        )

    def _subscribe(self) -> None:
        state = self._state
        report, limit, partition = self._reporter.update, self._limits.wake, self._slices.wake
        wake_cards, wake_pods = state.cards_changed.wake, state.pods_changed.wake
        state.changes.subscribe(Change.CARDS, report, partition, limit, wake_cards, wake_pods)
        state.changes.subscribe(Change.PODS, report, limit, wake_pods)
        state.changes.subscribe(Change.PARTITIONS, report, wake_cards, wake_pods)
        state.changes.subscribe(Change.HOLDINGS, report)
        state.changes.subscribe(Change.RECONCILED, limit, partition)
        if self._claims is not None:
            for change in (Change.CARDS, Change.PODS, Change.PARTITIONS, Change.HOLDINGS, Change.RECONCILED):
                state.changes.subscribe(change, self._claims.update)
            state.objects.on_node_change.append(self._claims.update)
        state.objects.on_node_change += [report, partition]
        state.objects.on_device_change.append(report)

    async def run(self, *, requests: bool = True) -> Outcome:
        """Wait until the node is free, then serve it until `stop`, or until another agent takes over.

        When it returns, all streams of device lists to the kubelet are closed, and the sockets are removed.

        Args:
            requests: Whether to ask the agent that serves the node to hand it over (`deviceplugin.handover.takeover`).
        """
        state = self._state
        wakeups = (state.cards_changed, state.pods_changed)
        for wakeup in wakeups:
            wakeup.bind()
        # An agent must know pods and cards before it serves. It also answers its probes before and after it serves.
        self._start(state.pod_watch, state.cards, state.objects)
        pulse = asyncio.create_task(self._heartbeat.run())
        try:
            if await self._ownership.acquire(requests=requests, is_prepared=self._is_prepared):
                return await self._serve_node()
            return Outcome.STOPPED
        finally:
            pulse.cancel()
            for wakeup in wakeups:
                wakeup.unbind()
            for part in self._started:
                part.stop()
            state.events.stop()
            await state.pod_resources.close()
            await state.runtime.close()
            self._ownership.release()
            log.info("stopped", extra={"node": self.node})

    def stop(self) -> None:
        """Make `run` return soon."""
        self._ownership.stop()

    def _is_prepared(self) -> bool:
        state = self._state
        return state.devices.are_read and state.pod_watch.synced and state.objects.node is not None

    async def _serve_node(self) -> Outcome:
        # Another agent may have started pods since this one was created.
        self._state.recover_grants()
        if self._claims is not None:
            self._claims.recover()
        self._isolation.recover()
        self._state.remnants.recover()
        self._start(self._reporter, self._records, self._slices, self._limits)
        if (claims := self._claims or self._removal) is not None:
            self._start(claims)
        log.info("started", extra={"node": self.node})
        warn_if_unsealed(self._verifier)
        self._warn_of_isolation()
        stores = (self._context.delivery, self._state.grants, self._isolation, self._resizer, self._plugin_set)
        serving = [self._resources.serve(), self._slices.run()]
        works = [
            self._reconciler.follow_pods(stores, self._isolation.run()),
            self._reconciler.follow_whole_cards(),
            self._reconciler.follow_resizes(self._resizer),
            self._state.runtime.follow(self._reporter.update),
        ]
        if self._claims is not None:
            serving.append(self._claims.serve())
            works.append(self._claims.work())
        if self._usage is not None:
            works.append(self._usage.run(self._own.usage_seconds))
        if self._own.cri_socket:
            works.append(self._reconciler.follow_forced_stops(self._stops))
        return await self._ownership.serve(self._resources, serving, works, self._stop_writers)

    def _start(self, *parts: _Part) -> None:
        for part in parts:
            part.start()
            self._started.append(part)

    def _stop_writers(self) -> None:
        """Stop the parts that write to the API server, to cards or to files."""
        for part in (self._reporter, self._records, self._slices, self._limits, self._claims or self._removal):
            if part is not None and part in self._started:
                self._started.remove(part)
                part.stop()

    # For probes and metrics

    @property
    def node(self) -> str:
        return self._state.node

    @property
    def watch(self) -> Reflector:
        return self._state.pod_watch

    def card_holdings(self) -> CardHoldings:
        """Return the cards and what pods hold of them. The result is empty unless this agent serves the node."""
        return self._state.card_holdings() if self._ownership.serves else CardHoldings((), (), ())

    def usage(self) -> Usage:
        """Return what is used of the cards. The result is empty unless this agent serves the node and measures it."""
        return self._usage.usage if self._usage is not None else Usage()

    def unhealthy_reason(self) -> str | None:
        """Return why the process should be restarted, or None."""
        if self._heartbeat.silence() > HANGING_SECONDS:
            return f"the event loop has not run for {self._heartbeat.silence():.0f} s"
        if self._slices.is_stalled:
            return "partitioning the cards hangs"
        return "reading the cards hangs" if self._state.cards.is_stalled else None

    def not_ready_reason(self) -> str | None:
        """Return what is missing until pods can start on this node, or None."""
        if self._heartbeat.silence() > UNRESPONSIVE_SECONDS:
            return f"the event loop has not run for {self._heartbeat.silence():.0f} s"
        if not self._state.devices.are_read:
            return f"cards: {self._state.cards.problem}"
        if not self._state.pod_watch.synced:
            return "the pods of this node have not been listed yet"
        if self._ownership.phase is Phase.STANDING_BY:
            return "another agent serves this node; this one stands by"
        if self._ownership.phase is Phase.WAITING:
            return None  # `Phase` explains why a waiting agent is ready.
        reasons = [
            registration.problem or "the kubelet has not requested the device list yet"
            for registration in self._resources.required()
            if not registration.is_registered
        ]
        if self._ownership.phase is Phase.TAKING_OVER:
            reasons.append("taking over from the previous agent")
        if self._claims is not None and (missing := self._claims.not_ready_reason()):
            reasons.append(missing)
        if not self._reporter.reported:
            reasons.append(self._reporter.problem or "the cards have not been reported to the API server yet")
        return "; ".join(reasons) or None

    def unreported_reason(self) -> str | None:
        """Return why the API server does not have the present state of the node's cards, or None if it has."""
        of_claims = self._claims.unpublished_reason() if self._claims is not None else None
        return self._reporter.problem or of_claims

    def isolation_backend(self) -> str:
        """Return the back end that holds containers to their shares, or `none`."""
        return self._isolation_report().backend

    # What the parts call

    def _facts(self) -> NodeFacts:
        """Return the facts for the reporter, on its thread. Raises RetryLater while some are not known yet."""
        state = self._state
        whole = state.devices.whole()
        server = state.whole_cards.server
        if not state.devices.are_read:
            raise RetryLater("the cards have not been read yet")
        if not state.pod_watch.synced:
            raise RetryLater("the pods of this node have not been listed yet")
        if server is None:
            raise RetryLater("it is not certain yet which plugin serves whole cards")
        if whole is None:
            raise RetryLater("the partitions of the cards have not been read yet")
        annotation: str | None = None
        if state.whole_cards.unrecorded_rows is not None:
            rows = (*state.whole_cards.unrecorded_rows, *state.remnants.rows())
            annotation = write_entries(rows) if rows else ""
        return NodeFacts(
            state.devices.gpus(),
            self._source.driver,
            whole,
            server,
            annotation,
            state.runtime.has_cdi,
            read_toolkit(),
            self._mps.has_unlimited_folder(),
            self._isolation_report(),
            self.usage().problem,
        )

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None:
        """Write an Event for the pod whose container does not start (`StartListener`)."""
        self._state.events.warn_pod(gpu_pod, reason, "MgpuStartRefused")

    def start_granted(self, gpu_pod: GpuPod) -> None:
        """Acknowledge the allocation record (`StartListener`)."""
        self._records.acknowledge(gpu_pod)

    def _node_shares(self) -> NodeShares:
        state = self._state
        gpus, devices, held = state.card_holdings()
        return NodeShares(gpus, devices, held, state.pods.all(), state.pods.limited_pods(), self._claim_limits.uses())

    def _warn_of_use(self, use: ContainerUse, problem: str) -> None:
        # Another component may hold the Pods of MtgpuPods, which are no GPU pods, by the files of limits.
        gpu_pod = self._state.pods.by_uid(use.uid)
        if gpu_pod is not None:
            self._state.events.warn_pod(gpu_pod, problem, "MgpuOverShare")

    def _isolation_report(self) -> IsolationReport:
        if not self._own.cdi:
            return IsolationReport(NONE, self._no_cdi_problem())
        choice = self._isolation.chosen()
        return IsolationReport(
            choice.name, choice.problem, "; ".join(self._isolation.cautions()), self._isolation.offers_hami_core()
        )

    def _no_cdi_problem(self) -> str:
        wanted = self._state.objects.isolation_label() or self._own.isolation
        return "" if wanted == NONE else f"isolation {wanted} limits nothing, since deviceplugin.cdi is false"

    def _warn_of_isolation(self) -> None:
        if problem := self._isolation_report().problem:
            self._state.events.warn_node(problem, "MgpuIsolation")

    def _warn_of_limits(self, gpu_pod: GpuPod, problem: str) -> None:
        """Report that the shares of a pod, or of a claim in the form of a pod, are not enforced."""
        state, pod = self._state, gpu_pod.pod
        if gpu_pod.request is None or gpu_pod.request.dialect != DRA:
            state.events.warn_pod(gpu_pod, problem, _NOT_ENFORCED)
            return
        for user in state.claim_users.users_of(pod.namespace, pod.name):
            state.events.warn_named_pod(user, problem, _NOT_ENFORCED)

    def _warn_of_mps(self, problem: str) -> None:
        self._state.events.warn_node(problem, "MgpuMps")
        # The reporter then reports whether MPS directories have a size limit, which `mgpu doctor` reads.
        self._state.changes.publish(Change.HOLDINGS)
