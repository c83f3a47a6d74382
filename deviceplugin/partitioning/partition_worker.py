"""Reconciles the partitions of this node: makes the cards what the plan says, and reports what they are.

One call of `PartitionWorker.reconcile` compares the desired state (the Node's annotations, or the ConfigMap of MPS)
with the observed one (NVML, MPS daemons), changes the cards through the partitioner of the node's mode, offers the
slices to the kubelet, and writes the observed state into the Node's annotations. It keeps nothing that it could not
read again: an agent that ended at any point is followed by one that goes on from there. The agent starts the worker;
tests call `reconcile` themselves (`tests/test_slices_machine.py`).
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deviceplugin.kubelet.checkpoint import PodDevicesEntry
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.node_status import NodeWatch, SliceReport, reportable
from deviceplugin.partitioning.partitioner import ObservedPartitions, Partitioner
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.slice_usage import (
    Environments,
    Users,
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
from mgpu.model.node_slices import LABEL, MADE, NO_SLICES, NodeSlices, Partitioning, read_slices
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MIG, MPS, Slice, is_mps, is_slice, mode_of, resource_of

log = logging.getLogger(__name__)

Raw = dict[str, Any]
TICK_SECONDS = 5.0
_FIRST_POLL_SECONDS = 0.2
"""Until the kubelet knows the ids of new slices; doubled each time, up to a tick."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_MIN_INTERVAL = 0.1
"""Between two reconciliations, since pods come and go in bursts."""
_QUIET_SECONDS = 2.0
"""For this time no Event reports what is not known, or does not answer, yet."""
_STALLED_SECONDS = 120.0
_UNKNOWN_SECONDS = 30.0
"""For this time a pod that only the kubelet knows is taken for one that the watch has not delivered yet."""
_WAS_PRESENT = float("-inf")
"""In place of the time since when a pod is missing: it was there, and has gone."""


class GpuWatch(Protocol):
    """What is needed of `CardWatch`."""

    @property
    def cards(self) -> Sequence[Card] | None:
        """All cards of the node; None: not known yet."""


class PodList(Protocol):
    """What is needed of the Reflector that feeds `NodePods`."""

    @property
    def synced(self) -> bool:
        """Whether all pods of the node are known."""


class HandedOut(Protocol):
    """What is needed of `CdiFiles`."""

    def environments(self) -> Environments:
        """Return what containers were handed."""


class UnrecordedHoldings(Protocol):
    """What is needed of `WholeCards`."""

    @property
    def bare(self) -> frozenset[str]:
        """The UIDs of bare pods."""

    def holdings(self) -> Sequence[Holding]:
        """Return what pods hold by another plugin, or without a record."""


class RemnantHoldings(Protocol):
    """What is needed of `Remnants`."""

    def holdings(self) -> Sequence[Holding]:
        """Return what deleted pods hold that still run."""

    def is_remnant(self, uid: str) -> bool:
        """Return whether this pod was deleted and may still run."""


class Plugins(Protocol):
    """What is needed of `SlicePlugins`."""

    def rows(
        self, resources: Iterable[str], alive: Callable[[str], bool]
    ) -> Mapping[str, Sequence[PodDevicesEntry]]: ...
    def offer(self, slices: Collection[Slice], unwell: Collection[Slice], alive: Callable[[str], bool]) -> None: ...
    def known(self, name: str) -> bool: ...


class StatusWriter(Protocol):
    """What is needed of `NodeStatusWriter`."""

    def write(self, report: SliceReport | None) -> None: ...


@dataclass(frozen=True, slots=True)
class PartitionInputs:
    """The parts of the agent that the worker reads, all of them thread-safe.

    Attributes:
        warn: reports a problem in an Event of the node and in the log.
        changed: is called when `NodePartitions.state` has changed.
    """

    watch: NodeWatch
    cards: GpuWatch
    pods: NodePods
    pod_list: PodList
    files: HandedOut
    unrecorded: UnrecordedHoldings
    remnants: RemnantHoldings
    warn: Callable[[str], None]
    changed: Callable[[], None]


class PartitionWorker:
    """Reconciles on a thread of its own, from `start` to `stop`.

    Args:
        inputs: what a reconciliation starts from.
        partitions: receives the observed state.
        partitioners: by mode.
        plugins: offers slices to the kubelet.
        status: writes the Node's annotations.
    """

    def __init__(
        self,
        inputs: PartitionInputs,
        partitions: NodePartitions,
        partitioners: Mapping[str, Partitioner],
        plugins: Plugins,
        status: StatusWriter,
    ) -> None:
        self._inputs = inputs
        self._partitions = partitions
        self._partitioners = partitioners
        self._plugins = plugins
        self._status = status
        self._observed = False
        self._last_good: NodeSlices | None = None
        self._warned: dict[str, tuple[str, ...]] = {}
        self._served = False
        self._report: SliceReport | None = None
        self._refused: tuple[int, str] | None = None
        self._missing_since: dict[str, float] = {}
        self._poll = _FIRST_POLL_SECONDS
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="partitions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Where the driver hangs it is left behind after two seconds: the thread is a daemon."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=2)

    def wake(self) -> None:
        """Reconcile soon, since something may have changed. Thread-safe."""
        self._wake.set()

    @property
    def stalled(self) -> bool:
        """Whether the thread hangs in a call, or has ended with an exception."""
        begun, late = self._thread.ident is not None, time.monotonic() - self._beat > _STALLED_SECONDS
        return begun and (late or not self._thread.is_alive())

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        succeeded = time.monotonic()
        while not self._stop.is_set():
            self._beat = time.monotonic()
            try:
                seconds = self.reconcile()
                pause = _FIRST_PAUSE
                succeeded = time.monotonic()
                self._warn_once("reconcile", [])
            except (RetryLater, ApiError, Unreachable) as error:
                log.info("not all is known or done yet: %s", error)
                if time.monotonic() - succeeded > _QUIET_SECONDS:
                    self._warn_once("reconcile", [str(error)])
                seconds = pause
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._stop.wait(_MIN_INTERVAL)
            self._wake.wait(seconds)
            self._wake.clear()
        self.withdraw()

    def withdraw(self) -> None:
        """Report no free slices: without an agent the kubelet fails every pod that comes for one."""
        if self._report:
            used = tuple(s for s in self._report.slices if s.pod)
            try:
                self._status.write(replace(self._report, slices=used, done=None))
            except (ApiError, Unreachable) as error:
                log.warning("free slices are still reported: %s", error)

    def reconcile(self) -> float:
        """Bring everything one step further. Return after how many seconds to call again if nothing changes before.

        Raises RetryLater, ApiError and Unreachable.
        """
        node, gpus = self._inputs.watch.node, self._inputs.cards.cards
        if node is None or gpus is None or not self._inputs.pod_list.synced:
            return TICK_SECONDS
        found = self._read(node)
        if found is None:
            if (node["metadata"].get("labels") or {}).get(LABEL) not in (MIG, MPS):
                self._publish(NO_SLICES)
            return TICK_SECONDS
        for mode, partitioner in self._partitioners.items():
            if mode != found.mode:
                partitioner.leave()
        if not found.mode:
            return self._release()
        self._served = True
        # Before the first observation the Node's slices do not count: the machine may have been rebooted since.
        made = found.made if self._observed else ()
        spec = Partitioning(found.partitioning.spec)
        state = self._partitions.state
        before = state.cards if state and state.mode == found.mode else frozenset()
        # The planned cards are published before they are cut, so that they are not given out as whole meanwhile.
        self._publish(NodeSlices(found.mode, spec, made, before))
        environments = self._inputs.files.environments()

        def users(made: Collection[Slice]) -> Users:
            # By what exists: before the first observation the Node does not list instances that an administrator made.
            rows = self._plugins.rows({resource_of(s.name) for s in made}, self._is_alive)
            given = users_by_checkpoint(
                ((row.uid, row.ids) for of in rows.values() for row in of if not row.name), made
            )
            handed = users_by_cdi_files(environments, made, self._is_alive)
            return {**users_by_records(self._inputs.pods.all()), **handed, **given}

        held = self._held(gpus, environments, found.mode)
        observed = self._partitioners[found.mode].reconcile(found, gpus, users, held)
        slices = with_users(observed.made, users(observed.made), observed.busy)
        self._publish(NodeSlices(found.mode, spec, slices, observed.cards))
        self._observed = True
        self._warn_once("cards", observed.problems)
        if observed.refused and observed.refused != self._refused:
            self._refused = observed.refused
            self._inputs.warn(f"plan {observed.refused[0]} is refused: {observed.refused[1]}")
        return self._report_to_all(gpus, observed, slices)

    def _report_to_all(self, gpus: Sequence[Card], observed: ObservedPartitions, slices: tuple[Slice, ...]) -> float:
        """Offer the slices to the kubelet, and then report them to the API.

        The scheduler may only hear of ids that the kubelet knows: pods would fail at the kubelet's admission.
        """
        unwell = {gpu.index for gpu in gpus if not gpu.healthy} | observed.unwell
        self._offer(slices, {s for s in slices if s.card in unwell})
        shown, complete = reportable(slices, observed.unwell, self._plugins.known)
        self._report = SliceReport(shown, observed.cards, observed.done if complete else None, observed.refused)
        self._status.write(self._report)
        if observed.retry is not None:
            raise RetryLater(observed.retry)
        if complete:
            self._poll = _FIRST_POLL_SECONDS
            return TICK_SECONDS
        self._poll = min(2 * self._poll, TICK_SECONDS)
        return self._poll

    def _release(self) -> float:
        """Follow a node without the label: cut nothing, and leave alone what others have made."""
        self._publish(NO_SLICES)
        self._observed = True
        if self._served:
            self._offer((), ())
        self._report = None
        self._status.write(None)
        return TICK_SECONDS

    def _read(self, node: Raw) -> NodeSlices | None:
        """Return what the Node says, with the slices of the last observation; None: it has never been valid.

        Where the Node is invalid, the last valid state counts. Where only this agent's own annotation is damaged, it
        is ignored.
        """
        problems: list[str] = []
        found = self._last_good
        try:
            model = read_node(node)
            try:
                found = read_slices(model)
            except BadObject as error:
                problems = [*map(str, error.problems)]
                own = {key: text for key, text in model.annotations.items() if key != MADE}
                found = replace(read_slices(replace(model, annotations=own)), placed=False)
        except BadObject as error:
            problems = [*map(str, error.problems)]
        self._warn_once("node", [f"{problem}; the last good state stays" for problem in problems])
        self._last_good = found
        if found is None:
            return None
        state = self._partitions.state
        made = found.made if found.placed else ()
        if self._observed and state:
            made = state.made
        return replace(found, made=tuple(s for s in made if mode_of(s.name) == found.mode))

    def _held(self, gpus: Sequence[Card], environments: Environments, mode: str) -> frozenset[int]:
        """Return the cards that pods in other vocabularies hold: by records, CDI files, and other plugins."""
        pods = self._inputs.pods.all()
        bare = self._inputs.unrecorded.bare
        if mode == MPS and any(_on_unknown_instances(known) for known in pods if known.pod.uid not in bare):
            return frozenset(gpu.index for gpu in gpus)
        shares = [share for known in pods if not known.pod.ended for share in known.shares or ()]
        holdings = *self._inputs.unrecorded.holdings(), *self._inputs.remnants.holdings()
        shares += [share for holding in holdings for share in holding.shares]
        handed = (env for (uid, _), env in environments.items() if self._is_alive(uid))
        uuids = {uuid for env in handed for uuid in visible_cards(env)}
        return frozenset(gpu.index for gpu in gpus if gpu.uuid in uuids or any(share.is_on(gpu) for share in shares))

    def _is_alive(self, uid: str) -> bool:
        """Return whether this is a pod of the node that has not ended, or a remnant."""
        if self._inputs.remnants.is_remnant(uid):
            return True
        known, present = self._inputs.pods.by_uid(uid), self._inputs.pods.presences().get(uid)
        return not known.pod.ended if known else present is not None and not present.ended

    def _offer(self, slices: Collection[Slice], unwell: Collection[Slice]) -> None:
        """Offer the slices to the kubelet.

        The kubelet's checkpoint runs ahead of the watch for a new pod, and keeps the ids of an ended pod until the next
        allocation. So a pod that only the checkpoint names counts for `_UNKNOWN_SECONDS`, unless it was there before.
        """
        now, present, asked = time.monotonic(), self._inputs.pods.presences(), dict[str, float]()

        def alive(uid: str) -> bool:
            asked[uid] = _WAS_PRESENT if uid in present else self._missing_since.get(uid, now)
            return not present[uid].ended if uid in present else now - asked[uid] < _UNKNOWN_SECONDS

        self._plugins.offer(slices, unwell, alive)
        self._missing_since = asked

    def _publish(self, state: NodeSlices) -> None:
        if state != self._partitions.state:
            self._partitions.state = state
            self._inputs.changed()

    def _warn_once(self, subject: str, problems: Sequence[str]) -> None:
        """Report each problem of a subject once, as long as it lasts."""
        for problem in problems:
            if problem not in self._warned.get(subject, ()):
                self._inputs.warn(problem)
        self._warned[subject] = tuple(problems)


def _on_unknown_instances(known: GpuPod) -> bool:
    """Return whether the pod runs on MIG instances that another plugin gave out.

    A node for MPS does not know which instances these are, and they would be destroyed with their card's MIG mode.
    """
    asked = known.request.others if known.started_containers and known.request and not known.pod.ended else ()
    return known.shares is None and any(is_slice(request.type) and not is_mps(request.type) for request in asked)
