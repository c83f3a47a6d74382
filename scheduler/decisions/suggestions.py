"""Suggests a node to Volcano for a pod whose allocation was refused, by the pod's `status.nominatedNodeName`.

Volcano counts the cards of a node as a sum. Without the verb `predicate`, which costs a call for each pod and node, it
chooses the same node in each session, although `allocate` refuses it. So `api.volcano` reports refused allocations, and
`Suggestions` chooses a node by cards, as the filter does, and nominates the pod to it. In its next session Volcano
tries this node before all others (volcano.sh, pkg/scheduler/actions/allocate, `allocateResourcesForTasks`).

What must hold:

- A suggestion keeps no cards. Otherwise a gang that never fits would hold cards without a time limit. The annotation
  `mgpu.io/suggested-node` tells suggestions from nominations by schedulers (`mgpu.model.pods.read_pod`).
- Suggestions for several pods do not count on the same cards. If a gang is given up because a pod was refused, the
  others are nominated to the nodes where they had cards, since Volcano chooses at random among equal nodes. So the gang
  is complete after few sessions.
- A node that Volcano does not take, for reasons that mgpu does not know, is not suggested again before all others.
- A suggestion is removed after `_KEEP_SECONDS`, because Volcano evicts no pods for a pod that has a possible node.

`scheduler.runtime` runs `Suggestions` on a thread.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
"""How long a suggestion is kept after the last refused allocation of its pod."""
_MAX_PODS = 1_000
"""The most pods whose suggestions are remembered. Beyond that, the oldest is forgotten, but stays in the pod."""
_MAX_ATTEMPTS = 16
"""The most nodes on which the engine searches for cards for one suggestion."""

PlanRequest = Callable[[GpuPod, Sequence[str], Sequence[str]], object]
"""Requests partitions for a pod: the nodes where it would fit with other partitions, and those where it fits."""


class VolcanoPod(NamedTuple):
    """A pod that Volcano places.

    Attributes:
        job: Volcano's name of the pod's group; "" if it has none.
        selector: The pod's `spec.nodeSelector`.
    """

    uid: str
    namespace: str
    job: str
    selector: Mapping[str, str]


@dataclass(slots=True)
class _Suggestion:
    """What is known of one pod.

    Attributes:
        selector: The pod's `spec.nodeSelector`.
        tried: The nodes that were refused, and those that were suggested and that Volcano did not take.
        last: The node where the pod had cards until its gang was given up; "" if there is none.
        is_asked: Whether an allocation was refused or given up since the last suggestion.
        holding: What the pod would hold on the suggested node, or None.
    """

    selector: Mapping[str, str]
    tried: set[str] = field(default_factory=set)
    last: str = ""
    is_asked: bool = True
    holding: Holding | None = None


class Suggestions:
    """A work queue of the UIDs of pods, for one consumer thread. Any thread may call `refused` and `wake`.

    `_lock` guards `_by_uid` and `_refused_jobs`, the time of the last refusal of each job. Only the consumer changes a
    `_Suggestion` without it.

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

    def begin(self) -> None:
        """Queue the suggestions of the last leader, so that they are removed in time."""
        for gpu_pod in self._state.gpu_pods():
            if SUGGESTED_NODE in gpu_pod.pod.annotations and not gpu_pod.pod.node:
                self._queue.add(gpu_pod.pod.uid, _KEEP_SECONDS, gpu_pod.pod.namespace)

    def refused(self, pod: VolcanoPod, node: str, known: str) -> None:
        """Note that the cards of a node do not suffice for a pod.

        Args:
            known: The node to which the pod was nominated when Volcano chose the refused one; "" for none.
        """
        with self._lock:
            self._refused_jobs[pod.job] = self._clock()
            self._refused_jobs.move_to_end(pod.job)
            if len(self._refused_jobs) > _MAX_PODS:
                self._refused_jobs.popitem(last=False)
            suggestion = self._ask(pod)
            suggestion.tried |= {node, known} - {""}
            suggestion.last = ""

    def given_up(self, pod: VolcanoPod, node: str) -> None:
        """Note that Volcano has given up a pod that had cards on a node."""
        with self._lock:
            if not pod.job or self._clock() - self._refused_jobs.get(pod.job, -_KEEP_SECONDS) >= _KEEP_SECONDS:
                return  # No pod of the gang was refused, so the cards of the nodes were not the reason.
            suggestion = self._ask(pod)
            suggestion.tried.discard(node)
            suggestion.last = node

    def _ask(self, pod: VolcanoPod) -> _Suggestion:
        suggestion = self._by_uid.setdefault(pod.uid, _Suggestion(pod.selector))
        suggestion.is_asked = True
        self._by_uid.move_to_end(pod.uid)
        if len(self._by_uid) > _MAX_PODS:
            self._by_uid.popitem(last=False)
        self._queue.add(pod.uid, group=pod.namespace)
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
        """Suggest a node for a pod, or remove its suggestion. After an error, the next refusal is another attempt."""
        try:
            self._may_decide()
            self._attempt(uid)
        except RetryLater as error:
            log.debug("no node is suggested: %s", error, extra={"pod": uid})
        except (ApiError, Unreachable) as error:
            log.warning("cannot suggest a node to Volcano: %s", error, extra={"pod": uid})
        except Exception:
            # Nothing outside of this function handles errors. An error with one pod must not affect the others.
            log.exception("cannot suggest a node to Volcano", extra={"pod": uid})

    def _attempt(self, uid: str) -> None:
        gpu_pod = self._state.gpu_pod(uid)
        with self._lock:
            suggestion = self._by_uid.get(uid)
        if gpu_pod is None or gpu_pod.pod.node or gpu_pod.pod.ended or gpu_pod.pod.deleting:
            self._forget(uid)
            return
        if suggestion is None or not suggestion.is_asked:
            self._write(gpu_pod, None)
            self._forget(uid)
            return
        suggestion.is_asked = False
        decision = self._choose(gpu_pod, suggestion)
        suggestion.holding = decision.holding if decision else None
        if decision is None:
            with self._lock:
                suggestion.tried.clear()
        self._write(gpu_pod, decision.node if decision else None)
        self._queue.add(uid, _KEEP_SECONDS, gpu_pod.pod.namespace)

    def _forget(self, uid: str) -> None:
        with self._lock:
            self._by_uid.pop(uid, None)

    def _choose(self, gpu_pod: GpuPod, suggestion: _Suggestion) -> Reservation | None:
        """Return the cards on the best node that was not tried, beside what other pods would get, or None."""
        every = self._state.nodes_with_cards()
        nodes = [node for node in self._state.nodes(every) if node and _matches(node, suggestion.selector)]
        found = self._filter.filter(gpu_pod, [node.name for node in nodes])
        if found.repartitionable:
            self._request_plan(gpu_pod, found.repartitionable, found.passed)
        with self._lock:
            untried = [name for name in found.passed if name not in suggestion.tried]
            last = suggestion.last
        beside = self._beside(gpu_pod.pod.uid)
        by_score = self._by_score(gpu_pod, untried)
        for node in islice(sorted(by_score, key=lambda name: name != last), _MAX_ATTEMPTS):
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

    def _write(self, gpu_pod: GpuPod, node: str | None) -> None:
        """Nominate the pod to a node, or remove the suggestion. A nomination by a scheduler is not removed."""
        pod = gpu_pod.pod
        if pod.annotations.get(SUGGESTED_NODE) == node:
            return
        meta = {"uid": pod.uid, "annotations": {SUGGESTED_NODE: node}}
        body = {"metadata": meta, "status": {"nominatedNodeName": node}}
        self._api.patch(f"{pod_path(pod.namespace, pod.name)}/status", body)


def _matches(node: Node, selector: Mapping[str, str]) -> bool:
    return all(node.labels.get(key) == value for key, value in selector.items())
