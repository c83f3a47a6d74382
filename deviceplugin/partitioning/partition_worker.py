"""Reconciles the partitions of this node: partitions the cards as planned, and reports the observed state.

`partitioning.service` creates and starts the worker, and `deviceplugin.agent` creates its `PartitionInputs`.
`PartitionWorker.reconcile` compares the desired state (the Node's annotations, or the ConfigMap of MPS) with the
observed state (NVML, MPS daemons), changes the cards through the partitioner of the node's mode, offers the slices to
the kubelet, and writes the observed state into the Node's annotations. The worker can read all of its data again after
a restart, so the agent may crash at any point.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deviceplugin.kubelet.checkpoint import PodDevicesEntry
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.node_status import NodeStatusWriter, NodeWatch, SliceReport, reportable_slices
from deviceplugin.partitioning.partitioner import ObservedPartitions, PartitionContext, Partitioner
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.slice_usage import (
    Environments,
    Users,
    places_of,
    users_by_cdi_files,
    users_by_checkpoint,
    users_by_records,
    visible_cards,
    with_users,
)
from mgpu.kube import ApiError, Unreachable
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.node_slices import EXISTING, LABEL, MODES, NO_SLICES, NodeSlices, Partitioning, read_slices
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MIG_CLAIMS, MPS, Slice, is_mps, is_slice, mode_of, resource_of

log = logging.getLogger(__name__)

Raw = dict[str, Any]
INTERVAL_SECONDS = 5.0
_FIRST_POLL_SECONDS = 0.4
"""The first pause before the worker checks again whether the kubelet knows the ids of new slices. Each further pause is
twice as long, up to `INTERVAL_SECONDS`."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
"""The pause after the first reconciliation that fails, and the longest pause after further failures, in seconds."""
_MIN_INTERVAL = 0.1
"""The least time between two reconciliations, in seconds. Pods are often created and deleted in large numbers."""
_QUIET_SECONDS = 2.0
"""How long reconciliations may fail before an Event reports it. Right after a start some data are still missing."""
_STALLED_SECONDS = 120.0
"""A reconciliation that takes longer than this counts as hanging."""


class GpuWatch(Protocol):
    """The part of `CardWatch` that is used here."""

    @property
    def cards(self) -> Sequence[Card] | None:
        """All GPUs of the node; None if they have not been read yet."""


class PodList(Protocol):
    """The part of the pod watch (`NodeState.pod_watch`) that is used here."""

    @property
    def synced(self) -> bool:
        """Whether all pods of the node have been read."""


class DeliveredEnvironments(Protocol):
    """The part of `CdiFiles` that is used here."""

    def environments(self) -> Environments: ...


class UnrecordedHoldings(Protocol):
    """The part of `WholeCards` that is used here."""

    @property
    def bare(self) -> frozenset[str]:
        """The UIDs of bare pods."""

    def holdings(self) -> Sequence[Holding]:
        """Return the holdings of pods that got cards from another plugin or have no allocation record."""


class RemnantHoldings(Protocol):
    """The part of `Remnants` that is used here."""

    def holdings(self) -> Sequence[Holding]:
        """Return the holdings of remnants."""

    def is_remnant(self, uid: str) -> bool:
        """Return whether this pod was deleted or has ended, and may still run."""


class Plugins(Protocol):
    """The part of `SlicePlugins` that is used here."""

    def entries(self, resources: Iterable[str]) -> Sequence[PodDevicesEntry]: ...
    def offer(self, slices: Collection[Slice], unhealthy: Collection[Slice]) -> None: ...
    def is_registered(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class PartitionInputs:
    """The parts of the agent that the worker reads. All of them are thread-safe.

    Attributes:
        claims: A function that returns what ResourceClaims hold of the cards (`dra.prepared_claims`).
        warn: A function that reports a problem in an Event of the node and in the log.
        changed: A function that is called after `NodePartitions.state` has changed.
    """

    watch: NodeWatch
    cards: GpuWatch
    pods: NodePods
    pod_list: PodList
    files: DeliveredEnvironments
    unrecorded: UnrecordedHoldings
    remnants: RemnantHoldings
    warn: Callable[[str], None]
    changed: Callable[[], None]
    claims: Callable[[], Sequence[Holding]] = lambda: ()


class PartitionWorker:
    """A thread that reconciles the partitions, from `start` to `stop`.

    Args:
        partitioners: The partitioners by mode; empty if the container runtime has no CDI.
    """

    def __init__(
        self,
        inputs: PartitionInputs,
        partitions: NodePartitions,
        partitioners: Mapping[str, Partitioner],
        plugins: Plugins,
        status: NodeStatusWriter,
    ) -> None:
        self._inputs = inputs
        self._partitions = partitions
        self._partitioners = partitioners
        self._plugins = plugins
        self._status = status
        self._has_observed = False
        self._has_offered = False
        self._last_valid: NodeSlices | None = None
        self._warned: dict[str, tuple[str, ...]] = {}
        self._report: SliceReport | None = None
        self._warned_refusal: tuple[int, str] | None = None
        self._poll = _FIRST_POLL_SECONDS
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._last_loop = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="partitions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait at most two seconds for it, since NVIDIA's driver may hang."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=2)

    def wake(self) -> None:
        """Make the thread reconcile soon. Thread-safe."""
        self._wake.set()

    @property
    def is_stalled(self) -> bool:
        """Whether the thread hangs in a call, or has ended."""
        is_started = self._thread.ident is not None
        is_late = time.monotonic() - self._last_loop > _STALLED_SECONDS
        return is_started and (is_late or not self._thread.is_alive())

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        succeeded = time.monotonic()
        while not self._stop.is_set():
            self._last_loop = time.monotonic()
            try:
                seconds = self.reconcile()
                pause = _FIRST_PAUSE
                succeeded = time.monotonic()
                self._warn_once("reconcile", [])
            except (RetryLater, ApiError, Unreachable) as error:
                log.info("partitions are not reconciled yet: %s", error)
                if time.monotonic() - succeeded > _QUIET_SECONDS:
                    self._warn_once("reconcile", [str(error)])
                seconds = pause
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._stop.wait(_MIN_INTERVAL)
            self._wake.wait(seconds)
            self._wake.clear()
        self.withdraw()

    def withdraw(self) -> None:
        """Write a report without free slices, since without an agent the kubelet fails pods that request slices."""
        if self._report:
            used = tuple(s for s in self._report.slices if s.pod)
            try:
                self._status.write(replace(self._report, slices=used, applied=None))
            except (ApiError, Unreachable) as error:
                log.warning("free slices are still reported: %s", error)

    def reconcile(self) -> float:
        """Reconcile once. Return after how many seconds to call this again if nothing changes earlier.

        Raises RetryLater, ApiError and Unreachable.
        """
        node, gpus = self._inputs.watch.node, self._inputs.cards.cards
        if node is None or gpus is None or not self._inputs.pod_list.synced:
            return INTERVAL_SECONDS
        reported = self._read(node)
        if reported is None:
            if (node["metadata"].get("labels") or {}).get(LABEL) not in MODES:
                self._publish(NO_SLICES)
            return INTERVAL_SECONDS
        for mode, other in self._partitioners.items():
            if mode != reported.mode:
                other.reset()
        if not reported.mode:
            return self._reconcile_unlabelled_node()
        # Before the first observation, the slices that the Node reports are not published: the machine may have been
        # rebooted since the report, and MIG instances do not survive that.
        slices = reported.existing if self._has_observed else ()
        spec = Partitioning(reported.partitioning.spec)
        state = self._partitions.state
        is_same = state is not None and state.mode == reported.mode
        cards = state.cards if state and is_same else frozenset()
        if reported.mode == MIG_CLAIMS:
            slices = state.existing if state and is_same else ()
        # The plan is published before cards are partitioned, so that they are not given out as whole in the meantime.
        self._publish(NodeSlices(reported.mode, spec, slices, cards))
        environments = self._inputs.files.environments()

        def users(existing: Collection[Slice]) -> Users:
            return self._users(environments, existing)

        partitioner = self._partitioners.get(reported.mode)
        if partitioner is None:
            raise RetryLater("cards are not partitioned: slices need a container runtime with CDI (deviceplugin.cdi)")
        held = self._held(gpus, environments, reported.mode)
        observed = partitioner.reconcile(PartitionContext(reported, gpus, users, held))
        if reported.mode == MIG_CLAIMS:
            return self._serve_claims(observed)
        slices = with_users(observed.slices, users(observed.slices), observed.busy)
        self._publish(NodeSlices(reported.mode, spec, slices, observed.cards))
        self._has_observed = True
        self._warn_once("cards", observed.problems)
        if observed.refused and observed.refused != self._warned_refusal:
            self._warned_refusal = observed.refused
            self._inputs.warn(f"plan {observed.refused[0]} is refused: {observed.refused[1]}")
        return self._offer_and_report(gpus, observed, slices)

    def _users(self, environments: Environments, existing: Collection[Slice]) -> Users:
        """Return which pods use which places, according to the three sources of `slice_usage`.

        Args:
            existing: The slices that exist. The Node may not list all of them, because administrators can create some.
        """
        entries = self._plugins.entries({resource_of(s.name) for s in existing})
        by_others = ((e.uid, e.ids) for e in entries if not e.name and self._is_alive(e.uid))
        return {
            **users_by_records(self._inputs.pods.all()),
            **users_by_cdi_files(environments, existing, self._is_alive),
            **users_by_checkpoint(by_others, existing),
            # On a node that had another label before, claims may still have MIG instances.
            **{place: held.uid for held in self._inputs.claims() for place in places_of(held.shares)},
        }

    def _offer_and_report(self, gpus: Sequence[Card], observed: ObservedPartitions, slices: tuple[Slice, ...]) -> float:
        """Offer the slices to the kubelet, and report those in use and those whose ids the kubelet knows.

        The kubelet fails a pod if it knows too few ids of the resource, so the scheduler must not use other slices.
        Return after how many seconds to reconcile again. Raises RetryLater, ApiError and Unreachable.
        """
        unhealthy = {gpu.index for gpu in gpus if not gpu.healthy} | observed.unhealthy
        self._plugins.offer(slices, {s for s in slices if s.card in unhealthy})
        self._has_offered = True
        reported, is_complete = reportable_slices(slices, observed.unhealthy, self._plugins.is_registered)
        applied = observed.applied if is_complete else None
        self._report = SliceReport(reported, observed.cards, applied, observed.refused)
        self._status.write(self._report)
        if observed.retry_reason is not None:
            raise RetryLater(observed.retry_reason)
        if is_complete:
            self._poll = _FIRST_POLL_SECONDS
            return INTERVAL_SECONDS
        seconds = self._poll
        self._poll = min(2 * self._poll, INTERVAL_SECONDS)
        return seconds

    def _serve_claims(self, observed: ObservedPartitions) -> float:
        """Offer no slices to pods, because claims get the MIG instances (`deviceplugin.dra`)."""
        self._publish(NodeSlices(MIG_CLAIMS, existing=observed.slices, cards=observed.cards))
        self._has_observed = True
        self._warn_once("cards", observed.problems)
        if self._has_offered:
            self._plugins.offer((), ())
        self._report = None
        # The scheduler process gives no claim a card that is not in MIG mode, or the place of another instance.
        self._status.write(SliceReport(observed.slices, observed.cards))
        return INTERVAL_SECONDS

    def _reconcile_unlabelled_node(self) -> float:
        """Partition nothing, and do not change the MIG instances that others have created."""
        self._publish(NO_SLICES)
        self._has_observed = True
        if self._has_offered:
            self._plugins.offer((), ())
        self._report = None
        self._status.write(None)
        return INTERVAL_SECONDS

    def _read(self, node: Raw) -> NodeSlices | None:
        """Return the plan of the Node, with the slices of the last observation, or else those that the Node reports.

        If the Node is invalid, the result comes from its last valid version; it is None if there was no such version.
        If only the agent's own annotation is damaged, that annotation is ignored.
        """
        problems: list[str] = []
        reported = self._last_valid
        try:
            model = read_node(node)
            try:
                reported = read_slices(model)
            except BadObject as error:
                problems = [*map(str, error.problems)]
                others = {key: text for key, text in model.annotations.items() if key != EXISTING}
                reported = replace(read_slices(replace(model, annotations=others)), has_positions=False)
        except BadObject as error:
            problems = [*map(str, error.problems)]
        self._warn_once("node", [f"{problem}; the last valid state stays in force" for problem in problems])
        self._last_valid = reported
        if reported is None:
            return None
        state = self._partitions.state
        slices = reported.existing if reported.has_positions else ()
        if self._has_observed and state:
            slices = state.existing
        return replace(reported, existing=tuple(s for s in slices if mode_of(s.name) == reported.mode))

    def _held(self, gpus: Sequence[Card], environments: Environments, mode: str) -> frozenset[int]:
        """Return the indexes of the cards that are held by pods with other vocabularies or with cards of other plugins.

        On an MPS node all cards count as held while a pod may use MIG instances that another plugin gave out.
        """
        pods = self._inputs.pods.all()
        bare = self._inputs.unrecorded.bare
        if mode == MPS and any(_may_use_unknown_instances(pod) for pod in pods if pod.pod.uid not in bare):
            return frozenset(gpu.index for gpu in gpus)
        shares = [share for pod in pods if not pod.pod.ended for share in pod.shares or ()]
        inputs = self._inputs
        holdings = *inputs.unrecorded.holdings(), *inputs.claims(), *inputs.remnants.holdings()
        shares += [share for holding in holdings for share in holding.shares]
        delivered = (env for (uid, _), env in environments.items() if self._is_alive(uid))
        uuids = {uuid for env in delivered for uuid in visible_cards(env)}
        return frozenset(gpu.index for gpu in gpus if gpu.uuid in uuids or any(share.is_on(gpu) for share in shares))

    def _is_alive(self, uid: str) -> bool:
        """Return whether this is a remnant, or a pod of the node that has not ended."""
        if self._inputs.remnants.is_remnant(uid):
            return True
        pod, presence = self._inputs.pods.by_uid(uid), self._inputs.pods.presences().get(uid)
        return not pod.pod.ended if pod else presence is not None and not presence.ended

    def _publish(self, state: NodeSlices) -> None:
        if state != self._partitions.state:
            self._partitions.state = state
            self._inputs.changed()

    def _warn_once(self, subject: str, problems: Sequence[str]) -> None:
        """Report the problems of a subject that were not among its problems in the previous call."""
        for problem in problems:
            if problem not in self._warned.get(subject, ()):
                self._inputs.warn(problem)
        self._warned[subject] = tuple(problems)


def _may_use_unknown_instances(pod: GpuPod) -> bool:
    """Return whether the pod may run on MIG instances that another plugin gave out.

    On an MPS node it is not known which instances these are. They would be destroyed if their card left MIG mode.
    """
    if pod.shares is not None or pod.pod.ended or not pod.started_containers or pod.request is None:
        return False
    return any(is_slice(request.type) and not is_mps(request.type) for request in pod.request.others)
