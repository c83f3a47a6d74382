"""Finds out how many members of a waiting gang are placed, and which member does not fit beside them, and why.

The web page, `mgpu inspect` and `mgpu explain` call this module. Nothing is decided or reserved. The members are placed
one after the other in memory, with the engine and in the order of nodes that `decisions.gang_places` uses, so that the
answer is the one that a scheduler would get if it asked for all members now.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from mgpu.model.gangs import GangName, gang_name
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding, shares_of
from mgpu.model.pods import Pod
from mgpu.presentation.gang_views import GangView, Outlook
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, scheduling_order
from scheduler.decisions.decider import held_group_cards
from scheduler.decisions.filter import Filter, Filtered
from scheduler.decisions.gang_places import SPARE_NODES, order_nodes, rejection_beside
from scheduler.engine import FULL, Limits, nvidia_plugin
from scheduler.engine.node_assessment import assess

_MOST_REASONS = 2
_MOST_SEARCHES = 8
"""The most different requests of the members of a gang that is examined. Each takes a look at all nodes, and users
choose how many members differ. Most gangs have one or two."""


class GangOutlooks:
    """Describes the gangs of a cluster that are not complete.

    Args:
        filter_: A filter that may be used for this purpose (`decisions.effort_budgets`).
        limits: The limits of the search for one member on one node.
        pace: A function that is called after each such search. Background work sleeps in it.
    """

    def __init__(
        self,
        state: ClusterCache,
        filter_: Filter,
        settings: Settings,
        limits: Limits = FULL,
        pace: Callable[[], object] = lambda: None,
    ) -> None:
        self._state = state
        self._filter = filter_
        self._settings = settings
        self._limits = limits
        self._pace = pace

    def incomplete(self, pods: Iterable[GpuPod]) -> list[GangView]:
        """Return the gangs of these pods that are not complete and have GPU pods that wait, sorted by name.

        The views have no outlook. Gangs whose size is unknown are among them.
        """
        named: dict[GangName, Pod] = {}
        for gpu_pod in pods:
            pod = gpu_pod.pod
            name = gang_name(pod)
            if name is not None and not pod.node and not pod.ended:
                named.setdefault(name, pod)
        ordered = sorted(named, key=lambda name: (name.namespace, name.name, name.source))
        views = (self._view(name, named[name]) for name in ordered)
        return [view for view in views if view is not None]

    def of(self, pod: Pod) -> GangView | None:
        """Return the gang of a pod without its outlook, or None if the pod has no gang, or its gang is complete."""
        name = gang_name(pod)
        return self._view(name, pod) if name else None

    def with_outlook(self, view: GangView, names: Sequence[str]) -> GangView:
        """Return the view with the outlook on these nodes.

        Without a known size, and for a gang whose members have many different requests, there is no outlook.

        Raises:
            RetryLater: Too many other long calls wait.
        """
        if view.needed is None:
            return view
        held: list[Holding] = []
        searches: dict[tuple[GpuRequest | None, int], _Search] = {}
        misfit: tuple[str, str] | None = None
        members = self._waiting(view.name, self._state.reservations.placed_members(view.name))
        if len({(gpu_pod.request, gpu_pod.pod.priority) for gpu_pod in members}) > _MOST_SEARCHES:
            return view
        for gpu_pod in members:
            if gpu_pod.pod.gated:
                continue
            if view.placed + len(held) >= view.needed:
                break
            # Members with an equal request and priority share a search, since a node that has no room for one member
            # has none for the next: what the members hold only grows.
            key = gpu_pod.request, gpu_pod.pod.priority
            if key not in searches:
                searches[key] = _Search(self._filter, gpu_pod, names)
                self._pace()
            holding = self._place(gpu_pod, searches[key], held)
            if holding is not None:
                held.append(holding)
            elif misfit is None:
                misfit = gpu_pod.pod.name, searches[key].reason()
        if misfit is None or view.placed + len(held) >= view.needed:
            return replace(view, outlook=Outlook(len(held)))
        return replace(view, outlook=Outlook(len(held), *misfit))

    def _view(self, name: GangName, pod: Pod) -> GangView | None:
        """Return the gang of a pod, or None if it is complete, it is no gang, or none of its GPU pods waits."""
        needed = self._state.gangs.min_count(name, pod)
        if needed is not None and needed < 2:
            return None
        placed = self._state.reservations.placed_members(name)
        if needed is not None and len(placed) >= needed:
            return None
        pods = [gpu_pod.pod for gpu_pod in self._waiting(name, placed)]
        waiting = tuple(pod.name for pod in pods if not pod.gated)
        gated = tuple(pod.name for pod in pods if pod.gated)
        return GangView(name, needed, len(placed), waiting, gated) if pods else None

    def _waiting(self, name: GangName, placed: Collection[str]) -> list[GpuPod]:
        """Return the GPU pods of a gang that are not placed, in the order in which a scheduler tries them."""
        members = self._state.gangs.members(name)
        found = (gpu_pod for uid in members if uid not in placed and (gpu_pod := self._state.gpu_pod(uid)) is not None)
        return sorted((g for g in found if not g.pod.node and not g.pod.ended), key=scheduling_order)

    def _place(self, gpu_pod: GpuPod, search: "_Search", held: Sequence[Holding]) -> Holding | None:
        """Return what the pod would hold beside the other members on the best node, or None if it fits nowhere."""
        request = gpu_pod.request
        if request is None:
            return None
        for node in search.candidates(held):
            result = self._assess(gpu_pod, request, node, held)
            self._pace()
            if isinstance(result, Rejection):
                search.reject(node, result)
                continue
            pod = gpu_pod.pod
            shares = shares_of(request, result)
            return Holding(
                *(pod.uid, pod.namespace, pod.name, node, request.dialect, shares),
                bound=False,
                constraints=request.constraints,
            )
        return None

    def _assess(
        self, gpu_pod: GpuPod, request: GpuRequest, node: str, held: Sequence[Holding]
    ) -> Placement | Rejection:
        uid = gpu_pod.pod.uid
        snapshot = self._state.node_snapshot(node, uid).beside(node, held)
        if snapshot.node is None:
            return Rejection(RejectionKind.UNKNOWN_NODE, f"node {node} is not known to mgpu (yet)")
        if nvidia_plugin.chooses_cards(snapshot.node, request):
            rejection = nvidia_plugin.rejection(request, snapshot.node, snapshot.cards, snapshot.mgpu_cards)
            return rejection or Placement(())
        group_cards: tuple[GroupCard, ...] = (
            *self._state.group_cards(request, uid),
            *(card for holding in held for card in held_group_cards(request, holding)),
        )
        cards = (*snapshot.available_cards, *snapshot.available_other_devices)
        return assess(request, snapshot.node, cards, self._settings, group_cards=group_cards, limits=self._limits)


class _Search:
    """The nodes on which members with one request may still fit, and why they do not fit on the others."""

    def __init__(self, filter_: Filter, gpu_pod: GpuPod, names: Sequence[str]) -> None:
        self._filter = filter_
        self._gpu_pod = gpu_pod
        self._found: Filtered = filter_.filter(gpu_pod, names)
        self._found.evaluation = None  # While it exists, a change of any node copies the arrays of all nodes.
        self._left = order_nodes(filter_, gpu_pod, self._found.passed, ())
        self._in_vain = 0

    def candidates(self, held: Sequence[Holding]) -> list[str]:
        """Return the nodes to try, the best first, and not more than the filter for gangs tries."""
        if self._gpu_pod.constraints.same_card is not None:
            self._left = order_nodes(self._filter, self._gpu_pod, self._left, held)
        return self._left[: max(0, len(held) + SPARE_NODES - self._in_vain)]

    def reject(self, node: str, rejection: Rejection) -> None:
        self._left.remove(node)
        self._in_vain += 1
        self._found.reject((node,), rejection_beside(rejection))

    def reason(self) -> str:
        """Return the most frequent reasons, each with the number of its nodes."""
        nodes_of: dict[str, int] = {}
        for node, text in (*self._found.failed.items(), *self._found.hopeless.items()):
            # A reason that names its node must not be one of its own for each of thousands of nodes.
            text = text.replace(f"node {node} ", "the node ")
            nodes_of[text] = nodes_of.get(text, 0) + 1
        if self._left:
            nodes_of["not examined for a member of a gang"] = len(self._left)
        ordered = sorted(nodes_of.items(), key=lambda row: (-row[1], row[0]))
        texts = [f"{count:,} node{'s' * (count != 1)}: {text}" for text, count in ordered[:_MOST_REASONS]]
        rest = ordered[_MOST_REASONS:]
        more = f" and {len(rest)} other reason{'s' * (len(rest) != 1)}" if rest else ""
        return f"{', '.join(texts)}{more}" if texts else "there are no nodes"
