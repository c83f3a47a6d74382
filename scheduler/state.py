"""The cluster as this process sees it: nodes, cards, GPU pods, and who holds what.

Fed by the watches, read by everything else, under one lock that nobody holds across an API call. All of it is a
cache: the same objects in any order give the same state, but for reservations, which are this process's own.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mgpu.kube.events import pod_reference
from mgpu.model import inventory
from mgpu.model.asks import Ask, Rejection
from mgpu.model.cards import CardState
from mgpu.model.errors import BadObject
from mgpu.model.groups import Seat, where
from mgpu.model.ledger import Holding, Ledger, shares_of, unknown_shares
from mgpu.model.pods import Node, Pod, read_node, read_pod
from mgpu.model.requests import UNBOUNDED, Room
from mgpu.settings import Settings
from scheduler import stock
from scheduler.decisions import Decision, Decisions
from scheduler.gpu_pods import GpuPod, gpu_pod_of, recorded, shares_unknown
from scheduler.inventories import Inventories
from scheduler.matrix import Matrix
from scheduler.nominations import LOWEST, Nominations
from scheduler.outlook import LEARNT, Outlook
from scheduler.placement.wishing import elsewhere
from scheduler.usage import Usage
from scheduler.vector.rows import Table

Raw = Mapping[str, Any]
T = TypeVar("T")
Warn = Callable[[dict[str, Any], str, str], None]
"""(object reference, reason, message): an Event; must return at once."""


@dataclass(frozen=True, slots=True)
class View:
    """A node at one moment, without what one pod holds on it. `version` moves with every change of node and cards.

    room: what is free of its cpu and memory, beside all other pods.
    unkept: its cards without what is kept for pods nominated there (scheduler/nominations.py).
    others, unkept_others: the same of its devices of other types.
    ours: where NVIDIA's plugin gives out cards too (scheduler/stock.py), the indexes of those that mgpu gave out.
    """

    node: Node | None
    cards: tuple[CardState, ...]
    version: int
    room: Room = UNBOUNDED
    unkept: tuple[CardState, ...] = ()
    ours: tuple[int, ...] = ()
    others: tuple[CardState, ...] = ()
    unkept_others: tuple[CardState, ...] = ()


class State:
    """Thread-safe. `undecided` is told of the uid of each pod that is bound without cards (late decision), `freed` of
    each node whose cards came free by something that no core object shows. Both must return at once.
    """

    def __init__(
        self,
        settings: Settings,
        warn: Warn = lambda *_: None,
        undecided: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        freed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings, self._warn, self._tell_undecided, self._tell_freed = settings, warn, undecided, freed
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._nodes: dict[str, Node] = {}
        self._inventories = Inventories(settings, warn)
        self._pods: dict[str, GpuPod] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._undecided: set[str] = set()
        self._decisions = Decisions(settings.scheduler.reservation_seconds, clock)
        self._nominations = Nominations(self._ledger, self._nodes, self._pods, settings)
        self._versions: dict[str, int] = {}
        self._last_version = 0
        self._dirty: set[str] = set()
        self._moved: set[str] = set()
        self._usage = Usage(self._move)
        self.outlook = Outlook(settings)
        self._matrix = Matrix()

    # Fed by the watches.

    def node_changed(self, raw: Raw) -> None:
        node = read_node(raw)
        with self._lock:
            before = self._nodes.get(node.name)
            if before == node:
                return
            self._nodes[node.name] = node
            self._set_cards(node.name)
            if stock.is_there(before) != stock.is_there(node):
                self._settle_all_on(node.name)

    def node_gone(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        with self._lock:
            before = self._nodes.pop(name, None)
            self._set_cards(name)
            if stock.is_there(before):
                self._settle_all_on(name)

    def device_changed(self, raw: Raw) -> None:
        with self._lock:
            before = self._inventories.given(raw["metadata"]["name"])
            name = self._inventories.device_changed(raw)
            if name is None:
                return
            self._set_cards(name)
            given = self._inventories.given(name)
            changed = sorted(uid for uid in {**before, **given} if before.get(uid) != given.get(uid))
            for uid in changed:
                self._follow_given(uid, name)
            if changed:
                self._tell_freed(name)

    def device_gone(self, raw: Raw) -> None:
        with self._lock:
            self._set_cards(self._inventories.device_gone(raw))

    def configmap_changed(self, raw: Raw) -> None:
        with self._lock:
            self._set_cards(self._inventories.configmap_changed(raw))

    def configmap_gone(self, raw: Raw) -> None:
        with self._lock:
            self._set_cards(self._inventories.configmap_gone(raw))

    def pod_changed(self, raw: Raw) -> None:
        pod, meta = read_pod(raw), raw["metadata"]
        known = gpu_pod_of(pod, raw, self._settings)
        with self._lock:
            self._uids[meta["namespace"], meta["name"]] = meta["uid"]
            if known is None:
                self._forget(meta["uid"])
                if pod.node and not pod.ended:
                    self._hold_given(meta["uid"], meta["namespace"], meta["name"], pod.node)
            else:
                if known.ask is not None and meta["uid"] not in self._pods:
                    self.outlook.saw(pod, known.ask)
                self._pods[meta["uid"]] = known
                self._settle(known)
                self._dirty |= self._nominations.follow(known)
            self._count(pod)

    def pod_gone(self, raw: Raw) -> None:
        meta = raw["metadata"]
        with self._lock:
            self._forget(meta["uid"])
            node = (raw.get("spec") or {}).get("nodeName") or ""
            self._hold_given(meta["uid"], meta["namespace"], meta["name"], node)
            self._usage.drop(meta["uid"])
            if self._uids.get((meta["namespace"], meta["name"])) == meta["uid"]:
                del self._uids[meta["namespace"], meta["name"]]

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

    def view(self, node: str, without: str) -> View:
        """The node as pod `without` would find it."""
        with self._lock:
            known, version = self._nodes.get(node), self._versions.get(node, 0)
            room = known.room.less(self._usage.on(node, without)) if known else UNBOUNDED
            priority = self._pods[without].pod.priority if without in self._pods else 0
            cards, others = self._ledger.cards(node, without), self._ledger.others(node, without)
            unkept, unkept_others = (self._nominations.beside(node, s, without, priority) for s in (cards, others))
            ours = stock.given_by_mgpu(self._ledger, node, without) if stock.is_there(known) else ()
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

    def seats(self, ask: Ask, without: str) -> tuple[Seat, ...]:
        """Where the pods of the ask's same-card group are, but for `without`."""
        with self._lock:
            return self._ledger.seats(ask.wishes.same_card, without)

    def group_nodes(self, ask: Ask) -> frozenset[str]:
        """The nodes where a pod of one of the ask's groups is."""
        with self._lock:
            return frozenset(held.node for group in ask.wishes.groups for held in self._ledger.members(group))

    def look(self, names: Sequence[str], pod: Pod, ask: Ask, needed: Callable[[Table], T]) -> T:
        """What `needed` makes of the nodes as this pod would find them (`Matrix.look`): a copy, and quickly."""
        with self._lock:
            self.refresh()
            own = self._ledger.holding(pod.uid)
            different = self._nominations.differing(pod.uid, pod.priority) | ({own.node} if own else set())
            instead = {name: self._cards(name, pod.uid, pod.priority) for name in different}
            return needed(self._matrix.look(names, ask, instead))

    def chosen_by_nvidia(self, names: Sequence[str], pod: Pod, ask: Ask) -> dict[str, Rejection | None]:
        """Of these nodes, those where NVIDIA's plugin chooses for the pod: why it must not go there, None: it may."""
        with self._lock:
            there = [node for name in names if stock.chooses(node := self._nodes.get(name), ask) and node]
            given = {node.name: stock.given_by_mgpu(self._ledger, node.name, pod.uid) for node in there}
            return {n.name: stock.refusal(ask, n, self._ledger.cards(n.name), given[n.name]) for n in there}

    def refresh(self) -> None:
        """Bring the matrix up to date: what has changed since the last call costs some 20 µs a node."""
        with self._lock:
            for name in self._dirty:
                if name in self._nodes:
                    self._matrix.put(self._nodes[name], self._cards(name))
                else:
                    self._matrix.drop(name)
                    self._versions.pop(name, None)
            self._dirty.clear()

    def _cards(self, node: str, uid: str = "", priority: int = LOWEST) -> tuple[CardState, ...]:
        """As a pod of this uid and priority finds them."""
        return self._nominations.beside(node, self._ledger.cards(node, uid), uid, priority)

    # Reservations.

    def decision(self, uid: str) -> Decision | None:
        with self._lock:
            return self._decisions.get(uid)

    def reserve(self, decision: Decision, version: int) -> bool:
        """Hold the cards for the pod, in place of what was reserved for it; False: the node has changed since
        `version`, its same-card group has gone elsewhere, or the pod is bound by now; decide again.
        """
        with self._lock:
            if self._versions.get(decision.node, 0) != version or self.refusal(decision.uid, decision.node):
                return False
            cards = self._ledger.cards(decision.node, decision.uid)
            if elsewhere(decision.ask, cards, self.seats(decision.ask, decision.uid)):
                return False
            ask, who = decision.ask, (decision.uid, decision.namespace, decision.name, decision.node)
            dialect, shares = ask.dialect, shares_of(ask, decision.placement)
            if stock.chooses(self._nodes.get(decision.node), ask):
                dialect, shares = stock.NVIDIA, unknown_shares(ask)
            self._hold(Holding(*who, dialect, shares, bound=False, wishes=ask.wishes))
            self._decisions.put(decision)
            self._usage.put(decision.uid, decision.node, decision.needs)
            return True

    def refusal(self, uid: str, node: str) -> str:
        """Why no cards may be decided for this pod on this node whatever is free there; "": they may."""
        with self._lock:
            pod = self._pods[uid].pod if uid in self._pods else None
            if pod is None or not (pod.node or pod.ended) or (pod.node == node and uid in self._undecided):
                return ""
            return f"the pod is bound to {pod.node} already" if pod.node else f"the pod has {pod.phase.lower()}"

    def renew(self, decision: Decision) -> bool:
        """Give the reservation its full time again; False: it is no longer in force."""
        with self._lock:
            if self.decision(decision.uid) is not decision:
                return False
            self._decisions.put(decision)
            return True

    def cancel(self, decision: Decision) -> None:
        """Release the reservation, if it is still this one."""
        with self._lock:
            if self.decision(decision.uid) is decision:
                self._release(decision.uid)
                self._tell_freed(decision.node)
                self._usage.drop(decision.uid)
                known = self._pods.get(decision.uid)
                if known is not None:
                    self._settle(known)
                    self._count(known.pod)

    def overdue(self) -> tuple[Decision, ...]:
        """Reservations whose pod has not appeared on its node in time, oldest first."""
        with self._lock:
            return self._decisions.overdue()

    # What a pod holds.

    def _settle(self, known: GpuPod) -> None:
        """Make the ledger say of this pod what the API says of it."""
        pod, uid = known.pod, known.pod.uid
        self._undecided.discard(uid)
        if pod.ended:
            self._release(uid)
            return
        if not pod.node:
            return  # what is reserved for it stays so: this may be an event from before the decision
        try:
            shares, unreadable = recorded(known), ""
        except BadObject as error:
            shares, unreadable = None, str(error)
        dialect, given = known.dialect, self._inventories.given(pod.node).get(uid, ())
        if shares is None and (given or stock.chooses(self._nodes.get(pod.node), known.ask)):
            dialect, shares = stock.NVIDIA, stock.held(known.ask, given)
        if shares is None and not pod.started:
            self._await_decision(known, unreadable)
            return
        if shares is None:
            shares = shares_unknown(known)
            self._warn(
                pod_reference(pod.namespace, pod.name, uid),
                "UnknownCards",
                f"runs on {pod.node} without a readable record of its cards; its share is held on every card there"
                + (f": {unreadable}" if unreadable else ""),
            )
        before, held = self._ledger.holding(uid), (uid, pod.namespace, pod.name, pod.node, dialect, shares)
        self._release(uid)
        self._hold(Holding(*held, wishes=known.wishes))
        if before != self._ledger.holding(uid):
            self._warn_of_split(known)

    def _settle_all_on(self, node: str) -> None:
        for known in [known for known in self._pods.values() if known.pod.node == node]:
            self._settle(known)

    def _follow_given(self, uid: str, node: str) -> None:
        """What the node says of the cards that the kubelet gave to this pod has changed."""
        known, held = self._pods.get(uid), self._ledger.holding(uid)
        if known is not None:
            self._settle(known)
        elif self.decision(uid) is None:
            self._release(uid)
            self._hold_given(uid, held.namespace if held else "", held.name if held else "", node)

    def _hold_given(self, uid: str, namespace: str, name: str, node: str) -> None:
        """Of a pod that asks for nothing of ours, or is not known here: as long as the node says so."""
        shares = self._inventories.given(node).get(uid)
        if shares:
            self._hold(Holding(uid, namespace, name, node, stock.NVIDIA, shares))

    def _warn_of_split(self, known: GpuPod) -> None:
        """No decision leads there, but a record can: one written by hand, or an account that was lost."""
        group, pod = known.wishes.same_card, known.pod
        seats = self._ledger.seats(group)
        if len(seats) > 1:
            message = f"{group} is on {where(seats)}; its pods may join it there, and on no further card"
            self._warn(pod_reference(pod.namespace, pod.name, pod.uid), "GroupSplit", message)

    def _await_decision(self, known: GpuPod, unreadable: str) -> None:
        """A pod that is bound without a readable record and has not started: its cards are decided late."""
        pod, uid = known.pod, known.pod.uid
        decision = self.decision(uid)
        if decision is None or decision.node != pod.node:
            self._release(uid)
            if unreadable and known.ask is not None:
                # Until they are decided, whoever wrote the record may rely on any of them.
                shares = unknown_shares(known.ask)
                who = (uid, pod.namespace, pod.name, pod.node)
                self._hold(Holding(*who, known.ask.dialect, shares, wishes=known.wishes))
        if unreadable:
            message = f"the record of its cards cannot be read: {unreadable}"
            self._warn(pod_reference(pod.namespace, pod.name, uid), "UnreadableRecord", message)
        if not pod.deleting:
            self._undecided.add(uid)
            self._tell_undecided(uid)

    def _count(self, pod: Pod) -> None:
        decision = self.decision(pod.uid)
        self._usage.follow(pod, decision.node if decision else "")

    def _forget(self, uid: str) -> None:
        self._release(uid)
        self._undecided.discard(uid)
        self._pods.pop(uid, None)
        self._dirty |= self._nominations.drop(uid)

    def _hold(self, holding: Holding) -> None:
        before = self._ledger.holding(holding.uid)
        if before is not None:
            self._touch(before.node)
        self._ledger.hold(holding)
        self._touch(holding.node)

    def _release(self, uid: str) -> None:
        self._decisions.drop(uid)
        before = self._ledger.release(uid)
        if before is not None:
            self._touch(before.node)

    def _set_cards(self, name: str | None) -> None:
        if name is None:
            return
        node = self._nodes.get(name)
        cards = None if node is None else self._inventories.cards(node)
        before = self._ledger.nodes().get(name, ())
        self._ledger.set_cards(name, cards)
        if inventory.gained(before, cards or ()):
            self._tell_freed(name)
        self.outlook.set_node(name, node, self._ledger.cards(name))
        self._touch(name)
        for uid in self._undecided:
            if self._pods[uid].pod.node == name:
                self._tell_undecided(uid)

    def _touch(self, node: str) -> None:
        self._last_version += 1  # of all nodes: one that comes again has no version that it had before
        self._versions[node] = self._last_version
        self._dirty.add(node)
        self._nominations.touch(node)
        self._move(node)

    def _move(self, node: str) -> None:
        if self._settings.node_policy in LEARNT:
            self._moved.add(node)
