"""Has the cards of nodes cut anew for the pods that wait for slices: one controller, on a thread of its own.

Level-triggered: what is to be done follows from what is known now, so a crash between any two steps loses nothing but
time. A plan stands in the ClusterCache from the moment it is made, so that every decision sees it; then it is written.
While a node has one under way it gets no other (docs/design/slices.md, "Barrier"), and so does a pod.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.events import node_reference
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.node_slices import next_plan
from mgpu.model.slice_names import MPS, Slice
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Warn
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.slice_state import Plan
from scheduler.decisions.effort_budget import Rationed, Rations
from scheduler.engine.effort import Exhausted
from scheduler.engine.partitioning.partitionable_node import Site, cut, keeping, offers, served, wanted_by
from scheduler.engine.partitioning.slice_choice import best_first
from scheduler.partitioning.idle_cards import IdleCards
from scheduler.partitioning.plan_writer import Configs, Writer
from scheduler.partitioning.planning_order import Turns
from scheduler.partitioning.refused_plans import Refusals
from scheduler.partitioning.waiting_pods import Promise, Waiting, WaitingPods

log = logging.getLogger(__name__)

PROMISED_SECONDS = 60.0
"""How long a pod waits for a plan before another node is looked for."""
COMING_SECONDS = 15.0
"""How long slices that a plan made are kept from other plans, for the pod that they were made for.

kube-scheduler asks about a pod again within ten seconds after its node has changed.
"""
MISSING_SECONDS = 10.0
"""How long slices that pods hold may be away before a plan makes them again: a node's agent does so by itself."""
_SHOWN_SECONDS = 60.0
"""How long a plan that was written may stay unseen by the watch before it is looked for."""
_PAUSE = 1.0
_SPACING = 0.02
_AT_ONCE = 64
"""Pods that one plan looks at."""


class Planning:
    """`recut` and `changed` may come from any thread and return at once; `work` is one thread's.

    may_decide raises RetryLater while this process must not write. clock: seconds. now: seconds since 1970.
    """

    def __init__(
        self,
        state: ClusterCache,
        writer: Writer,
        settings: Settings,
        warn: Warn,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        rations: Rations | None = None,
    ) -> None:
        self._state, self._writer = state, writer
        self._settings, self._warn, self._may_decide = settings.dialects.slices, warn, may_decide
        self._clock, self._now, self._rations = clock, now, rations or Rations()
        self.configs = Configs(self._configs_changed)
        self._waiting = WaitingPods(state, clock)
        self._turns = Turns(clock)
        self._refusals = Refusals(clock)
        self._idle = IdleCards(clock, self._settings.mps_idle_seconds)
        self._event = threading.Condition()
        self._due = False
        self._changed: set[str] = set()
        self._missing: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._written: dict[str, tuple[int, float]] = {}
        self._lost: dict[str, tuple[int, float]] = {}
        self._unsaid: set[str] = set()

    # From other threads.

    def recut(self, known: GpuPod, nodes: Sequence[str], passed: Sequence[str] = ()) -> None:
        """The pod would fit on `nodes` if they were cut anew. passed: where it fits now; its binding is expected there,
        and for some seconds no plan takes away what it may get.
        """
        self._waiting.put(known, nodes, passed)
        if nodes and not passed:
            self.wake()

    def can_serve(self, known: GpuPod) -> bool:
        """Whether a bound pod may have its slices once its node is cut anew, or has said how it is; seen to, if so."""
        site, request = self._state.site(known.pod.node, known.pod.uid), known.request
        wanted = wanted_by(request) if request else {}
        if site is None or request is None or not wanted or site.problem or request.unmet(site.node):
            return False
        if site.found.placed and not site.found.waiting:
            with suppress(Rationed, Exhausted), self._rations.call(known.pod.namespace, request) as call:
                if not offers(site, wanted, call.next_budget()):
                    return False
        self.recut(known, [known.pod.node])
        return True

    def changed(self, node: str) -> None:
        """Something of this node's slices, or of who holds them, has changed."""
        with self._event:
            self._changed.add(node)
        self.wake()

    def _configs_changed(self, nodes: Collection[str]) -> None:
        for node in self._state.partitionable_nodes():
            if node in nodes:
                self.changed(node)

    def begin(self) -> None:
        """A term begins: what was decided in an earlier one and not written is no more."""
        for plan in self._state.plans():
            self._state.drop_plan(plan)
        for node in self._state.partitionable_nodes():
            self.changed(node)

    def wake(self) -> None:
        """Look what is to be done, and whether it is time to stop."""
        with self._event:
            self._due = True
            self._event.notify_all()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`, which must be followed by `wake`."""
        while not stop.is_set():
            pause = self._pause()  # takes the ClusterCache's lock, within which others take ours
            with self._event:
                self._event.wait_for(lambda: self._due or stop.is_set(), pause)
                self._due = False
            try:
                self.work()
            except Exception:
                # The thread's outermost loop: one odd node must not keep all pods waiting.
                log.exception("planning failed")
            stop.wait(_SPACING)

    # The planning thread.

    def work(self) -> None:
        """All that is to be done now."""
        try:
            self._may_decide()
            with self._event:
                changed, self._changed = self._changed, set()
            self._look_at(changed)
            pods, left = self._waiting.look()
            self._settle(pods, left)
            self._restore(pods)
            self._serve(pods)
            self._undo(pods)
            self._write()
            self._write_configs()
        except RetryLater:
            return  # whoever may decide next begins with all nodes, and is asked about all pods

    def _pause(self) -> float | None:
        busy = self._missing or self._unsaid or self._idle or self._state.plans() or self._waiting
        return _PAUSE if busy else None

    def _look_at(self, changed: Iterable[str]) -> None:
        for name in sorted(changed):
            site = self._state.site(name)
            if site is None:
                for known in (self._missing, self._told, self._written, self._lost):
                    known.pop(name, None)
                self._unsaid.discard(name)
                self._refusals.drop(name)
                self._turns.drop(name)
                self._idle.drop(name)
                continue
            self._refusals.see(site)
            self._idle.see(site)
            if not site.missing:
                self._missing.pop(name, None)
                self._told.pop(name, None)
            else:
                self._missing.setdefault(name, self._clock())
            if site.found.mode == MPS and site.found.partitioning.plan is not None:
                self._unsaid.add(name)

    def _settle(self, pods: Sequence[Waiting], left: Iterable[Waiting]) -> None:
        """See what has become of the plans that were made for pods. left: those that were deleted before they had
        their slices.
        """
        for pod in left:
            if pod.promise:
                self._turns.missed(pod, pod.promise.node, pod.promise.plan)
        for pod in pods:
            if pod.promise:
                site = self._state.site(pod.promise.node, pod.known.pod.uid)
                pod.promise = self._stands(pod, pod.promise, site) if site else None

    def _stands(self, pod: Waiting, promise: Promise, site: Site) -> Promise | None:
        said, now = site.found.partitioning, self._clock()
        if not promise.ready:
            if said.plan == promise.plan == said.applied:
                return promise._replace(ready=True, until=now + COMING_SECONDS)
            under_way = site.found.waiting and said.plan == promise.plan
            return promise if under_way and self._in_time(pod, promise) else None
        if not site.fits(pod.wanted):
            return None  # other pods came first, which is no fault of this one
        if now < promise.until:
            return promise
        self._turns.missed(pod, promise.node, promise.plan)
        log.info("slices not taken", extra={"node": promise.node, "plan": promise.plan, "pod": pod.known.pod.uid})
        self._waiting.drop(pod, promise.until - COMING_SECONDS)
        return None

    def _restore(self, pods: Sequence[Waiting]) -> None:
        """Slices that bound pods hold and that are not there are a reason for a plan, whoever else waits or not."""
        for name, since in sorted(self._missing.items()):
            site = self._state.site(name)
            if site is None or not site.missing:
                del self._missing[name]
                continue
            if self._clock() < since + MISSING_SECONDS or not self._open(site) or not site.found.placed:
                continue
            site = self._kept(site, pods)
            served = self._servable(self._turns.line(pods), name)[:_AT_ONCE]
            found = cut(site, [{}, *(pod.wanted for pod in served)])
            if isinstance(found, Rejection):
                self._tell(name, f"slices that its pods hold cannot be made again: {found}")
            elif not site.is_cut(found) and not self._refusals.forbid(site, found):
                self._make(site, found, served)

    def _serve(self, pods: Sequence[Waiting]) -> None:
        waiting = [pod for pod in pods if not pod.passed]
        if not waiting:
            return
        names = sorted(frozenset().union(*(pod.nodes for pod in waiting)))
        sites = {name: site for name in names if (site := self._state.site(name)) is not None}
        line = self._turns.line(waiting)
        self._promise_more(line, {name: site for name, site in sites.items() if site.found.waiting})
        finds_some: dict[tuple[frozenset[str], frozenset[tuple[str, int]]], bool] = {}
        left = []
        for pod in line:
            if pod.promise or self._turns.rests(pod):
                continue
            key = (pod.nodes, frozenset(pod.wanted.items()))
            if key not in finds_some:
                finds_some[key] = any(sites[name].fits(pod.wanted) for name in pod.nodes if name in sites)
            if not finds_some[key] and not self._is_kept_some(pod):
                left.append(pod)
        while left:
            pod = left.pop(0)
            if not pod.promise:
                self._plan_for(pod, left, pods)

    def _promise_more(self, line: Sequence[Waiting], under_way: Mapping[str, Site]) -> None:
        """The plans under way may have slices to spare, beside those for the pods that they were made for."""
        for name, site in under_way.items():
            plan, planned = site.found.partitioning.plan, site.found.planned
            if plan is None or planned is None:
                continue
            pods = [pod for pod in line if pod.promise and pod.promise[:2] == (name, plan)]
            others = [pod for pod in self._servable(line, name) if (name, plan) not in pod.missed]
            self._promise(site, planned, plan, [*pods, *others])

    def _servable(self, pods: Iterable[Waiting], node: str) -> list[Waiting]:
        """Those that a plan of this node may serve."""
        return [
            pod
            for pod in pods
            if node in pod.nodes
            and not (pod.promise or pod.passed or self._turns.rests(pod))
            and self._turns.may_cut(pod, node)
        ]

    def _in_time(self, pod: Waiting, promise: Promise) -> bool:
        if self._clock() < promise.until:
            return True
        pod.missed.add((promise.node, promise.plan))
        text = f"plan {promise.plan} of its slices is not in force after {PROMISED_SECONDS:.0f} s"
        self._tell(
            promise.node, f"{text}: mgpu's agent there may not run; pods are planned for other nodes", "PlanLate"
        )
        return False

    def _promise(self, site: Site, slices: Sequence[Slice], plan: int, pods: Sequence[Waiting]) -> None:
        for pod, serves in zip(pods, served(slices, site.used, [pod.wanted for pod in pods]), strict=True):
            if serves and not pod.promise:
                pod.blocked = None
                pod.promise = Promise(site.node.name, plan, self._clock() + PROMISED_SECONDS)

    def _is_kept_some(self, pod: Waiting) -> bool:
        """Whether there are slices that are kept for this pod, where it is nominated."""
        name = pod.known.pod.nominated_node
        site = self._state.site(name, pod.known.pod.uid) if name in pod.nodes else None
        return site is not None and site.fits(pod.wanted)

    def _plan_for(self, pod: Waiting, others: Sequence[Waiting], all_: Sequence[Waiting]) -> None:
        """Make a plan for this pod, on the best node that can have one; of the others it serves whom it can."""
        known, request = pod.known.pod, pod.known.request
        names = sorted(name for name in pod.nodes if self._turns.may_cut(pod, name))
        sites = (self._state.site(name, known.uid) for name in names)
        able = [site for site in sites if site and request and not request.unmet(site.node) and self._open(site)]
        if request is None:
            return
        if pod.blocked is None:
            pod.blocked = self._clock()
        # Other pods may pass a filter again and again without ever being bound.
        patient = self._clock() < pod.blocked + COMING_SECONDS
        with suppress(Rationed), self._rations.call(known.namespace, request, single_too=True) as call:
            for best in best_first(able, pod.wanted, known, self._settings, call.next_budget):
                site = self._kept(best, all_ if patient else [other for other in all_ if other.promise])
                pods = [pod, *self._servable(others, site.node.name)][:_AT_ONCE]
                found = cut(site, [waiting.wanted for waiting in pods], call.last_budget())
                if isinstance(found, Rejection) and not found.proven and call.next_limits() is None:
                    return
                if isinstance(found, Rejection) or site.is_cut(found) or self._refusals.forbid(site, found):
                    continue
                if self._make(site, found, pods):
                    self._turns.made(pod, site.node.name, destroys=not site.made <= {*found})
                    return

    def _undo(self, pods: Sequence[Waiting]) -> None:
        """Make cards whole again whose slices nobody has used for long, and that no pod has been promised."""
        for name in self._idle.names():
            site = self._state.site(name)
            if site is None:
                self._idle.drop(name)
                continue
            self._idle.see(site)
            due = self._idle.due(name)
            if not due or not self._open(site) or site.missing:
                continue
            # As for a plan: a pod that passes filters and is never bound does not keep slices for ever.
            promised = [pod for pod in pods if pod.promise]
            late = self._idle.due(name, COMING_SECONDS) - {s.card for s in self._kept(site, promised).used}
            due = late | (due - {s.card for s in self._kept(site, pods).used})
            slices = tuple(sorted(s for s in site.made if s.card not in due))
            if due and not self._refusals.forbid(site, slices) and self._make(site, slices, ()):
                log.info("idle slices are undone", extra={"node": name, "cards": sorted(due)})

    def _kept(self, site: Site, pods: Sequence[Waiting]) -> Site:
        """As a plan finds it: what pods are about to be bound to stays, and what was made for them a moment ago."""
        claims = [pod.wanted for pod in pods if self._claims(pod, site.node.name)]
        return keeping(site, claims, self._settings.geometries) if claims else site

    def _claims(self, pod: Waiting, node: str) -> bool:
        if pod.promise and pod.promise.ready and pod.promise.node == node:
            return True
        expected = pod.passed and self._clock() < pod.until and not self._turns.rests(pod)
        return expected and node in pod.nodes

    def _open(self, site: Site) -> bool:
        """Whether the node may get a plan now."""
        if site.problem or site.found.waiting:
            return False
        version, until = self._lost.get(site.node.name, (-1, 0.0))
        return version != site.version or self._clock() >= until

    def _make(self, site: Site, slices: tuple[Slice, ...], pods: Sequence[Waiting]) -> bool:
        """False: the node has changed meanwhile, and is looked at again."""
        name, before = site.node.name, site.found.partitioning
        ids = [number for number in (before.plan, before.applied) if number is not None]
        standing = site.found.by_others & {*slices}
        plan = Plan(name, next_plan(max(ids, default=None), int(self._now())), slices, before.plan, standing)
        if not self._state.plan(plan, site.version):
            return False
        metrics.PLANS.labels("made").inc()
        log.info(
            "plan made",
            extra={"node": name, "plan": plan.id, "slices": [f"{s.card}:{s.start} {s.name}" for s in slices]},
        )
        self._promise(site, slices, plan.id, pods)
        return True

    def _write(self) -> None:
        for plan in self._state.plans():
            number, at = self._written.get(plan.node, (-1, 0.0))
            if number == plan.id and self._clock() < at + _SHOWN_SECONDS:
                continue
            self._may_decide()
            try:
                why = self._writer.plan(plan)
            except (ApiError, Unreachable, RetryLater) as error:
                log.warning("plan not written yet: %s", error, extra={"node": plan.node, "plan": plan.id})
                continue
            if why:
                metrics.PLANS.labels("dropped").inc()
                log.warning("plan dropped: %s", why, extra={"node": plan.node, "plan": plan.id})
                self._state.drop_plan(plan)
                site = self._state.site(plan.node)
                self._lost[plan.node] = (site.version if site else -1, self._clock() + 5 * _PAUSE)
            else:
                metrics.PLANS.labels("written").inc()
                log.info("plan written", extra={"node": plan.node, "plan": plan.id})
                self._written[plan.node] = (plan.id, self._clock())
                self._unsaid.add(plan.node)

    def _write_configs(self) -> None:
        """Under MPS the annotation comes first, and the ConfigMap says what that says."""
        unwritten = {p.node for p in self._state.plans() if self._written.get(p.node, (-1,))[0] != p.id}
        for name in sorted(self._unsaid - unwritten):
            site = self._state.site(name)
            if site is None or site.problem or site.found.mode != MPS or site.found.partitioning.plan is None:
                self._unsaid.discard(name)
                continue
            spec = site.found.partitioning.spec
            self._may_decide()
            try:
                if not self.configs.says(name, spec):
                    self._writer.config(name, spec)
            except (ApiError, Unreachable, RetryLater) as error:
                log.warning("sharing configuration not written yet: %s", error, extra={"node": name})
                return
            self._unsaid.discard(name)

    def _tell(self, name: str, message: str, reason: str = "NoPlan") -> None:
        if self._told.get(name) != message:
            self._told[name] = message
            self._warn(node_reference(name), reason, message)
