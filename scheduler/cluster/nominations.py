"""Pods nominated to a node (`status.nominatedNodeName`) and not bound yet: their cards are kept for them, softly.

Members of a gang that wait in Permit and pods for which others were evicted have been placed, and nothing says so but
their status; so the next member would be counted on the same card. For pods of the same or a lower priority the
filter takes the cards of a nominated pod as taken, which is kube-scheduler's rule for its own resources
(addGENominatedPods, "greater or equal priority"). Bindings are the truth and never wait for a nomination: a decision
leaves these cards alone where the pod fits on others, and takes them where it does not. To refuse it instead could
stop two gangs for ever, each with a member nominated where the other's binds.

Which cards: what the engine chooses, first among those that are free now, then with what is being deleted gone. They
stay the pod's until they are lost to a binding or to a fault; then others are chosen.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.groups import Group
from mgpu.model.ledger import Holding, Ledger, shares_of
from mgpu.settings import Settings
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.pods import Pods
from scheduler.engine import Limits
from scheduler.engine.card_constraints import same_card_group_rejection, still_fits
from scheduler.engine.node_assessment import assess

LOWEST = -(1 << 31)
"""Pod priorities are int32."""

_STEPS = 20_000
"""Of the engine's effort for all nominees of a node together, some 5 ms: the state's lock is held. Each has its part of
it, so that pods that are hard to place leave the others' parts alone; single containers take far less than any part.
"""
_LEAST = 400


@dataclass(slots=True)
class _Nominee:
    """A pod, where it is nominated, and what is kept for it there; None: nothing fits."""

    known: GpuPod
    request: GpuRequest
    kept: Holding | None = None

    @property
    def order(self) -> tuple[int, str, str, str]:
        """Who chooses first."""
        pod = self.known.pod
        return -pod.priority, pod.created, pod.key, pod.uid


class Nominations:
    """Part of the ClusterCache, which holds its lock around every call. It reads from the other parts."""

    def __init__(self, ledger: Ledger, nodes: Nodes, pods: Pods, settings: Settings) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._pods = pods
        self._settings = settings
        self._node_of: dict[str, str] = {}
        self._on_node: dict[str, dict[str, _Nominee]] = {}
        self._stale: set[str] = set()

    def follow(self, known: GpuPod) -> set[str]:
        """The pod as it is now; the nodes where that changes what is kept."""
        pod = known.pod
        wanted = pod.nominated_node if known.request and not (pod.node or pod.ended or pod.deleting) else ""
        before = self._node_of.get(pod.uid, "")
        nominee = self._on_node[before][pod.uid] if before else None
        if wanted and known.request and nominee and wanted == before and nominee.request == known.request:
            changed = nominee.known.pod.priority != pod.priority
            nominee.known = known
            if not changed:
                return set()
        else:
            self.drop(pod.uid)
            if wanted and known.request:
                self._node_of[pod.uid] = wanted
                self._on_node.setdefault(wanted, {})[pod.uid] = _Nominee(known, known.request)
        self.touch(wanted)
        return {before, wanted} - {""}

    def drop(self, uid: str) -> set[str]:
        """The pod is gone; the node where that changes what is kept."""
        node = self._node_of.pop(uid, "")
        if not node:
            return set()
        del self._on_node[node][uid]
        self.touch(node)
        if not self._on_node[node]:
            del self._on_node[node]
            self._stale.discard(node)
        return {node}

    def reserved(self, uid: str) -> set[str]:
        """A reservation for the pod, wherever, was made or given up; the node where that changes what is kept."""
        node = self._node_of.get(uid, "")
        self.touch(node)
        return {node} - {""}

    def touch(self, node: str) -> None:
        """What is held on the node, or its cards, have changed."""
        if node in self._on_node:
            self._stale.add(node)

    def differing(self, uid: str, priority: int) -> set[str]:
        """The nodes that this pod finds otherwise than one of the lowest priority would."""
        return {
            node
            for node, nominees in self._on_node.items()
            if uid in nominees or any(n.known.pod.priority < priority for n in nominees.values())
        }

    def group_nodes(self, groups: Collection[Group]) -> set[str]:
        """The nodes where pods of any of these groups are nominated."""
        return {
            node
            for node, nominees in self._on_node.items()
            if any(group in groups for n in nominees.values() for group in n.request.constraints.groups)
        }

    def beside(self, node: str, cards: tuple[CardState, ...], uid: str, priority: int) -> tuple[CardState, ...]:
        """`cards`, and on them what is kept from a pod of this uid and priority.

        Nothing is kept for a pod whose same-card group has gone to another node: it cannot come here any more.
        """
        if node not in self._on_node:
            return cards
        if node in self._stale:
            self._stale.discard(node)
            self._choose(node)
        nominees = (n for n in self._on_node[node].values() if n.known.pod.uid != uid)
        kept = [n.kept for n in nominees if n.kept and n.known.pod.priority >= priority and not self._barred(n, node)]
        return _with(cards, [held for held in kept if self._ledger.holding(held.uid) is None])

    def _barred(self, nominee: _Nominee, node: str) -> bool:
        seats = self._ledger.seats(nominee.request.constraints.same_card, nominee.known.pod.uid)
        return same_card_group_rejection(nominee.request, self._ledger.cards(node), seats) is not None

    def _choose(self, node: str) -> None:
        now = (*self._ledger.cards(node), *self._ledger.others(node))
        later = self._ledger.once_gone(node, [h.uid for h in self._ledger.holdings(node) if self._leaves(h.uid)])
        part = max(_LEAST, _STEPS // (4 * len(self._on_node[node])))
        limits = Limits(part, part)
        for nominee in sorted(self._on_node[node].values(), key=lambda n: n.order):
            if nominee.kept is None or not still_fits(nominee.request, nominee.kept.shares, later):
                nominee.kept = self._place(nominee, node, now, limits) or self._place(nominee, node, later, limits)
            if nominee.kept and self._ledger.holding(nominee.kept.uid) is None:
                now, later = _with(now, [nominee.kept]), _with(later, [nominee.kept])

    def _place(self, nominee: _Nominee, node: str, cards: Sequence[CardState], limits: Limits) -> Holding | None:
        known, request, pod = self._nodes.get(node), nominee.request, nominee.known.pod
        if known is None:
            return None
        seats = self._ledger.seats(request.constraints.same_card, pod.uid)
        found = assess(request, known, cards, self._settings, seats=seats, limits=limits)
        if not isinstance(found, Placement):
            return None
        who = (pod.uid, pod.namespace, pod.name, node)
        return Holding(*who, request.dialect, shares_of(request, found), bound=False, constraints=request.constraints)

    def _leaves(self, uid: str) -> bool:
        known = self._pods.get(uid)
        return known is not None and known.pod.deleting


def _with(cards: Sequence[CardState], held: Iterable[Holding]) -> tuple[CardState, ...]:
    """The cards with this on them too."""
    found = tuple(cards)
    for holding in held:
        found = tuple(_added(state, holding) for state in found)
    return found


def _added(state: CardState, holding: Holding) -> CardState:
    used = holding.uses(state.card)
    if not used.shares:
        return state
    groups = state.groups.union(holding.constraints.groups) if holding.is_known_on(state.card) else state.groups
    core, memory, ratio = state.core_used + used.core, state.memory_used + used.memory, state.ratio_used + used.ratio
    return CardState(state.card, core, memory, state.shares + used.shares, groups, ratio, state.gpuid)
