"""Keeps the pods of a burst from passing the filter for the same last card.

kube-scheduler calls `filter` and `prioritize` for a pod, chooses a node, and goes on with the next pod while the first
one is being bound. The cards are decided only when the API server admits the Binding, some milliseconds later. Without
this module the next pods pass for the same card meanwhile; all but one of their bindings are refused, and a refused pod
backs off for seconds. So a pod is *in flight* from the answer that determines its node until its cards are decided. The
filter for other pods counts what it will probably hold there as taken. `api.extender` calls this module.

Bindings arrive in another order than the filter's calls. If the first of two pods took the cards that are left for the
second one, either could be refused. So `Decider` gives a pod the cards that were expected for it if they are still
available, and searches otherwise. Cards are expected only where several pods in flight may get the same node.

What must hold:

- A pod in flight keeps no cards from the decision for another pod. It affects only which nodes the filter names.
- If a pod fits only on nodes that pods in flight may fill, its filter waits for their decisions, at most
  `_WAIT_SECONDS`, and without a lock. The pods for which it has waited in vain are no longer in flight. So a wrong
  expectation, for example of a pod whose scheduler gives it up, costs one such wait and a different node.
- A pod that fits nowhere is rejected by what is decided, so that its evictions are those of any other pod.
- The time for which a pod is in flight and the number of such pods are bounded.

Members of gangs have tentative places instead (`decisions.gang_filter`), and nominated pods their nominations. Pods
with several GPU containers, and those that request slices or other devices, are not considered: to find their cards may
take a long search.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Placement
from mgpu.model.ledger import Holding
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.nominations import with_holdings
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never
from scheduler.decisions.filter import Filtered
from scheduler.decisions.gang_filter import GangFilter
from scheduler.decisions.in_flight import Flight, PodsInFlight
from scheduler.engine import nvidia_plugin
from scheduler.engine.node_assessment import assess
from scheduler.engine.partitioning.partitionable_node import requested_slices

_WAIT_SECONDS = 0.1
"""The longest time for which a call of the filter waits for decisions. kube-scheduler schedules no pod meanwhile."""
_MAX_NODES = 4
"""The most nodes with the same points on which a pod is expected. With more, two pods rarely get the same node."""


class InFlightFilter:
    """Filters for kube-scheduler beside the pods in flight. Thread-safe.

    Args:
        pods: The filter that knows nothing of pods in flight.
        flights: The pods in flight. The decider must have the same object.
    """

    def __init__(
        self,
        state: ClusterCache,
        pods: GangFilter,
        decider: Decider,
        settings: Settings,
        flights: PodsInFlight,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._pods = pods
        self._decider = decider
        self._settings = settings
        self._flights = flights
        self._clock = clock

    def filter(self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone = never) -> Filtered:
        """Return on which of these nodes the pod fits, if possible without those that pods in flight may fill.

        The arguments and errors are those of `Filter.filter`.
        """
        self._flights.end(gpu_pod.pod.uid)
        until = self._clock() + _WAIT_SECONDS
        while True:
            ended = self._flights.ended
            found = self._pods.filter(gpu_pod, names, gone)
            flights = self._flights.current()
            if not flights or not found.passed or not self._is_considered(gpu_pod):
                return found
            taken = self._taken(gpu_pod, found, flights)
            if not taken:
                return found
            if not taken.issuperset(found.passed):
                found.leave_out(taken)
                return found
            if not self._flights.wait(ended, until, gone):
                for flight in flights:
                    if flight.nodes & taken:
                        self._flights.end(flight.gpu_pod.pod.uid)
                return found

    def expect(self, gpu_pod: GpuPod, nodes: Sequence[str], points: Iterable[int] = ()) -> None:
        """Record to which nodes the scheduler may bind the pod after an answer: to one of those with the most points.

        Args:
            points: The points of each node; none if the answer names nodes without points.
        """
        scores = list(points) or [0] * len(nodes)
        most = max(scores, default=0)
        best = [name for name, score in zip(nodes, scores, strict=True) if score == most]
        if not 0 < len(best) <= _MAX_NODES or gpu_pod.pod.nominated_node or not self._is_considered(gpu_pod):
            return
        self._flights.begin(gpu_pod, best)
        flights = self._flights.current()
        for name in best:
            if sum(name in flight.nodes for flight in flights) > 1:
                self._holdings(name, flights)

    def _is_considered(self, gpu_pod: GpuPod) -> bool:
        request = gpu_pod.request
        if request is None or len(request.containers) != 1 or request.others or requested_slices(request):
            return False
        return self._state.gangs.of(gpu_pod.pod) is None

    def _taken(self, gpu_pod: GpuPod, found: Filtered, flights: Sequence[Flight]) -> set[str]:
        """Return the nodes on which the pod does not fit beside the pods in flight, of those that are not rejected."""
        expected = {node for flight in flights for node in flight.nodes} - found.failed.keys() - found.hopeless.keys()
        return {name for name in expected if not self._fits_beside(gpu_pod, name, self._holdings(name, flights))}

    def _holdings(self, node: str, flights: Sequence[Flight]) -> list[Holding]:
        """Return what the pods in flight would hold on a node. The older ones choose first."""
        found: list[Holding] = []
        for flight in flights:
            uid = flight.gpu_pod.pod.uid
            if node not in flight.nodes or self._state.reservation(uid) is not None:
                continue
            if self._state.reservations.binding_problem(uid, node) is not None:
                continue  # The pod is deleted or bound.
            if node not in flight.expected:
                try:
                    decision = self._decider.decide_beside(flight.gpu_pod, node, found)
                except (EffortExceeded, RetryLater):
                    continue  # Only its own calls may fail because the namespace of that pod has used up its searches.
                flight.expected[node] = decision if isinstance(decision, Reservation) else None
            expected = flight.expected[node]
            if expected is not None:
                found.append(expected.holding)
        return found

    def _fits_beside(self, gpu_pod: GpuPod, node: str, holdings: Sequence[Holding]) -> bool:
        if not holdings:
            return True
        request, uid = gpu_pod.request, gpu_pod.pod.uid
        snapshot = self._state.node_snapshot(node, uid)
        if request is None or snapshot.node is None or nvidia_plugin.chooses_cards(snapshot.node, request):
            return True
        cards = with_holdings(snapshot.available_cards, holdings)
        group_cards = self._state.group_cards(request, uid)
        found = assess(request, snapshot.node, cards, self._settings, group_cards=group_cards)
        return isinstance(found, Placement) or not found.proven
