"""The cluster as this process sees it: nodes, cards, GPU pods, and who holds what.

Fed by the watches, read by everything else, under one lock that nobody holds across an API call. All of it is a
cache: the same objects in any order give the same state, but for reservations, which are this process's own.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.dialects.watched_pods import bounded, fingerprint
from mgpu.kube.events import pod_reference
from mgpu.model import device_object
from mgpu.model.cards import CardState
from mgpu.model.compute_resources import UNBOUNDED
from mgpu.model.device_checkpoints import OTHERS
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.groups import Group, Seat
from mgpu.model.ledger import Holding
from mgpu.model.pods import Node, Pod, read_node, read_pod
from mgpu.settings import Settings
from scheduler.cluster.devices import Given, Inventories
from scheduler.cluster.forecast import LEARNT, Outlook
from scheduler.cluster.gpu_pods import GpuPod, gpu_pod_of, kept, left_by, occupies, renewed
from scheduler.cluster.holdings import Accounts
from scheduler.cluster.mtgpupod_holdings import MtgpuPods
from scheduler.cluster.node_agents import Agents, brief, detailed
from scheduler.cluster.node_usage import Usage
from scheduler.cluster.node_view import View
from scheduler.cluster.nominations import Nominations
from scheduler.cluster.partitionable_nodes import Sites
from scheduler.cluster.reservations import Decision, Decisions
from scheduler.cluster.snapshots import Snapshots
from scheduler.cluster.visible_cards import Shown
from scheduler.engine import nvidia_plugin
from scheduler.engine.arrays.node_table import Table
from scheduler.engine.constraints import elsewhere
from scheduler.engine.nvidia_plugin import GivenByMgpu

Raw = Mapping[str, Any]
Warn = Callable[[dict[str, Any], str, str], None]
"""(object reference, reason, message): an Event; must return at once."""


class ClusterCache:
    """Thread-safe. `undecided` is told of the uid of each pod that is bound without cards (late decision); of each node
    `freed`, whose cards came free by what no core object shows, `left`, where room may have come by one (a pod, a
    label), `recut`, whose cards may be cut and where anything of them has changed, `touched`, where anything has.
    All of them must return at once.
    """

    def __init__(
        self,
        settings: Settings,
        warn: Warn = lambda *_: None,
        undecided: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        freed: Callable[[str], None] = lambda _: None,
        recut: Callable[[str], None] = lambda _: None,
        touched: Callable[[str], None] = lambda _: None,
        left: Callable[[str], None] = lambda _: None,
        records: RecordVerifier = UNSEALED,
    ) -> None:
        self.records, self._warn = records, warn
        self._settings, self._tell_undecided, self._tell_freed, self._tell_left = settings, undecided, freed, left
        self._tell_recut, self._tell_touched, self._closed = recut, touched, False
        self._lock = threading.RLock()
        self._nodes: dict[str, Node] = {}
        self._inventories = Inventories(settings, warn)
        self._pods: dict[str, GpuPod] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._decisions = Decisions(settings.scheduler.reservation_seconds, clock)
        self._accounts = Accounts(
            self._nodes, self._pods, self._inventories.given, self._decisions, self._touch, undecided, warn, clock
        )
        self._ledger, self._undecided = self._accounts.ledger, self._accounts.undecided
        self._nominations = Nominations(self._ledger, self._nodes, self._pods, settings)
        self._shown = Shown(self._nodes, self._ledger, self._nominations)
        self._moved: set[str] = set()
        self._usage = Usage(self._move)
        self._ours = GivenByMgpu(self._ledger)
        own = settings.scheduler
        self._agents = Agents(own.namespace if own.require_ready_agents else None, freed)
        self._slices = self._inventories.slices
        self.sites = Sites(self._lock, self.view, self._inventories, self._ledger, self._replanned, settings)
        self.mtgpus = MtgpuPods(
            self._lock, self._nodes, self._accounts, self._shown.version, self._ours.on, freed, records, warn, touched
        )
        self.snapshots = Snapshots(
            self._lock, self._nodes, self._pods, self._inventories, self._ledger, self._shown.versions
        )
        self.outlook = Outlook(settings)

    # Fed by the watches.

    def node_changed(self, raw: Raw) -> None:
        node = read_node(raw)
        with self._lock:
            if (before := self._nodes.get(node.name)) == node:
                return
            self._nodes[node.name] = node
            given, waited = self._inventories.given(node.name), self._slices.of(node.name).waiting
            self._slices.node_changed(node)
            self._set_cards(node.name)
            self._follow_given(node.name, given)
            if waited and not self._slices.of(node.name).waiting:
                self._tell_freed(node.name)  # those that waited may ask again, and have been refused by what was known
            self._follow_who_cuts(node.name, before)
            if before is not None and before.labels != node.labels:
                self._tell_left(node.name)

    def node_gone(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        with self._lock:
            before, given = self._nodes.pop(name, None), self._inventories.given(name)
            self._inventories.node_gone(name)
            self.sites.drop_node(name)
            self._set_cards(name)
            self._follow_given(name, given)
            self._follow_who_cuts(name, before)

    def device_changed(self, raw: Raw) -> None:
        with self._lock:
            before = self._inventories.given(raw["metadata"]["name"])
            name = self._inventories.device_changed(raw)
            if name is not None:
                self._set_cards(name)
                self._follow_given(name, before)

    def device_gone(self, raw: Raw) -> None:
        with self._lock:
            name = raw["metadata"]["name"]
            given = self._inventories.given(name)
            self._set_cards(self._inventories.device_gone(raw))
            if name not in self._nodes:
                self._inventories.node_gone(name)
                self._follow_given(name, given)

    def configmap_changed(self, raw: Raw) -> None:
        with self._lock:
            self._set_cards(self._inventories.configmap_changed(raw))

    def configmap_gone(self, raw: Raw) -> None:
        with self._lock:
            self._set_cards(self._inventories.configmap_gone(raw))

    def pod_changed(self, raw: Raw) -> None:
        meta = raw["metadata"]
        # The watch alone changes a pod here: what was read of it before may be looked at without the lock, and to read
        # it again, which may take milliseconds, or to verify a seal does not hold anybody up.
        seen = self._pods.get(meta["uid"])
        same = seen is not None and seen.said == fingerprint(raw)
        if seen is not None and same:
            found: GpuPod | None = renewed(seen, raw)
            pod, known = seen.pod, found
        else:
            pod = read_pod(bounded(raw))
            found = gpu_pod_of(pod, raw, self._settings, self.records, seen.judged if seen else None)
            # What else reads of the pod keeps nothing of it but sums and names.
            pod, known = (pod, None) if found is None else (found.pod, replace(kept(found), said=fingerprint(raw)))
        with self._lock:
            self._agents.pod_changed(raw)
            self._uids[meta["namespace"], meta["name"]] = meta["uid"]
            before = self._pods.get(meta["uid"])
            if known is None:
                self._forget(meta["uid"])
                self._accounts.follow_stranger(pod, meta["uid"])
            else:
                if found is not None and found.request is not None and meta["uid"] not in self._pods:
                    self.outlook.saw(known.pod, found.request)
                self._pods[meta["uid"]] = known
                self._settle(known)
                self._shown.mark(self._nominations.follow(known))
                self._tell_of_finding(known, before)
            self._count(pod)
            self.sites.follow(pod)
            if not same:
                self.mtgpus.pod_changed(pod, raw)
            for node in self._nodes.keys() & left_by(before, known):
                self._tell_left(node)

    def pod_gone(self, raw: Raw) -> None:
        meta = raw["metadata"]
        with self._lock:
            known = self._pods.get(meta["uid"])
            self._agents.pod_gone(meta["uid"])
            self._forget(meta["uid"])
            self._decisions.bury(meta["uid"])
            # Before `gone`, which finds out whether its node has reported it already.
            self.mtgpus.pod_gone(meta["uid"])
            self._accounts.gone(meta["uid"], known)
            self._usage.drop(meta["uid"])
            self.sites.drop_pod(meta["uid"])
            if self._uids.get((meta["namespace"], meta["name"])) == meta["uid"]:
                del self._uids[meta["namespace"], meta["name"]]
            for node in self._nodes.keys() & left_by(known, None):
                self._tell_left(node)

    def mtgpupod_changed(self, raw: Raw) -> None:
        self.mtgpus.changed(raw)

    def mtgpupod_gone(self, raw: Raw) -> None:
        self.mtgpus.gone(raw)

    # Read by the deciders.

    def uid_of(self, namespace: str, name: str) -> str | None:
        """The uid of the pod of this name, GPU pod or not; None: not known here (yet)."""
        with self._lock:
            return self._uids.get((namespace, name))

    def gpu_pod(self, uid: str) -> GpuPod | None:
        with self._lock:
            return self._pods.get(uid)

    def undecided(self) -> tuple[str, ...]:
        """The uids of the pods that are bound without cards and have not started, in the order of their names."""
        with self._lock:
            return tuple(sorted(self._undecided, key=lambda uid: (self._pods[uid].pod.key, uid)))

    def is_undecided(self, uid: str) -> bool:
        with self._lock:
            return uid in self._undecided

    def nodes(self, names: Iterable[str]) -> list[Node | None]:
        """The nodes of these names; None: not known."""
        with self._lock:
            return list(map(self._nodes.get, names))

    def without_agent(self, names: Sequence[str]) -> dict[str, str]:
        """Return those of the nodes whose mgpu agent cannot start containers now, each with the reason."""
        with self._lock:
            silent = self._agents.silent
            return {name: brief(silent[name]) for name in names if name in silent} if silent else {}

    def agent_problem(self, node: str) -> str | None:
        """Return why the mgpu agent of the node cannot start containers now; None where it can, or none is known."""
        with self._lock:
            pod = self._agents.silent.get(node)
            return None if pod is None else detailed(pod)

    def remnant_problem(self, pod: Pod) -> str | None:
        """Return the reason why this pod gets no cards while deleted pods of its namespace still run, or None.

        An occupy pod does: it takes a card for MtgpuPods of other namespaces, which their controller has checked.
        Otherwise one pod of kube-system that still runs would hold up the MtgpuPods of all namespaces.
        """
        if mtgpu.occupied(pod) is not None:
            return None
        with self._lock:
            return self._accounts.remnants.problem(pod.namespace)

    def nodes_without_agent(self) -> int:
        """Return how many nodes are refused because their mgpu agent is not ready."""
        with self._lock:
            return len(self._agents.silent.keys() & self._nodes.keys())

    def view(self, node: str, without: str, gpuid: str = "") -> View:
        """The node as pod `without` would find it; gpuid: for which that one occupies a card there."""
        with self._lock:
            known, version = self._nodes.get(node), self._shown.version(node)
            room = known.room.less(self._usage.on(node, without)) if known else UNBOUNDED
            priority = self._pods[without].pod.priority if without in self._pods else 0
            cards, others = self._shown.cards(node, without, gpuid), self._ledger.others(node, without)
            unkept, unkept_others = (self._nominations.beside(node, s, without, priority) for s in (cards, others))
            ours = self._ours.on(node, without, gpuid) if nvidia_plugin.is_there(known) else ()
            return View(known, cards, version, room, unkept, ours, others, unkept_others)

    def occupied(self, node: str, without: str) -> tuple[View, tuple[tuple[Holding, GpuPod], ...]]:
        """The same, and at the same moment which of the pods that are known here hold its cards."""
        with self._lock:
            held = (h for h in self._ledger.holdings(node) if h.uid != without and h.uid in self._pods)
            return self.view(node, without), tuple((h, self._pods[h.uid]) for h in held)

    def nodes_with_cards(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(name for name, cards in self._ledger.nodes().items() if cards))

    def seen(self, node: str) -> tuple[tuple[CardState, ...], tuple[Holding, ...]] | None:
        """The GPUs of a node and who holds them, at one moment; None: there is no such node."""
        with self._lock:
            return (self._ledger.cards(node), self._ledger.holdings(node)) if node in self._nodes else None

    def moved(self) -> list[tuple[str, View]]:
        """The nodes whose cards or room have changed since the last call; kept only for a `nodePolicy` that asks."""
        with self._lock:
            moved = [(name, self.view(name, "")) for name in self._moved]
            self._moved.clear()
            return moved

    def holdings(self, node: str | None = None) -> tuple[Holding, ...]:
        with self._lock:
            return self._ledger.holdings(node)

    def seats(self, request: GpuRequest, without: str) -> tuple[Seat, ...]:
        """Where the pods of the ask's same-card group are, but for `without`."""
        with self._lock:
            return self._ledger.seats(request.constraints.same_card, without)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        """The nodes where a pod of one of the ask's groups is, or is nominated."""
        groups = request.constraints.groups
        if not groups:
            return frozenset()
        with self._lock:
            held = (held.node for group in groups for held in self._ledger.members(group))
            return frozenset(held) | self._nominations.group_nodes(groups)

    def table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> Table:
        """Return a snapshot of the nodes of these names as this pod finds them."""
        with self._lock:
            return self._shown.table(names, pod, request)

    def chosen_by_nvidia(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> dict[str, Rejection | None]:
        """Of these nodes, those where NVIDIA's plugin chooses for the pod: why it must not go there, None: it may."""
        found: list[tuple[Node, tuple[CardState, ...], tuple[int, ...]]] = []
        with self._lock:
            for name in names:
                node = self._nodes.get(name)
                if node is not None and nvidia_plugin.is_there(node):
                    ours = self._ours.on(name, pod.uid, occupies(pod, name))
                    found.append((node, self._ledger.cards(name), ours))
        return {node.name: nvidia_plugin.refusal(request, node, cards, ours) for node, cards, ours in found}

    def refresh(self) -> None:
        """Bring the arrays up to date: what has changed since the last call costs some 20 µs a node."""
        with self._lock:
            self._shown.refresh()

    # Reservations.

    def decision(self, uid: str) -> Decision | None:
        with self._lock:
            return self._decisions.get(uid)

    def reserve(self, decision: Decision, version: int) -> bool:
        """Hold the cards for the pod, in place of what was reserved for it; False: the node has changed since
        `version`, its same-card group has gone elsewhere, or the pod is bound by now; decide again.
        """
        with self._lock:
            moved = self._closed or self._shown.version(decision.node) != version
            if moved or self.refusal(decision.uid, decision.node):
                return False
            cards = self._ledger.cards(decision.node, decision.uid)
            if elsewhere(decision.request, cards, self.seats(decision.request, decision.uid)):
                return False
            self._accounts.reserve(decision)
            self._shown.mark(self._nominations.reserved(decision.uid))
            self._usage.put(decision.uid, decision.node, decision.needs)
            return True

    def refusal(self, uid: str, node: str) -> str:
        """Why no cards may be decided for this pod on this node whatever is free there; "": they may."""
        with self._lock:
            pod = self._pods[uid].pod if uid in self._pods else None
            if pod is None and self._decisions.is_gone(uid):
                return "the pod has been deleted"
            if pod is None or not (pod.node or pod.ended) or (pod.node == node and uid in self._undecided):
                return ""
            return f"the pod is bound to {pod.node} already" if pod.node else f"the pod has {pod.phase.lower()}"

    def renew(self, decision: Decision) -> bool:
        """Give the reservation its time again; False: it is no longer in force."""
        with self._lock:
            if self._closed or self.decision(decision.uid) is not decision:
                return False
            self._decisions.put(decision)
            return True

    def keep(self, decision: Decision) -> None:
        """Keep the reservation, if it is still this one, for its full time: its pod may well be bound."""
        with self._lock:
            if not self._closed and self.decision(decision.uid) is decision:
                self._decisions.keep(decision)

    def pause(self, uid: str) -> float:
        """Seconds until cards may be reserved again for a pod whose bindings failed for long; 0: now."""
        with self._lock:
            return self._decisions.pause(uid)

    def cancel(self, decision: Decision) -> None:
        """Release the reservation, if it is still this one."""
        with self._lock:
            if self.decision(decision.uid) is decision:
                self._accounts.release(decision.uid)
                self._shown.mark(self._nominations.reserved(decision.uid))
                self._tell_freed(decision.node)
                self._usage.drop(decision.uid)
                if (known := self._pods.get(decision.uid)) is not None:
                    self._accounts.settle(known)
                    self._count(known.pod)

    def close(self) -> None:
        """Reserve and renew nothing more: who has found that he may decide, and has not yet, is too late."""
        with self._lock:
            self._closed = True

    def lands(self, seconds: float) -> bool:
        """Whether not all that was reserved in the last so many seconds has been seen on its node."""
        with self._lock:
            return self._decisions.made_within(seconds)

    def overdue(self) -> tuple[Decision, ...]:
        """Reservations whose pod has not appeared on its node in time, oldest first."""
        with self._lock:
            return self._decisions.overdue()

    def _tell_of_finding(self, known: GpuPod, before: GpuPod | None) -> None:
        """Once for each finding, not with every event of its pod."""
        finding, pod = known.finding, known.pod
        if finding is not None and not pod.ended and (before is None or before.finding != finding):
            self._warn(pod_reference(pod.namespace, pod.name, pod.uid), finding.reason, finding.message)

    def _count(self, pod: Pod) -> None:
        self._usage.follow(pod, decision.node if (decision := self.decision(pod.uid)) else "")

    def _follow_given(self, node: str, before: Given) -> None:
        """What the node says that it gave out itself may have changed."""
        given = self._inventories.given(node)
        changed = sorted(uid for uid in {**before, **given} if before.get(uid) != given.get(uid))
        for uid in changed:
            self._accounts.follow_given(uid, node)
        if OTHERS in changed:
            self._accounts.settle_all_on(node)  # what is said of pods that are not listed
        if changed:
            self._tell_freed(node)

    def _follow_who_cuts(self, name: str, before: Node | None) -> None:
        was, now = nvidia_plugin.who_cuts(before), nvidia_plugin.who_cuts(self._nodes.get(name))
        if was != now:
            self._accounts.settle_all_on(name)
        if was[1] and not now[1]:
            self._tell_recut(name)  # what is kept of it is of no use any more

    def _settle(self, known: GpuPod) -> None:
        had = self._accounts.has_cards(known.pod.uid)
        self._accounts.settle(known)
        if known.request is not None and not had and self._accounts.has_cards(known.pod.uid):
            self.outlook.placed(known.pod, known.request)

    def _forget(self, uid: str) -> None:
        self._accounts.forget(uid)
        self.outlook.gone(uid)
        self._pods.pop(uid, None)
        self._shown.mark(self._nominations.drop(uid))

    def _set_cards(self, name: str | None) -> None:
        if name is None:
            return
        node = self._nodes.get(name)
        cards = None if node is None else self._inventories.cards(node)
        before = self._ledger.nodes().get(name, ())
        self._ledger.set_cards(name, cards)
        if device_object.gained(before, cards or ()):
            self._tell_freed(name)
        self.outlook.set_node(name, node, self._ledger.cards(name))
        self._touch(name)
        for uid in self._undecided:
            if self._pods[uid].pod.node == name:
                self._tell_undecided(uid)

    def _replanned(self, node: str, *, freed: bool) -> None:
        self._set_cards(node)
        if freed:
            self._tell_freed(node)

    def _touch(self, node: str, group: Group | None = None) -> None:
        """group: a same-card group has come there or has gone, on which depends what is kept for its pods elsewhere."""
        self._shown.touch(node)
        self._ours.touch(node)
        self._nominations.touch(node)
        if group is not None:
            self._shown.mark(self._nominations.group_nodes((group,)))
        self._move(node)
        if self._slices.problem(node) or self._slices.of(node).mode:
            self._tell_recut(node)
        self._tell_touched(node)

    def _move(self, node: str) -> None:
        if self._settings.node_policy in LEARNT:
            self._moved.add(node)
