"""Filters for the members of gangs: chooses one node for each, and reserves their cards at the same time.

The filter tells for each pod alone on which nodes it fits, so all four members of a gang pass for the same free card,
and too few of them can be bound. `api.extender` therefore calls `GangFilter.filter`, which answers a member one node,
and remembers the cards that the member would get there: its place. Once as many members as the gang needs have a place
or are bound, all places become provisional reservations. `Decider.decide` finds them when the members are bound. Both
callers that bind pods ask `GangFilter.refusal` first, since members may wait in Permit until their reservations end.

What must hold:

- A place that is not reserved counts only for the members of the same gang. It keeps no cards from any other pod.
- Either all places of a gang are reserved, or none; and none if members were deleted so that too few are left.
- A member keeps its node until the filter is called for it again, since its scheduler may already count on the node.
  If another pod takes the cards, the member gets other cards of that node, or else the whole gang is refused.
- Places end in bounded time, and their number is bounded.

The places are lost with the process and with the lead. The members that the scheduler has placed by then are bound as
pods without a gang.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from mgpu.model.gangs import GangName
from mgpu.model.gpu_requests import Rejection
from mgpu.model.ledger import Holding
from mgpu.model.pods import Pod
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import CallerGone, never
from scheduler.decisions.filter import Filter, Filtered
from scheduler.decisions.gang_places import Parts, Places
from scheduler.decisions.pod_groups import PodGroupReader

_MAX_GANGS = 256
"""The most gangs whose places are kept. Beyond that, those of the gang without a call for the longest time are lost."""


class GangFilter:
    """Filters for members of gangs, and passes all other pods on to `Filter`. Thread-safe.

    The lock of a gang is taken before the lock of the cache.
    """

    def __init__(
        self,
        state: ClusterCache,
        pods: Filter,
        decider: Decider,
        announce: Callable[[str], None],
        groups: PodGroupReader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = Parts(state, pods, decider, announce, clock)
        self._groups = groups
        self._lock = threading.Lock()
        self._gangs: OrderedDict[GangName, Places] = OrderedDict()

    def filter(self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone = never) -> Filtered:
        """Return on which of these nodes the pod fits; for a member of a gang at most one node.

        The arguments and errors are those of `Filter.filter`.
        """
        pod = gpu_pod.pod
        gang = self._parts.state.gangs.of(pod, self._groups.min_count)
        if gang is None or gpu_pod.request is None or pod.gated or pod.node or pod.ended or self._is_deleting(pod):
            return self._parts.pods.filter(gpu_pod, names, gone)
        if self._parts.state.remnant_problem(pod) is not None:
            # The bindings of its namespace would be refused, so no gang may be completed now.
            return self._parts.pods.filter(gpu_pod, names, gone)
        with self._lock:
            places = self._gangs.setdefault(gang.name, Places(self._parts))
            self._gangs.move_to_end(gang.name)
            while len(self._gangs) > _MAX_GANGS:
                self._gangs.popitem(last=False)
        return places.filter(gang, gpu_pod, names, gone)

    def _is_deleting(self, pod: Pod) -> bool:
        """Return whether the pod will not be bound. The cache may know it before kube-scheduler does."""
        known = self._parts.state.gpu_pod(pod.uid)
        return pod.deleting or (known is not None and known.pod.deleting)

    def beside(self, gpu_pod: GpuPod) -> tuple[Holding, ...]:
        """Return what the other members of the pod's gang hold tentatively. Evictions for the pod must allow for it."""
        gang = self._parts.state.gangs.of(gpu_pod.pod)
        if gang is None:
            return ()
        with self._lock:
            places = self._gangs.get(gang.name)
        return places.beside(gpu_pod.pod.uid) if places else ()

    def refusal(self, gpu_pod: GpuPod, node: str) -> Rejection | None:
        """Return why a member must not be bound to the node of its place now, or None. Reserve the places if needed.

        A complete gang may wait in Permit until its reservations end, for a member that requests no GPU for example.
        """
        gang = self._parts.state.gangs.of(gpu_pod.pod)
        if gang is None:
            return None
        with self._lock:
            places = self._gangs.get(gang.name)
        return places.refusal(gang, gpu_pod.pod.uid, node) if places else None
