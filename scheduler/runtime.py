"""The scheduler process without its HTTP side: what runs, in which order it starts, and what it may do when."""

import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import Api, Unreachable
from mgpu.kube.events import Recorder
from mgpu.kube.fence import FencedApi
from mgpu.kube.leader import LAND_SECONDS, Leader
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import DEVICE_API
from mgpu.model.errors import RetryLater
from mgpu.serving.record_keys import warn_if_unsealed
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.announcements import Announcements
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import (
    CardsFreed,
    MtgpuPodsAffected,
    NodeMayFit,
    ObjectWarning,
    PartitionsChanged,
    PodUndecided,
)
from scheduler.decisions.decider import Decider
from scheduler.decisions.disruption_budgets import PATH as BUDGETS_PATH
from scheduler.decisions.disruption_budgets import DisruptionBudgets
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter
from scheduler.decisions.late_binding import LateDecisions
from scheduler.decisions.preemption import Preemption
from scheduler.leadership import LeaderLabel, OwnKubeScheduler
from scheduler.mtgpupods.mtgpupod_controller import MtgpuPodController
from scheduler.mtgpupods.mtgpupod_status import Transition
from scheduler.partitioning.partition_controller import PartitionController
from scheduler.partitioning.plan_writer import PlanWriter

log = logging.getLogger(__name__)

_LEASE = "mgpu-scheduler"
_SILENT_SECONDS = 30.0
_WATCH_SECONDS = 30
"""A scheduler must not decide for long by what a half-open watch told last. It has some eight watches, each a request
per 30 s; the agents, of which there are thousands, watch longer and ask the API server again before they hand out."""
_ROUND_SECONDS = 0.1
_REFRESH_SECONDS = 120.0
_LEARN_SECONDS = 1.0
_LEARN_SHARE = 0.05
"""Of the time, at most."""
_LOOK_SECONDS = 0.02
_END_SECONDS = 10.0
_ENDS = "this replica ends"


SWITCH_SECONDS = 0.001
"""How long a decision may wait for the interpreter while a filter has it; Python's own 5 ms are what one may take."""


class Process:
    """Built without side effects; `start` begins the watches and threads, in the process that will serve."""

    def __init__(self, settings: Settings, api: Api, identity: str, records: RecordVerifier = UNSEALED) -> None:
        self._settings, self._api, self._identity = settings, api, identity
        self.announcements = Announcements(api, self.may_decide)
        self.state = ClusterCache(settings, records=records)
        writes = FencedApi(api, self._may_write)
        writer = PlanWriter(writes, settings)
        effort_budgets = EffortBudgets()
        self.planning = PartitionController(
            self.state, writer, settings, self._warn, self.may_decide, budgets=effort_budgets
        )
        self.decider = Decider(self.state, api, settings, effort_budgets)
        self.filter = Filter(
            self.state,
            settings,
            self.planning.request_plan,
            nowhere=self.announcements.refused,
            budgets=effort_budgets,
        )
        disruption_budgets = DisruptionBudgets()
        self.preemption = Preemption(self.state, disruption_budgets, settings, effort_budgets)
        self.late = LateDecisions(
            self.state,
            self.decider,
            writes,
            settings,
            self._warn,
            self.may_decide,
            can_repartition=self.planning.can_serve,
        )
        self.mtgpus = MtgpuPodController(self.state, writes, settings, self._tell, self._may_serve_mtgpupods)
        self._recorder: Recorder | None = None
        own = settings.scheduler
        self._leader = self._elected() if own.leader_elect else None
        self._label = LeaderLabel(api, own.namespace, own.pod_uid, self.not_deciding_reason) if own.pod_uid else None
        self._subscribe()
        watch = partial(Reflector, watch_seconds=_WATCH_SECONDS)
        state = self.state
        self._pods = watch(api, "/api/v1/pods", state.pod_changed, state.pod_gone)
        self._nodes = watch(api, "/api/v1/nodes", state.node_changed, state.node_gone)
        self._mtgpupods = watch(
            api, mtgpu.COLLECTION, state.mtgpupods.mtgpupod_changed, state.mtgpupods.mtgpupod_gone, optional=True
        )
        self._watches = {
            "nodes": self._nodes,
            "devices": watch(
                api, f"/apis/{DEVICE_API}/devices", state.device_changed, state.device_gone, optional=True
            ),
            "pods": self._pods,
            "mtgpupods": self._mtgpupods,
        }
        for lists in dialects.unhealthy_card_lists(settings):
            maps = f"/api/v1/namespaces/{lists.namespace}/configmaps"
            self._watches["configmaps"] = watch(api, maps, state.configmap_changed, state.configmap_gone, optional=True)
        # Nobody waits for these: who may not read budgets evicts as if there were none, and what a ConfigMap says is
        # read again before it is written.
        configs = self.planning.configs
        self._beside = (
            watch(api, BUDGETS_PATH, disruption_budgets.changed, disruption_budgets.gone, optional=True),
            watch(api, writer.maps, configs.changed, configs.gone, writer.only_map, optional=True),
        )
        self._fresh_term = -1
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._writers: list[threading.Thread] = []
        self._leaving: list[threading.Thread] = []

    def _subscribe(self) -> None:
        """Register for each event of the cache the parts that act on it."""
        self.state.subscribe(CardsFreed, lambda event: self.announcements.add(event.node))
        self.state.subscribe(NodeMayFit, lambda event: self.announcements.left(event.node))
        self.state.subscribe(PartitionsChanged, lambda event: self.planning.changed(event.node))
        self.state.subscribe(MtgpuPodsAffected, self.mtgpus.affected)
        self.state.subscribe(PodUndecided, lambda event: self.late.add(event.uid))
        self.state.subscribe(ObjectWarning, lambda event: self._warn(event.regarding, event.reason, event.message))

    def start(self) -> None:
        warn_if_unsealed(self.state.records)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._recorder = Recorder(self._api, "mgpu-scheduler", self._identity)
        self._run("steward", self._steward)
        self._run("announcements", lambda: self.announcements.run(self._stop))
        self._writers = [
            self._run("late decisions", lambda: self.late.run(self._stop)),
            self._run("mtgpupods", lambda: self.mtgpus.run(self._stop)),
        ]
        if self._settings.dialects.slices.enabled:
            self._writers.append(self._run("planning", lambda: self.planning.run(self._stop)))

    def end(self) -> None:
        """Decide no more, and let another replica lead as soon as what was decided is written; then return.

        Until `stop` this one answers as one that does not lead.
        """
        self.state.close()
        self._stop.set()
        for writer in (self.late, self.announcements, self.planning, self.mtgpus):
            writer.wake()
        until = time.monotonic() + _END_SECONDS
        for thread in self._leaving:
            thread.join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """End the watches and the threads, after `end`."""
        if not self._stop.is_set():
            self.end()
        for watch in (*self._watches.values(), *self._beside):
            watch.stop()
        for thread in self._threads:
            thread.join(2)

    def not_ready_reason(self) -> str | None:
        """Return why this process cannot answer yet, or None. A ready one decides as soon as it leads."""
        for name, watch in self._awaited():
            if not watch.synced:
                return f"not in sync yet: {name}"
            if watch.broken_for > _SILENT_SECONDS:
                return f"the API server has not answered for {watch.broken_for:.0f} s: {name}"
        return None

    def not_deciding_reason(self) -> str | None:
        """Return why this process does not decide, or None where it does."""
        return self.not_ready_reason() or self._not_leading_reason()

    def _not_leading_reason(self) -> str | None:
        if not self._leading():
            return _ENDS if self._stop.is_set() else "another replica leads"
        return None if self._fresh_term == self._term() else "catching up with what the last leader wrote"

    @property
    def leading(self) -> bool:
        """Whether this replica leads, or leader election is off."""
        return self._leading()

    @property
    def labelled(self) -> bool:
        """Whether this replica decides and its pod alone has the label that the Service selects."""
        return self._label is not None and self._label.written

    def watches(self) -> Mapping[str, Reflector]:
        """Return the informers by a short name, as the metrics show them."""
        beside = dict(zip(("budgets", "slice-configs"), self._beside, strict=True))
        return {**self._watches, **beside}

    def may_answer(self) -> None:
        """Raise RetryLater while the cache is not complete yet."""
        for name, watch in self._awaited():
            if not watch.synced:
                raise RetryLater(f"not in sync yet: {name}")

    def may_decide(self) -> None:
        """Raise RetryLater while this process must not decide. Broken watches do not matter, unlike for readiness."""
        self.may_answer()
        reason = self._not_leading_reason()
        if reason is not None:
            raise RetryLater(reason)

    def _may_write(self) -> None:
        """The fence of what is written by decisions: they may be older than another replica's lead."""
        if self._leader is not None and not self._leader.may_write:
            raise Unreachable("not sent: this replica does not lead any more")

    def _may_serve_mtgpupods(self) -> None:
        self.may_decide()
        if self._mtgpupods.forbidden or not self._mtgpupods.synced:
            raise Unreachable("which MtgpuPods there are is not known: this process may not list and watch mtgpupods")

    def _awaited(self) -> Iterator[tuple[str, Reflector]]:
        """What has to be known. Whoever has been forbidden MtgpuPods for long serves none, and nobody else waits for
        them: those that have a card are known by their Pods and occupy pods. At first it may be that the API server
        has just started.
        """
        for name, watch in self._watches.items():
            if not (watch is self._mtgpupods and watch.forbidden and watch.broken_for > _SILENT_SECONDS):
                yield name, watch

    def _elected(self) -> Leader:
        own, elsewhere = self._settings.scheduler, None
        if own.kube_scheduler_lease:
            lease = own.kube_scheduler_lease
            elsewhere = OwnKubeScheduler(self._api, own.namespace, lease, socket.gethostname()).elsewhere
        return Leader(self._api, own.namespace, _LEASE, self._identity, elsewhere=elsewhere, landed=self._landed)

    def _landed(self) -> None:
        """Return once all has landed that was decided or begun to be written here, after LAND_SECONDS in any case."""
        until = time.monotonic() + LAND_SECONDS
        if not self._stop.wait(LAND_SECONDS):
            return  # those who write go on, and nobody knows what they are about
        for thread in self._writers:
            thread.join(max(0.0, until - time.monotonic()))
        while self.state.has_unobserved_reservations(LAND_SECONDS) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def _leading(self) -> bool:
        return not self._stop.is_set() and (self._leader is None or self._leader.leading)

    def _term(self) -> int:
        return 0 if self._leader is None else self._leader.term

    def _steward(self) -> None:
        """Start the watches; then, for ever, whatever has to be done from time to time."""
        leader, label = self._leader, self._label
        given_up: Callable[[], object] = bool
        if leader:
            leader.round()
            self._leaving.append(self._run("leader", lambda: leader.run(self._stop)))
            given_up = self._leaving[0].join
        if label:
            self._leaving.append(self._run("label", lambda: label.run(self._stop, given_up)))
        first_term = self._term() if self._leading() else -1
        for watch in (*self._watches.values(), *self._beside):
            watch.start()
        while not all(watch.wait_synced(_ROUND_SECONDS) for _, watch in self._awaited()):
            if self._stop.is_set():
                return
        self._learn()  # all nodes are new: not in the first call's time
        self._run("forecast", self._keep_learning)
        gc.collect()
        gc.freeze()  # a full collection would walk every pod of the cluster, while everybody waits
        if first_term >= 0:
            self._begin(first_term)  # this list was begun after the lease was ours
        while not self._stop.wait(_ROUND_SECONDS):
            try:
                if self._leading() and self._fresh_term != self._term():
                    self._catch_up()
                self.decider.check_overdue()
            except Exception:
                # The thread's outermost loop: reservations would never be released again.
                log.exception("round failed")

    def _keep_learning(self) -> None:
        took = 0.0
        while not self._stop.wait(max(_LEARN_SECONDS, took / _LEARN_SHARE)):
            began = time.monotonic()
            self._learn()
            took = time.monotonic() - began

    def _learn(self) -> None:
        """From the pods that came meanwhile; not in any call's time."""
        for refresh in (self.state.forecast.refresh, self.filter.refresh):
            try:
                refresh()
            except Exception:
                # Outermost: what was learnt before stays in force, and nodes and cards are chosen with it or without.
                log.exception("nothing learnt")

    def _catch_up(self) -> None:
        """The last leader may have written what the watch has not brought yet: decide only on a newer list."""
        term = self._term()
        fresh = (self._nodes, self._mtgpupods, self._pods)
        if all(watch.refresh(_REFRESH_SECONDS) for _, watch in self._awaited() if watch in fresh):
            self._begin(term)

    def _begin(self, term: int) -> None:
        self.state.mtgpupods.drop_admissions()
        self._fresh_term = term
        log.info("deciding", extra={"term": term})
        self.planning.begin()
        self.mtgpus.begin()
        for uid in self.state.undecided_pods():
            self.late.add(uid)
        # What came free while nobody led nobody has announced, and pods that wait for slices are known only to who was
        # asked about them: after a change of one Node kube-scheduler looks at all of them again.
        for node in sorted({*self.state.partitions.nodes(), *self.state.nodes_with_cards()})[:1]:
            self.announcements.add(node)

    def _run(self, name: str, target: Any) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _warn(self, regarding: dict[str, Any], reason: str, message: str) -> None:
        metrics.EVENTS.labels(reason).inc()
        log.warning("%s: %s", reason, message, extra={"object": regarding.get("name")})
        if self._recorder:
            self._recorder.warn(regarding, reason, message)

    def _tell(self, regarding: dict[str, Any], what: Transition) -> None:
        log.info("%s: %s", what.reason, what.message, extra={"object": regarding.get("name")})
        if self._recorder:
            self._recorder.record(regarding, what.reason, what.message, "Warning" if what.warning else "Normal")
