"""Whose turn it is for a plan, and what a plan that was made in vain costs.

A plan takes free slices from others and seconds of a node's driver, and a Pod that waits holds nothing: without bounds
two Pods that are never bound have a node cut again and again. All of this is kept in memory: a new term begins without
it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.engine.round_robin import by_turns
from scheduler.partitioning.waiting_pods import Waiting

CUTS, CUT_SECONDS = 6, 20.0
"""For one namespace, one node's free slices are destroyed so often in a row, and then once in so many seconds."""
_IN_VAIN = 10
"""What a plan costs beside that, in such cuts, when a Pod that it was made for does not come for its slices."""
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 300.0
"""How long a Pod gets no plan after it has not come for its slices; the pause doubles each time."""
_NAMESPACES_KEPT = 1_000


@dataclass(slots=True)
class _Purse:
    """What a namespace may have cut on a node. full: when all of its cuts are there again. missed: the last plan whose
    slices a Pod of the namespace did not come for.
    """

    full: float
    missed: int | None = None


@dataclass(slots=True)
class _Missed:
    """How often a Pod did not come for its slices, and until when it gets no plan."""

    times: int
    until: float


class Turns:
    """Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._served: OrderedDict[str, None] = OrderedDict()
        self._missed: dict[str, _Missed] = {}
        self._purses: dict[str, dict[str, _Purse]] = {}

    def line(self, pods: Iterable[Waiting]) -> list[Waiting]:
        """Return the Pods in the order in which plans are made for them.

        The namespace for which a plan was made longest ago begins. Within a namespace the oldest Pod is first, and
        behind it are those that did not come for slices that were made for them.
        """
        places = {name: i for i, name in enumerate(self._served, 1)}
        pods = sorted(pods, key=lambda pod: (self._times(pod), pod.order))
        return list(by_turns(pods, _namespace, lambda name: (places.get(name, 0), name)))

    def rests(self, pod: Waiting) -> bool:
        """Whether the Pod has not come for its slices, and gets no plan for a while."""
        missed = self._missed.get(pod.known.pod.uid)
        return missed is not None and self._clock() < missed.until

    def may_cut(self, pod: Waiting, node: str) -> bool:
        """Whether the Pod's namespace may have this node cut now."""
        purse = self._purses.get(node, {}).get(_namespace(pod))
        return purse is None or purse.full <= self._clock() + (CUTS - 1) * CUT_SECONDS

    def made(self, pod: Waiting, node: str, *, destroys: bool) -> None:
        """A plan of a node was made for this Pod. destroys: whether free slices go for it."""
        self._served[_namespace(pod)] = None
        self._served.move_to_end(_namespace(pod))
        while len(self._served) > _NAMESPACES_KEPT:
            self._served.popitem(last=False)
        if destroys:
            self._pay(_namespace(pod), node, 1)

    def missed(self, pod: Waiting, node: str, plan: int) -> None:
        """The Pod did not come for the slices of this plan, or was deleted before that."""
        now, uid = self._clock(), pod.known.pod.uid
        self._missed = {k: row for k, row in self._missed.items() if now < row.until + LONGEST_PAUSE}
        times = self._times(pod)
        self._missed[uid] = _Missed(times + 1, now + min(FIRST_PAUSE * 2**times, LONGEST_PAUSE))
        purse = self._purses.get(node, {}).get(_namespace(pod))
        if purse is None or purse.missed != plan:  # many Pods of one plan cost no more than one
            self._pay(_namespace(pod), node, _IN_VAIN).missed = plan

    def drop(self, node: str) -> None:
        """The node is gone."""
        self._purses.pop(node, None)

    def _times(self, pod: Waiting) -> int:
        missed = self._missed.get(pod.known.pod.uid)
        return missed.times if missed else 0

    def _pay(self, namespace: str, node: str, cuts: int) -> _Purse:
        now = self._clock()
        purses = {name: purse for name, purse in self._purses.get(node, {}).items() if now < purse.full}
        purse = purses.setdefault(namespace, _Purse(now))
        purse.full = min(purse.full + cuts * CUT_SECONDS, now + 2 * CUTS * CUT_SECONDS)
        self._purses[node] = purses
        return purse


def _namespace(pod: Waiting) -> str:
    return pod.known.pod.namespace
