"""What pods are likely to come, learnt from those that came, and what the nodes are worth to them."""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from mgpu import dialects
from mgpu.model.cards import CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import Node, Pod
from mgpu.settings import Settings
from scheduler.engine.card_policy import Learning
from scheduler.engine.learning.expected_pods import Learner
from scheduler.engine.learning.node_board import Judge
from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, class_of, node_rows, shape_of
from scheduler.engine.policies import POLICIES

log = logging.getLogger(__name__)

Counts = tuple[tuple[Shape, int], ...]

_MADE: Mapping[str, Learning] = MappingProxyType({name: one.learn for name, one in POLICIES.items() if one.learn})
LEARNT = tuple(_MADE)
"""The policies that need a judge."""


WAITING = 100
"""Pods of a namespace that count before they have cards: 2.5 % of the last 4,000 pods, which the policies remember. A
user may create any number of pods that wait for ever, or that name a node and fail there."""


class Arrivals:
    """Not thread-safe. A pod counts when it comes; beyond the allowance of its namespace, once it has cards.

    The allowance comes back with each pod of the namespace that gets cards, and not with those that are deleted.
    """

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._waiting: set[str] = set()

    def came(self, pod: Pod) -> bool:
        """Return whether the pod counts now, though it has no cards yet."""
        if self._used[pod.namespace] >= WAITING:
            return False
        self._used[pod.namespace] += 1
        self._waiting.add(pod.uid)
        return True

    def placed(self, pod: Pod) -> bool:
        """Return whether the pod, which has got its cards, counts now: it has not been counted before."""
        self._used[pod.namespace] -= 1
        if self._used[pod.namespace] <= 0:
            del self._used[pod.namespace]
        if pod.uid not in self._waiting:
            return True
        self._waiting.remove(pod.uid)
        return False

    def gone(self, uid: str) -> None:
        self._waiting.discard(uid)


class Outlook:
    """Thread-safe. Pods and nodes come in as they are seen, from any thread; `refresh` works out the rest elsewhere.

    judges: by policy, those that are in use; none before anything is known. The mapping is never changed but replaced
    as a whole, and a judge is immutable. Node and cards of one pod may be chosen by two of them, one after the other:
    the cards are then the best on that node by what has been learnt since, and whether they are free is the ledger's.
    """

    def __init__(self, settings: Settings) -> None:
        self.judges: Mapping[str, Judge] = MappingProxyType({})
        self._lock = threading.Lock()
        chosen = (settings.card_policy_for(d.card_policy(settings), d.DEFAULT_CARD_POLICY) for d in dialects.ALL)
        self._wanted = {settings.node_policy, *chosen}.intersection(LEARNT)
        self._first: dict[str, tuple[Pod, GpuRequest]] | None = {}
        self._placed_first: set[str] = set()
        self._arrivals = Arrivals()
        self._learner = Learner()
        self._class: dict[str, NodeClass] = {}
        self._classes: Counter[NodeClass] = Counter()
        self._stale = False

    def saw(self, pod: Pod, request: GpuRequest) -> None:
        """A pod that was not there before; pods that were there from the start in any order, until `refresh`."""
        if not request.containers:
            return
        with self._lock:
            if request.constraints.card_policy in LEARNT and request.constraints.card_policy not in self._wanted:
                self._wanted.add(request.constraints.card_policy)
                self._stale = True
            if self._first is not None:
                self._first[pod.uid] = pod, request
            elif self._arrivals.came(pod):
                self._learn(pod, request)

    def placed(self, pod: Pod, request: GpuRequest) -> None:
        """A pod that has come (`saw`) has got its cards."""
        if not request.containers:
            return
        with self._lock:
            if self._first is not None:
                self._placed_first.add(pod.uid)
            elif self._arrivals.placed(pod):
                self._learn(pod, request)

    def gone(self, uid: str) -> None:
        with self._lock:
            self._arrivals.gone(uid)

    def shape(self, pod: Pod, request: GpuRequest) -> Shape:
        """The pod as judges see it."""
        with self._lock:
            return self._shape(pod, request)

    def _shape(self, pod: Pod, request: GpuRequest) -> Shape:
        return shape_of(request, pod.needs, {node.model for node in self._classes})

    def _take_first(self) -> None:
        """Count the pods that were there from the start, in the order of their creation."""
        rows = sorted((self._first or {}).values(), key=lambda row: (row[0].created, row[0].uid))
        for pod, request in rows:
            if pod.uid in self._placed_first or self._arrivals.came(pod):
                self._learn(pod, request)
        self._first = None
        self._placed_first.clear()

    def _learn(self, pod: Pod, request: GpuRequest) -> None:
        self._learner.observe(self._shape(pod, request))

    def counts(self) -> Counts:
        """What has been learnt: how often each shape of pod has come, in thousandths."""
        with self._lock:
            return self._learner.counts()

    def set_node(self, name: str, node: Node | None, cards: Sequence[CardState]) -> None:
        """The node and its cards as they are now."""
        new = class_of(node, cards) if node is not None and cards else None
        with self._lock:
            before = self._class.pop(name, None)
            if new is not None:
                self._class[name] = new
            if new == before:
                return
            self._stale = True
            self._classes.update(filter(None, [new]))
            self._classes.subtract(filter(None, [before]))
            self._classes += Counter()  # drops what there is no more of

    def refresh(self) -> bool:
        """Make new judges, where there is reason to; whether there was. One thread at a time."""
        with self._lock:
            self._take_first()
            due = self._learner.due()
            if not (due or self._stale):
                return False
            self._stale = False
            counts, classes, wanted = self._learner.counts(), dict(self._classes), sorted(self._wanted)
        made = {name: self._made(name, counts, classes) for name in wanted} if counts else {}
        self.judges = MappingProxyType({name: judge for name, judge in made.items() if judge is not None})
        return True

    def _made(self, name: str, counts: Counts, classes: Mapping[NodeClass, int]) -> Judge | None:
        """Return the policy's judge of what has been learnt, the one of before where it cannot be made.

        Tenants choose the pods that it is made of, and also that a policy is in use which no setting names. One that
        fails must not take the others along.
        """
        try:
            judge = _MADE[name](counts, classes)
            _warm(judge, classes)
        except Exception:
            log.exception("the policy %s cannot be worked out; it goes on with what it knew before", name)
            return self.judges.get(name)
        return judge


def _warm(judge: Judge, classes: Iterable[NodeClass]) -> None:
    """Ask once about each class as the card policies do: a judge makes some of its tables when first asked."""
    for node in classes:
        empty = node_rows(node, CpuMemory(node.cpu, node.memory), [[CARD] * node.cards])
        judge.rate_changes(empty, empty)
