"""Forecasts the next pods from earlier pods, for the card policies and node policies that learn.

`ClusterCache` reports pods and nodes to the `Forecast`, and a background thread of `scheduler.runtime` calls `refresh`,
which makes a judge for each learning policy that is in use. A judge is an object that rates nodes and cards for the
pods that are likely to come. `decisions.scores` and `decisions.decider` read the judges. Tenants choose the pods from
which the forecast learns, so a namespace must not dominate it with pods that never get cards.
"""

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
"""Shapes of pods, each with the number of pods that had it, in thousandths of a pod. Earlier pods count less."""

_MAKE_JUDGE: Mapping[str, Learning] = MappingProxyType(
    {name: policy.learn for name, policy in POLICIES.items() if policy.learn}
)
LEARNING_POLICIES = tuple(_MAKE_JUDGE)
"""The names of the policies that need a judge."""

MAX_WAITING_PODS = 100
"""The maximum number of pods of a namespace from which the forecast learns although they have no cards yet. It
remembers 4,000 pods. A user may create any number of pods that wait for ever, or that name a node and fail there."""


class _Arrivals:
    """Decides from which pods the forecast learns. These pods *count*; each counts at most once.

    A pod counts when it is created. If its namespace has used up its allowance (`MAX_WAITING_PODS`), the pod counts
    once it has cards. A namespace regains allowance when its pods get cards, and not when they are deleted. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._waiting: set[str] = set()

    def counts_now(self, pod: Pod) -> bool:
        """Return whether a new pod counts before it has cards. If so, it uses up allowance of its namespace."""
        if self._used[pod.namespace] >= MAX_WAITING_PODS:
            return False
        self._used[pod.namespace] += 1
        self._waiting.add(pod.uid)
        return True

    def counts_when_placed(self, pod: Pod) -> bool:
        """Return whether a pod that has got its cards counts now, because it has not counted before."""
        self._used[pod.namespace] -= 1
        if self._used[pod.namespace] <= 0:
            del self._used[pod.namespace]
        if pod.uid not in self._waiting:
            return True
        self._waiting.remove(pod.uid)
        return False

    def drop(self, uid: str) -> None:
        """Forget a pod that was deleted."""
        self._waiting.discard(uid)


class Forecast:
    """Learns from pods and nodes. Thread-safe: `_lock` guards all private data.

    Attributes:
        judges: The judges in use, by policy. The mapping is empty until something is learned. It is replaced as a
            whole, and judges are immutable. The node and the cards of one pod may be chosen with two successive judges.
            That is harmless, because the ledger decides which cards are free.
    """

    def __init__(self, settings: Settings) -> None:
        self.judges: Mapping[str, Judge] = MappingProxyType({})
        self._lock = threading.Lock()
        chosen = (settings.card_policy_for(d.card_policy(settings), d.DEFAULT_CARD_POLICY) for d in dialects.ALL)
        of_claims = [settings.card_policy_for(settings.dra.card_policy, "binpack")] if settings.dra.enabled else []
        self._policies = {settings.node_policy, *of_claims, *chosen}.intersection(LEARNING_POLICIES)
        # The pods that exist at the start, in no particular order; None after the first `refresh`.
        self._first_pods: dict[str, tuple[Pod, GpuRequest]] | None = {}
        self._placed_first: set[str] = set()
        self._arrivals = _Arrivals()
        self._learner = Learner()
        self._class_of: dict[str, NodeClass] = {}
        self._classes: Counter[NodeClass] = Counter()
        self._is_outdated = False

    def pod_added(self, pod: Pod, request: GpuRequest) -> None:
        """Learn from a new pod, unless its namespace has used up its allowance.

        Pods that request no GPU are ignored. Before the first `refresh`, pods may be added in any order.
        """
        if not request.containers:
            return
        with self._lock:
            policy = request.constraints.card_policy
            if policy in LEARNING_POLICIES and policy not in self._policies:
                self._policies.add(policy)
                self._is_outdated = True
            if self._first_pods is not None:
                self._first_pods[pod.uid] = pod, request
            elif self._arrivals.counts_now(pod):
                self._learn(pod, request)

    def pod_placed(self, pod: Pod, request: GpuRequest) -> None:
        """Record that an added pod has got its cards, and learn from it if it has not counted before."""
        if not request.containers:
            return
        with self._lock:
            if self._first_pods is not None:
                self._placed_first.add(pod.uid)
            elif self._arrivals.counts_when_placed(pod):
                self._learn(pod, request)

    def pod_gone(self, uid: str) -> None:
        """Record that a pod was deleted. What was learned from it stays."""
        with self._lock:
            self._arrivals.drop(uid)

    def shape(self, pod: Pod, request: GpuRequest) -> Shape:
        with self._lock:
            return self._shape(pod, request)

    def _shape(self, pod: Pod, request: GpuRequest) -> Shape:
        return shape_of(request, pod.cpu_memory, {node.model for node in self._classes})

    def _learn_from_first_pods(self) -> None:
        """Learn from the pods that existed at the start, in the order of their creation."""
        rows = sorted((self._first_pods or {}).values(), key=lambda row: (row[0].created, row[0].uid))
        for pod, request in rows:
            if pod.uid in self._placed_first or self._arrivals.counts_now(pod):
                self._learn(pod, request)
        self._first_pods = None
        self._placed_first.clear()

    def _learn(self, pod: Pod, request: GpuRequest) -> None:
        self._learner.observe(self._shape(pod, request))

    def counts(self) -> Counts:
        with self._lock:
            return self._learner.counts()

    def set_node(self, name: str, node: Node | None, cards: Sequence[CardState]) -> None:
        """Store a node and its cards. `node` is None if the node was deleted."""
        now = class_of(node, cards) if node is not None and cards else None
        with self._lock:
            before = self._class_of.pop(name, None)
            if now is not None:
                self._class_of[name] = now
            if now == before:
                return
            self._is_outdated = True
            if now is not None:
                self._classes[now] += 1
            if before is not None:
                self._classes[before] -= 1
                if not self._classes[before]:
                    del self._classes[before]

    def refresh(self) -> bool:
        """Make new judges if the pods or nodes have changed enough. Return whether new judges were made.

        Only one thread at a time may call this.
        """
        with self._lock:
            self._learn_from_first_pods()
            is_due = self._learner.due()
            if not (is_due or self._is_outdated):
                return False
            self._is_outdated = False
            counts = self._learner.counts()
            classes = dict(self._classes)
            policies = sorted(self._policies)
        judges = {name: self._make_judge(name, counts, classes) for name in policies} if counts else {}
        self.judges = MappingProxyType({name: judge for name, judge in judges.items() if judge is not None})
        return True

    def _make_judge(self, name: str, counts: Counts, classes: Mapping[NodeClass, int]) -> Judge | None:
        """Return a new judge of the policy, or its previous judge if the policy fails.

        Tenants choose the pods from which a policy learns, and can request a policy that no setting names. A policy
        that fails must not stop the others.
        """
        try:
            judge = _MAKE_JUDGE[name](counts, classes)
            _fill_tables(judge, classes)
        except Exception:
            log.exception("the policy %s cannot learn from the latest pods; its previous forecast stays in use", name)
            return self.judges.get(name)
        return judge


def _fill_tables(judge: Judge, classes: Iterable[NodeClass]) -> None:
    """Rate an empty node of each class, so that the judge makes its tables now and not in a call of kube-scheduler."""
    for node in classes:
        empty = node_rows(node, CpuMemory(node.cpu, node.memory), [[CARD] * node.cards])
        judge.rate_changes(empty, empty)
