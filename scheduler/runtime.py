"""Composes the parts of the scheduler process, without its HTTP side, and runs their threads.

`scheduler.main` creates the `Process`, and `scheduler.api.app` serves it. The order of the steps in `_supervise` and
`end` matters. A replica decides only while it leads and after it has observed what the last leader wrote. It releases
the Lease only after its own writes have arrived, or after `WRITE_SECONDS`, the longest time that a write takes.
"""

import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import Api, Unreachable
from mgpu.kube.events import Recorder
from mgpu.kube.fence import FencedApi
from mgpu.kube.leader import WRITE_SECONDS, Leader
from mgpu.kube.reflector import Reflector
from mgpu.model.errors import RetryLater
from mgpu.serving.record_keys import warn_if_unsealed
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.announcements import Announcements
from scheduler.claims import repair, templates, waker
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import (
    CardsFreed,
    MtgpuPodsAffected,
    NodeMayFit,
    ObjectWarning,
    PartitionsChanged,
    PodResizing,
    PodUndecided,
)
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.decider import Decider
from scheduler.decisions.disruption_budgets import DisruptionBudgets
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_filter import GangFilter
from scheduler.decisions.in_flight import PodsInFlight
from scheduler.decisions.in_flight_filter import InFlightFilter
from scheduler.decisions.late_binding import LateDecisions
from scheduler.decisions.open_claims import OpenClaims
from scheduler.decisions.pod_groups import PodGroupReader
from scheduler.decisions.preemption import Preemption
from scheduler.decisions.resizing import ResizeDecisions
from scheduler.decisions.suggestions import Suggestions
from scheduler.leadership import LeaderLabel, OwnKubeScheduler
from scheduler.mtgpupods.mtgpupod_controller import MtgpuPodController
from scheduler.mtgpupods.mtgpupod_status import Transition
from scheduler.partitioning.partition_controller import PartitionController
from scheduler.partitioning.plan_writer import PlanWriter
from scheduler.rounds import run_rounds
from scheduler.watches import Watches

log = logging.getLogger(__name__)

_LEASE = "mgpu-scheduler"
_ROUND_SECONDS = 0.1
"""The interval at which the supervisor checks the term and the overdue reservations."""
_REFRESH_SECONDS = 120.0
"""The longest wait for a new list at the beginning of a term, that is, after this replica has become the leader."""
_LEARN_SECONDS = 1.0
"""The shortest interval at which learned policies and the arrays of nodes are updated."""
_LEARN_FRACTION = 0.05
"""The largest part of the time that learning may take."""
_POLL_SECONDS = 0.02
_END_SECONDS = 10.0
"""How long `end` waits for the Lease to be released and the label to be removed."""

SWITCH_SECONDS = 0.001
"""The interval after which Python switches threads (`sys.setswitchinterval`).

While a filter holds the GIL, a decision waits this long for it. Python's default of 5 ms is as long as a decision.
"""
_REASONS_IF_PASSING = 8
"""kube-scheduler uses the reasons of the rejected nodes only if no node passes."""


class Process:
    """One replica of the scheduler.

    The constructor starts no threads and sends no requests. `start` must be called after the fork, in the process that
    serves.

    Args:
        identity: The name of this replica in the Lease and in Events.

    Attributes:
        late: The queue of late binding decisions.
        resizing: The queue of live resizes.
    """

    def __init__(self, settings: Settings, api: Api, identity: str, records: RecordVerifier = UNSEALED) -> None:
        self.settings = settings
        self.api = api
        self._identity = identity
        self.announcements = Announcements(api, self.may_decide)
        self.state = ClusterCache(settings, records=records)
        writes = FencedApi(api, self._check_fence)
        plan_writer = PlanWriter(writes, settings)
        budgets = EffortBudgets()
        disruptions = DisruptionBudgets()
        self.planning = PartitionController(
            self.state, plan_writer, settings, self._warn, self.may_decide, budgets=budgets
        )
        flights = PodsInFlight()
        self.decider = Decider(self.state, api, settings, budgets, flights)
        self.filter = Filter(self.state, settings, budgets=budgets, reasons_if_passing=_REASONS_IF_PASSING)
        self.gang_filter = GangFilter(
            self.state, self.filter, self.decider, self.announcements.announce, PodGroupReader(api)
        )
        self.in_flight = InFlightFilter(self.state, self.gang_filter, self.decider, settings, flights)
        self.preemption = Preemption(self.state, disruptions, settings, budgets)
        self.late = LateDecisions(
            self.state, self.decider, writes, settings, self._warn, self.may_decide, self.planning
        )
        self.resizing = ResizeDecisions(self.state, writes, settings, self._warn, self.may_decide)
        self.suggestions = Suggestions(
            self.state, self.filter, self.decider, writes, self.may_decide, self.planning.request_plan
        )
        self.claim_decider = ClaimDecider(self.state, api, settings, budgets, flights=flights)
        self.open_claims = OpenClaims(self.state, self.claim_decider)
        self.claim_repair = repair.ClaimRepair(self.state, self.claim_decider, writes, self._warn, self.may_decide)
        self.claim_waker = waker.ClaimWaker(self.state, self.claim_decider, writes, self.may_decide)
        self.claim_templates = templates.ClaimTemplates(self.state, writes, self._warn, self.may_decide)
        self.mtgpus = MtgpuPodController(self.state, writes, settings, self._record, self._may_serve_mtgpupods)
        self._recorder: Recorder | None = None
        own = settings.scheduler
        self._leader = self._candidate() if own.leader_elect else None
        self._label = LeaderLabel(api, own.namespace, own.pod_uid, self.not_deciding_reason) if own.pod_uid else None
        self._subscribe()
        self._watches = Watches(api, settings, self.state, disruptions, self.planning, plan_writer)
        self._observed_term = -1
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._writers: list[threading.Thread] = []
        self._leadership_threads: list[threading.Thread] = []

    def _subscribe(self) -> None:
        self.state.subscribe(CardsFreed, self.announcements.cards_freed)
        self.state.subscribe(NodeMayFit, self.announcements.node_may_fit)
        self.state.subscribe(PartitionsChanged, lambda event: self.planning.changed(event.node))
        self.state.subscribe(MtgpuPodsAffected, self.mtgpus.affected)
        self.state.subscribe(PodUndecided, lambda event: self.late.add(event.uid))
        self.state.subscribe(PodResizing, lambda event: self.resizing.add(event.uid))
        self.state.subscribe(ObjectWarning, lambda event: self._warn(event.regarding, event.reason, event.message))

    def start(self) -> None:
        """Start the threads. One of them starts the watches."""
        warn_if_unsealed(self.state.records)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._recorder = Recorder(self.api, "mgpu-scheduler", self._identity)
        self._run("supervisor", self._supervise)
        self._run("announcements", lambda: self.announcements.run(self._stop))
        self._writers = [
            self._run("late decisions", lambda: self.late.run(self._stop)),
            self._run("resizes", lambda: self.resizing.run(self._stop)),
            self._run("mtgpupods", lambda: self.mtgpus.run(self._stop)),
            # This thread also removes suggestions after the verbs for Volcano were turned off.
            self._run("suggestions", lambda: self.suggestions.run(self._stop)),
        ]
        if self.settings.dra.enabled:
            self._writers += [
                self._run_rounds("claim repair", self.claim_repair.work, repair.ROUND_SECONDS),
                self._run_rounds("claim waker", self.claim_waker.work, waker.ROUND_SECONDS),
            ]
        if self.settings.dra.enabled and self.settings.dra.convert:
            rounds = self._run_rounds("claim templates", self.claim_templates.work, templates.ROUND_SECONDS)
            self._writers.append(rounds)
        if self.settings.dialects.slices.enabled:
            self._writers.append(self._run("planning", lambda: self.planning.run(self._stop)))

    def end(self) -> None:
        """Stop deciding, and wait until the writes have arrived and another replica may lead, at most `_END_SECONDS`.

        Until `stop` is called, this replica answers as one that does not lead.
        """
        self.state.reservations.close()
        self._stop.set()
        for part in (self.late, self.resizing, self.announcements, self.planning, self.mtgpus, self.suggestions):
            part.wake()
        until = time.monotonic() + _END_SECONDS
        for thread in self._leadership_threads:
            thread.join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """End the watches and the threads, after `end`."""
        if not self._stop.is_set():
            self.end()
        self._watches.stop()
        for thread in self._threads:
            thread.join(2)

    def not_ready_reason(self) -> str | None:
        """Return why this replica is not ready, or None. A replica need not lead to be ready."""
        return self._watches.not_ready_reason()

    def not_deciding_reason(self) -> str | None:
        return self.not_ready_reason() or self._not_leading_reason()

    def _not_leading_reason(self) -> str | None:
        if self._stop.is_set():
            return "this replica is being stopped"
        if not self.leading:
            return "another replica leads"
        return None if self._observed_term == self._term() else "catching up with what the last leader wrote"

    @property
    def leading(self) -> bool:
        """Whether this replica leads, or leader election is off. False once the process ends."""
        return not self._stop.is_set() and (self._leader is None or self._leader.leading)

    @property
    def labelled(self) -> bool:
        """Whether this replica decides and its pod alone has the label that the Service selects."""
        return self._label is not None and self._label.written

    def watches(self) -> Mapping[str, Reflector]:
        """Return all watches by the names under which the metrics show them."""
        return self._watches.all()

    def may_answer(self) -> None:
        """Raise RetryLater while the cache is not complete yet."""
        self._watches.check_synced()

    def may_decide(self) -> None:
        """Raise RetryLater while this replica must not decide. Unlike for readiness, a watch may be broken."""
        self.may_answer()
        reason = self._not_leading_reason()
        if reason is not None:
            raise RetryLater(reason)

    def _check_fence(self) -> None:
        """Raise Unreachable if another replica may lead already, because a decision may then be outdated."""
        if self._leader is not None and not self._leader.may_write:
            raise Unreachable("not sent: this replica does not lead any more")

    def _may_serve_mtgpupods(self) -> None:
        self.may_decide()
        if not self._watches.knows_mtgpupods():
            raise Unreachable("MtgpuPods are unknown: this process is not allowed to list and watch mtgpupods")

    def _candidate(self) -> Leader:
        own = self.settings.scheduler
        elsewhere = None
        if own.kube_scheduler_lease:
            host = socket.gethostname()
            elsewhere = OwnKubeScheduler(self.api, own.namespace, own.kube_scheduler_lease, host).elsewhere
        return Leader(
            self.api,
            own.namespace,
            _LEASE,
            self._identity,
            should_yield=elsewhere,
            wait_for_writes=self._wait_for_writes,
        )

    def _wait_for_writes(self) -> None:
        """Return once all decisions and writes of this replica have arrived, at the latest after WRITE_SECONDS.

        If the process does not end, the call always takes WRITE_SECONDS, the longest time that a write takes.
        """
        until = time.monotonic() + WRITE_SECONDS
        if not self._stop.wait(WRITE_SECONDS):
            return  # The process continues.
        for thread in self._writers:
            thread.join(max(0.0, until - time.monotonic()))
        while self.state.reservations.has_unobserved(WRITE_SECONDS) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _term(self) -> int:
        return 0 if self._leader is None else self._leader.term

    def _supervise(self) -> None:
        """Start the watches and wait for them. Then catch up in each new term, and check overdue reservations."""
        self._start_leadership()
        first_term = self._term() if self.leading else -1
        self._watches.start()
        while not self._watches.wait_synced(_ROUND_SECONDS):
            if self._stop.is_set():
                return
        _freeze()  # Otherwise full garbage collections take as much time as learning does.
        self._learn()  # Otherwise the first call of kube-scheduler would have to wait for this.
        self._run("learning", self._keep_learning)
        _freeze()
        if first_term >= 0:
            # The Lease was acquired before the first lists began, so they contain all that the last leader wrote.
            self._begin_term(first_term)
        while not self._stop.wait(_ROUND_SECONDS):
            try:
                if self.leading and self._observed_term != self._term():
                    self._catch_up()
                self.decider.check_overdue()
            except Exception:
                # This is the outermost handler of the thread. Without it, reservations would not be released any more.
                log.exception("supervisor: round failed")

    def _start_leadership(self) -> None:
        leader = self._leader
        label = self._label
        wait_for_release: Callable[[], object] = bool
        if leader:
            leader.round()
            thread = self._run("leader", lambda: leader.run(self._stop))
            self._leadership_threads.append(thread)
            wait_for_release = thread.join
        if label:
            self._leadership_threads.append(self._run("label", lambda: label.run(self._stop, wait_for_release)))

    def _keep_learning(self) -> None:
        took = 0.0
        while not self._stop.wait(max(_LEARN_SECONDS, took / _LEARN_FRACTION)):
            began = time.monotonic()
            self._learn()
            took = time.monotonic() - began

    def _learn(self) -> None:
        """Update learned policies and the arrays of nodes, so that calls of kube-scheduler need not do it."""
        for refresh in (self.state.forecast.refresh, self.filter.refresh):
            try:
                refresh()
            except Exception:
                # This is the outermost handler of the thread. What was learned before stays in use.
                log.exception("cannot update what policies have learned")

    def _catch_up(self) -> None:
        """Begin a term after new lists, because the watches may not have delivered all that the last leader wrote."""
        term = self._term()
        writable = ("nodes", "mtgpupods", "pods", "claims")
        if self._watches.refresh(writable, _REFRESH_SECONDS):
            self._begin_term(term)

    def _begin_term(self, term: int) -> None:
        self.state.mtgpupods.drop_admissions()
        self._observed_term = term
        log.info("deciding", extra={"term": term})
        self.planning.begin()
        self.mtgpus.begin()
        self.suggestions.begin()
        for uid in self.state.undecided_pods():
            self.late.add(uid)
        for uid in self.state.resizes.pods():
            self.resizing.add(uid)
        # No replica has announced the cards that came free between two terms. Pods that wait for slices are known only
        # to the replica whose filter has rejected them, so they must be filtered again. One announcement suffices,
        # because kube-scheduler retries all rejected pods after a change of any Node.
        for node in sorted({*self.state.partitions.nodes(), *self.state.nodes_with_cards()})[:1]:
            self.announcements.announce(node)

    def _run(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _run_rounds(self, name: str, work: Callable[[], None], seconds: float) -> threading.Thread:
        return self._run(name, lambda: run_rounds(name, work, seconds, self._stop))

    def _warn(self, regarding: dict[str, Any], reason: str, message: str) -> None:
        metrics.EVENTS.labels(reason).inc()
        log.warning("%s: %s", reason, message, extra={"object": regarding.get("name")})
        if self._recorder:
            self._recorder.warn(regarding, reason, message)

    def _record(self, regarding: dict[str, Any], transition: Transition) -> None:
        log.info("%s: %s", transition.reason, transition.message, extra={"object": regarding.get("name")})
        if self._recorder:
            type_ = "Warning" if transition.warning else "Normal"
            self._recorder.record(regarding, transition.reason, transition.message, type_)


def _freeze() -> None:
    """Exempt all present objects from garbage collections, which would visit every pod while all threads wait."""
    gc.collect()
    gc.freeze()
