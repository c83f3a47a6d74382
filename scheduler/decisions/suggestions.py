"""Suggests a node for a pod that its scheduler cannot place, by the pod's `status.nominatedNodeName`.

In a large cluster kube-scheduler looks at a sample of the nodes only (`percentageOfNodesToScore`). If a pod fits on no
node of the sample, `api.extender` reports it, and `Suggestions` nominates the pod to the best of all nodes.
kube-scheduler then retries the pod, and tries this node before all others (schedule_one.go, `evaluateNominatedNode`).

Volcano counts the cards of a node as a sum. Without the verb `predicate`, which costs a call for each pod and node, it
chooses the same node in each session, although `allocate` refuses it. So `api.volcano` reports refused allocations, and
`Suggestions` chooses a node by cards, as the filter does, and nominates the pod to it. In its next session Volcano
tries this node before all others (volcano.sh, pkg/scheduler/actions/allocate, `allocateResourcesForTasks`).

What must hold:

- A suggestion keeps no cards. Otherwise a gang that never fits would hold cards without a time limit. The annotation
  `mgpu.io/suggested-node` tells suggestions from nominations by schedulers (`mgpu.model.pods.read_pod`).
- Suggestions never promise the same cards to two pods. If a gang is given up because a pod was refused, the
  others are nominated to the nodes where they had cards, since Volcano chooses at random among equal nodes. So the gang
  is complete after few sessions.
- A node that Volcano does not take, for reasons that mgpu does not know, is suggested again only after all others.
- A suggestion is removed after `_KEEP_SECONDS`, because Volcano evicts no pods for a pod that has a possible node. A
  write that fails is repeated.
- A nomination by Volcano itself is not changed.

`scheduler.runtime` runs `Suggestions` on a thread.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.pods import SUGGESTED_NODE, Node
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider, pod_path
from scheduler.decisions.effort_budgets import EffortExceeded
from scheduler.decisions.filter import Filter
from scheduler.work_queue import Queue

log = logging.getLogger(__name__)

_KEEP_SECONDS = 30.0
"""How long a suggestion is kept after an allocation of its pod was last refused or given up."""
_MAX_PODS = 500
"""The most pods whose suggestions are remembered. Beyond that, the oldest is forgotten, and removed from its pod."""
_SPARE_NODES = 16
"""The most nodes that a search tries in vain, apart from those that are suggested to other pods."""
_SAMPLED_ATTEMPTS = 3
"""The most nodes that are suggested to kube-scheduler in succession. It may have reasons against a node that mgpu does
not know, such as taints."""
_SEARCH_PAUSE_SECONDS = 0.2
"""The pause between two searches for pods that did not fit on kube-scheduler's sample."""
_MOST_SAMPLED = 20
"""The most pods of a namespace that wait for such a search, or are nominated because of one. A pod that is left out
asks again, since kube-scheduler retries it. Without a limit, the pods of one namespace could delay the searches for all
others by `_SEARCH_PAUSE_SECONDS` each. And kube-scheduler counts the cpu and memory of a nominated pod as taken on its
node, also if the pod does not tolerate a taint there, which mgpu does not know."""
_MAX_ATTEMPTS = 128
"""The most nodes on which the engine searches for cards for one suggestion."""

PlanRequest = Callable[[GpuPod, Sequence[str], Sequence[str]], object]
"""Requests partitions for a pod: the nodes where it would fit with other partitions, and those where it fits."""


class WaitingPod(NamedTuple):
    """A pod as its scheduler knows it.

    Attributes:
        nominated_node: The node to which the pod was nominated when its scheduler read it; "" for none.
        job: Volcano's name of the pod's group; "" if it has none, or another scheduler.
        selector: The pod's `spec.nodeSelector`.
    """

    uid: str
    namespace: str
    nominated_node: str
    job: str
    selector: Mapping[str, str]


@dataclass(slots=True)
class _Suggestion:
    """What is known of one pod.

    Attributes:
        namespace: The namespace of the pod.
        selector: The pod's `spec.nodeSelector`.
        asked: When an allocation was last refused or given up.
        asks: How often this was so.
        answered: The value of `asks` at the last suggestion.
        known: The node to which the pod was nominated then; "" for none.
        tried: The nodes that were refused, and those that were suggested and that Volcano did not take.
        last: The node where the pod had cards until its gang was given up; "" if there is none.
        holding: What the pod would hold on the suggested node, or None.
    """

    namespace: str
    selector: Mapping[str, str]
    asked: float = 0.0
    asks: int = 0
    answered: int = 0
    known: str = ""
    tried: set[str] = field(default_factory=set)
    last: str = ""
    holding: Holding | None = None


class Suggestions:
    """A work queue of the UIDs of pods, for one consumer thread. Any thread may call `refused` and `wake`.

    `_lock` guards `_by_uid` with its values, `_next_search`, and `_refused_jobs`, the time of the last refusal of each
    job.

    Args:
        api: An API client that writes only while this replica leads (`mgpu.kube.fence`).
        may_decide: Raises RetryLater while this replica must not decide.
        request_plan: Requests partitions for a pod that requests slices.
    """

    def __init__(
        self,
        state: ClusterCache,
        pods: Filter,
        decider: Decider,
        api: Api,
        may_decide: Callable[[], None],
        request_plan: PlanRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._filter = pods
        self._decider = decider
        self._api = api
        self._may_decide = may_decide
        self._request_plan = request_plan
        self._clock = clock
        self._queue = Queue(clock)
        self._lock = threading.Lock()
        self._by_uid: OrderedDict[str, _Suggestion] = OrderedDict()
        self._refused_jobs: OrderedDict[str, float] = OrderedDict()
        self._next_search = -math.inf

    def begin(self) -> None:
        """Forget what was known in an earlier term, and queue the suggestions of the last leader for removal."""
        with self._lock:
            self._by_uid.clear()
            self._refused_jobs.clear()
        for gpu_pod in self._state.gpu_pods():
            if SUGGESTED_NODE in gpu_pod.pod.annotations and not gpu_pod.pod.node:
                self._queue.add(gpu_pod.pod.uid, _KEEP_SECONDS, gpu_pod.pod.namespace)

    def refused(self, pod: WaitingPod, node: str) -> None:
        """Note that the pod gets no cards on a node."""
        with self._lock:
            if pod.job:
                self._refused_jobs[pod.job] = self._clock()
                self._refused_jobs.move_to_end(pod.job)
                if len(self._refused_jobs) > _MAX_PODS:
                    self._refused_jobs.popitem(last=False)
            suggestion = self._ask(pod)
            suggestion.tried |= {node, pod.nominated_node} - {""}
            suggestion.last = ""

    def refused_in_sample(self, pod: WaitingPod) -> None:
        """Note that the pod fits on none of the nodes that kube-scheduler has looked at.

        Evaluating all nodes takes milliseconds, and there may be many waiting pods, so these searches are rare.
        """
        with self._lock:
            known = self._by_uid.get(pod.uid)
            is_vain = known is not None and (known.asks > known.answered or known.holding is None)
            if known is not None and (is_vain or len(known.tried) >= _SAMPLED_ATTEMPTS):
                return  # It is asked again after the suggestion was forgotten.
            if known is None and self._count(pod.namespace) >= _MOST_SAMPLED:
                return
            suggestion = self._ask(pod, self._seconds_to_next_search())
            suggestion.tried |= {pod.nominated_node} - {""}

    def _count(self, namespace: str) -> int:
        """Return how many pods of the namespace wait for a search, or for a scheduler to bind them as suggested."""
        own = ((uid, s) for uid, s in self._by_uid.items() if s.namespace == namespace)
        return sum(s.asks > s.answered or (s.holding is not None and self._waits(uid)) for uid, s in own)

    def _seconds_to_next_search(self) -> float:
        now = self._clock()
        self._next_search = max(now, self._next_search + _SEARCH_PAUSE_SECONDS)
        return self._next_search - now

    def given_up(self, pod: WaitingPod, node: str) -> None:
        """Note that Volcano has given up a pod that had cards on a node."""
        with self._lock:
            refused = self._refused_jobs.get(pod.job)
            if refused is None or self._clock() - refused >= _KEEP_SECONDS:
                return  # No pod of the gang was refused, so the cards of the nodes were not the reason.
            suggestion = self._ask(pod)
            suggestion.tried.discard(node)
            suggestion.last = node

    def _ask(self, pod: WaitingPod, after: float = 0.0) -> _Suggestion:
        suggestion = self._by_uid.setdefault(pod.uid, _Suggestion(pod.namespace, pod.selector))
        suggestion.asked = self._clock()
        suggestion.asks += 1
        suggestion.known = pod.nominated_node
        self._by_uid.move_to_end(pod.uid)
        if len(self._by_uid) > _MAX_PODS:
            self._by_uid.popitem(last=False)
        self._queue.add(pod.uid, after, pod.namespace)
        return suggestion

    def run(self, stop: threading.Event) -> None:
        """Process the pods that are due until `stop` is set. Call `wake` after setting it."""
        self._queue.run(self._process, stop)

    def wake(self) -> None:
        """Make `run` check its argument `stop`."""
        self._queue.wake()

    def work(self) -> None:
        """Process all pods that are due, and return."""
        while (uid := self._queue.next()) is not None:
            self._process(uid)

    def _process(self, uid: str) -> None:
        """Suggest a node for a pod, or remove its suggestion. If that fails, repeat it with growing pauses."""
        try:
            self._may_decide()
        except RetryLater:
            return  # The replica that decides next removes the suggestions.
        try:
            self._attempt(uid)
        except (ApiError, Unreachable, RetryLater, EffortExceeded) as error:
            log.info("cannot suggest a node yet: %s", error, extra={"pod": uid})
            self._repeat(uid)
        except Exception:
            # Nothing outside of this function handles errors. An error with one pod must not affect the others.
            log.exception("cannot suggest a node", extra={"pod": uid})
            self._repeat(uid)
        else:
            self._queue.done(uid)

    def _repeat(self, uid: str) -> None:
        gpu_pod = self._state.gpu_pod(uid)
        self._queue.add_again(uid, gpu_pod.pod.namespace if gpu_pod else "")

    def _attempt(self, uid: str) -> None:
        gpu_pod = self._state.gpu_pod(uid)
        if gpu_pod is None or gpu_pod.pod.node or gpu_pod.pod.ended or gpu_pod.pod.deleting:
            with self._lock:
                self._by_uid.pop(uid, None)
            return
        with self._lock:
            suggestion = self._by_uid.get(uid)
            if suggestion is not None and suggestion.asks == suggestion.answered:
                left = suggestion.asked + _KEEP_SECONDS - self._clock()
                if left > 0:
                    self._queue.add(uid, left, gpu_pod.pod.namespace)
                    return
                del self._by_uid[uid]
                suggestion = None
            asked = replace(suggestion, tried=set(suggestion.tried)) if suggestion else None
        if suggestion is None or asked is None:
            self._remove(gpu_pod)
            return
        decision = self._suggest(gpu_pod, asked)
        with self._lock:
            suggestion.answered = asked.asks
            suggestion.holding = decision.holding if decision else None
            if decision is None:
                suggestion.tried -= asked.tried
        self._queue.add(uid, _KEEP_SECONDS, gpu_pod.pod.namespace)

    def _suggest(self, gpu_pod: GpuPod, suggestion: _Suggestion) -> Reservation | None:
        """Suggest a node, and return the cards of the pod there. If there is none, remove the last suggestion."""
        pod = gpu_pod.pod
        decision = None if pod.nominated_node else self._choose(gpu_pod, suggestion)
        if decision is None:
            self._remove(gpu_pod)
        elif not pod.annotations.get(SUGGESTED_NODE) == suggestion.known == decision.node:
            self._write(gpu_pod, decision.node, {"nominatedNodeName": decision.node})
        return decision

    def _choose(self, gpu_pod: GpuPod, suggestion: _Suggestion) -> Reservation | None:
        """Return the cards on the best node that was not tried, beside what other pods would get, or None."""
        every = self._state.nodes_with_cards()
        nodes = [node for node in self._state.nodes(every) if node and _matches(node, suggestion.selector)]
        found = self._filter.filter(gpu_pod, [node.name for node in nodes])
        if found.repartitionable:
            self._request_plan(gpu_pod, found.repartitionable, found.passed)
        untried = [name for name in found.passed if name not in suggestion.tried]
        beside = self._beside(gpu_pod.pod.uid)
        attempts = min(len({holding.node for holding in beside}) + _SPARE_NODES, _MAX_ATTEMPTS)
        by_score = self._by_score(gpu_pod, untried)
        for node in islice(sorted(by_score, key=lambda name: name != suggestion.last), attempts):
            try:
                decision = self._decider.decide_beside(gpu_pod, node, beside)
            except EffortExceeded:
                continue
            if isinstance(decision, Reservation):
                return decision
        return None

    def _by_score(self, gpu_pod: GpuPod, names: Sequence[str]) -> Collection[str]:
        scores = self._filter.scores(gpu_pod, names)
        return [name for _, name in sorted(zip((-score for score in scores), names, strict=True))]

    def _beside(self, uid: str) -> tuple[Holding, ...]:
        """Return what the other pods would hold on their suggested nodes, without those that have cards by now."""
        with self._lock:
            holdings = [s.holding for other, s in self._by_uid.items() if other != uid and s.holding is not None]
        return tuple(h for h in holdings if self._waits(h.uid))

    def _waits(self, uid: str) -> bool:
        gpu_pod = self._state.gpu_pod(uid)
        return gpu_pod is not None and not gpu_pod.pod.node and self._state.reservation(uid) is None

    def _remove(self, gpu_pod: GpuPod) -> None:
        """Remove the suggestion from a pod, if it has one, but not a nomination by a scheduler."""
        pod = gpu_pod.pod
        if SUGGESTED_NODE in pod.annotations:
            # A scheduler may nominate the pod at the same time, so the pod must not have changed.
            self._write(gpu_pod, None, {} if pod.nominated_node else {"nominatedNodeName": None}, gpu_pod.version)

    def _write(self, gpu_pod: GpuPod, node: str | None, status: Mapping[str, object], version: str = "") -> None:
        pod = gpu_pod.pod
        meta: dict[str, object] = {"uid": pod.uid, "annotations": {SUGGESTED_NODE: node}}
        if version:
            meta["resourceVersion"] = version
        self._api.patch(f"{pod_path(pod.namespace, pod.name)}/status", {"metadata": meta, "status": dict(status)})


def _matches(node: Node, selector: Mapping[str, str]) -> bool:
    return all(node.labels.get(key) == value for key, value in selector.items())
