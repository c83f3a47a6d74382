"""Keeps cards free for pods that are nominated to a node (`status.nominatedNodeName`) and not bound yet.

Members of a gang that wait in Permit, and pods for which others were evicted, have a node, but only their status names
it. Without nominations the filter would count on the same card for the next member of the gang.

For pods of the same or a lower priority the filter counts the cards of a nominated pod as taken. kube-scheduler has the
same rule for its own resources (addGENominatedPods, "greater or equal priority"). A binding never waits for a
nomination: a decision avoids the cards of nominated pods if the pod fits on others, and otherwise takes them. If
nominations could reject bindings, two gangs could wait for each other for ever, each with a member nominated where a
member of the other binds.

The engine chooses the cards: first among those that are free now, then as if terminating pods were already gone. A
nominated pod keeps its cards until a binding or a fault takes them; then the engine chooses others. The cluster cache
uses `Nominations` with its lock held.
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

LOWEST_PRIORITY = -(1 << 31)
"""The lowest priority of a pod, since priorities are int32."""

_EFFORT = 20_000
"""The maximum number of steps that the engine takes for all nominated pods of a node, unless there are so many pods
that `_MIN_EFFORT` applies. They take about 5 ms, for which the cache's lock is held. Each pod has an equal part, so
that a pod that is hard to place does not use up the parts of the others. A pod with one container takes far less than
its part."""
_MIN_EFFORT = 400
"""The number of steps that each search for a nominated pod may always take, however many nominated pods there are."""


@dataclass(slots=True)
class _Nominee:
    """A nominated pod.

    Attributes:
        request: The request of the pod. Pods whose request is malformed or cannot be served are not stored.
        holding: The cards that are kept free for it, or None if it does not fit.
    """

    gpu_pod: GpuPod
    request: GpuRequest
    holding: Holding | None = None

    @property
    def order(self) -> tuple[int, str, str, str]:
        """The sort key for the order in which the nominated pods of a node get cards."""
        pod = self.gpu_pod.pod
        return -pod.priority, pod.created, pod.key, pod.uid


class Nominations:
    """Part of the ClusterCache, which holds its lock around every call.

    `pod_changed`, `drop` and `reserved` return the names of the nodes where the change affects the available cards.
    """

    def __init__(self, ledger: Ledger, nodes: Nodes, pods: Pods, settings: Settings) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._pods = pods
        self._settings = settings
        self._node_of: dict[str, str] = {}
        self._on_node: dict[str, dict[str, _Nominee]] = {}
        self._stale: set[str] = set()

    def pod_changed(self, gpu_pod: GpuPod) -> set[str]:
        """Store the nomination of a pod that was added or modified."""
        pod, request = gpu_pod.pod, gpu_pod.request
        before = self._node_of.get(pod.uid)
        if request is None or not pod.nominated_node or pod.node or pod.ended or pod.deleting:
            return self.drop(pod.uid)
        node = pod.nominated_node
        nominee = self._on_node[before][pod.uid] if before else None
        if nominee and node == before and nominee.request == request:
            has_priority_changed = nominee.gpu_pod.pod.priority != pod.priority
            nominee.gpu_pod = gpu_pod
            if not has_priority_changed:
                return set()
        else:
            self.drop(pod.uid)
            self._node_of[pod.uid] = node
            self._on_node.setdefault(node, {})[pod.uid] = _Nominee(gpu_pod, request)
        self.touch(node)
        return {before, node} if before else {node}

    def drop(self, uid: str) -> set[str]:
        """Remove the nomination of a pod, if it has one."""
        node = self._node_of.pop(uid, None)
        if node is None:
            return set()
        del self._on_node[node][uid]
        self.touch(node)
        if not self._on_node[node]:
            del self._on_node[node]
            self._stale.discard(node)
        return {node}

    def reserved(self, uid: str) -> set[str]:
        """Record that a reservation for the pod was made or released, on its nominated node or another one."""
        node = self._node_of.get(uid)
        if node is None:
            return set()
        self.touch(node)
        return {node}

    def touch(self, node: str) -> None:
        """Record that the holdings or cards of the node have changed."""
        if node in self._on_node:
            self._stale.add(node)

    def differing(self, uid: str, priority: int) -> set[str]:
        """Return the nodes where other cards may be available to this pod than to a pod of the lowest priority."""
        return {
            node
            for node, nominees in self._on_node.items()
            if uid in nominees or any(n.gpu_pod.pod.priority < priority for n in nominees.values())
        }

    def group_nodes(self, groups: Collection[Group]) -> set[str]:
        """Return the nodes to which pods of any of these groups are nominated."""
        return {
            node
            for node, nominees in self._on_node.items()
            if any(group in groups for n in nominees.values() for group in n.request.constraints.groups)
        }

    def available(self, node: str, cards: tuple[CardState, ...], uid: str, priority: int) -> tuple[CardState, ...]:
        """Return the states of the cards for a pod, where the cards of nominated pods count as taken.

        A nominated pod does not count if it has a lower priority or already has a holding. It does not count either if
        its same-card group is now elsewhere, because it can only be placed there.

        Args:
            cards: The states of the cards without nominations.
            uid: The UID of the pod, whose own nomination does not count.
            priority: The priority of the pod.
        """
        if node not in self._on_node:
            return cards
        if node in self._stale:
            self._stale.discard(node)
            self._choose(node)
        held = [
            n.holding
            for n in self._on_node[node].values()
            if n.holding is not None
            and n.gpu_pod.pod.uid != uid
            and n.gpu_pod.pod.priority >= priority
            and self._ledger.holding(n.gpu_pod.pod.uid) is None
            and not self._is_group_elsewhere(n, node)
        ]
        return with_holdings(cards, held)

    def _is_group_elsewhere(self, nominee: _Nominee, node: str) -> bool:
        group_cards = self._ledger.group_cards(nominee.request.constraints.same_card, nominee.gpu_pod.pod.uid)
        return same_card_group_rejection(nominee.request, self._ledger.cards(node), group_cards) is not None

    def _choose(self, node: str) -> None:
        """Choose cards for the nominated pods of the node that have none, or whose cards were lost."""
        nominees = self._on_node[node]
        now = (*self._ledger.cards(node), *self._ledger.others(node))
        later = self._ledger.states_without(
            node, [h.uid for h in self._ledger.holdings(node) if self._is_deleting(h.uid)]
        )
        # For each pod, `_place` may run twice, each time with an exact search and a search for any placement.
        effort = max(_MIN_EFFORT, _EFFORT // (4 * len(nominees)))
        limits = Limits(effort, effort)
        for nominee in sorted(nominees.values(), key=lambda n: n.order):
            if nominee.holding is None or not still_fits(nominee.request, nominee.holding.shares, later):
                nominee.holding = self._place(nominee, node, now, limits) or self._place(nominee, node, later, limits)
            if nominee.holding and self._ledger.holding(nominee.holding.uid) is None:
                now = with_holdings(now, [nominee.holding])
                later = with_holdings(later, [nominee.holding])

    def _place(self, nominee: _Nominee, name: str, cards: Sequence[CardState], limits: Limits) -> Holding | None:
        node = self._nodes.get(name)
        if node is None:
            return None
        request, pod = nominee.request, nominee.gpu_pod.pod
        group_cards = self._ledger.group_cards(request.constraints.same_card, pod.uid)
        placement = assess(request, node, cards, self._settings, group_cards=group_cards, limits=limits)
        if not isinstance(placement, Placement):
            return None
        shares = shares_of(request, placement)
        owner = (pod.uid, pod.namespace, pod.name, name)
        return Holding(*owner, request.dialect, shares, bound=False, constraints=request.constraints)

    def _is_deleting(self, uid: str) -> bool:
        gpu_pod = self._pods.get(uid)
        return gpu_pod is not None and gpu_pod.pod.deleting


def with_holdings(cards: Sequence[CardState], holdings: Iterable[Holding]) -> tuple[CardState, ...]:
    """Return the states of the cards as if these pods held their shares, too."""
    states = tuple(cards)
    for holding in holdings:
        states = tuple(_with_holding(state, holding) for state in states)
    return states


def _with_holding(state: CardState, holding: Holding) -> CardState:
    used = holding.uses(state.card)
    if not used.shares:
        return state
    groups = state.groups.union(holding.constraints.groups) if holding.is_known_on(state.card) else state.groups
    return CardState(
        state.card,
        state.core_used + used.core,
        state.memory_used + used.memory,
        state.shares + used.shares,
        groups,
        state.ratio_used + used.ratio,
        state.gpuid,
    )
