"""Runs the scheduling loop, which chooses the best node for one pod after the other.

A thread pool posts the Bindings, so the loop does not wait for them. `playground.cluster` starts a `Scheduling`.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.compute_resources import allocatable, requests_of
from playground import fit
from playground.scheduling.claims.allocator import AllocationError
from playground.scheduling.claims.claim_scheduling import Blocked, ClaimScheduling, PodClaims
from playground.scheduling.claims.claim_writes import BindError
from playground.scheduling.extender_client import Extender, ExtenderError
from playground.scheduling.queue import ALL_EVENTS, Cache, Event, Queue

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
NAME = "default-scheduler"
"""The `schedulerName` of pods that do not set one."""
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_BINDERS = 16
"""The number of threads that post Bindings."""
# A class may give an extended resource to a node without it (EventsToRegister in noderesources/fit.go).
_FIT_EVENTS = frozenset({Event.NODE, Event.ANNOTATION, Event.POD, Event.CLASS})
_CLAIM_EVENTS = frozenset({Event.NODE, Event.CLAIM, Event.SLICE, Event.CLASS})
"""The events for which kube-scheduler's plugin DynamicResources registers. The deletion of a pod is none of them: it
helps when the pod's claim is deallocated."""


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """The result for a pod for which no node was chosen.

    Attributes:
        message: The reason.
        error: Whether something failed, such as a call of an extender. Otherwise the pod fits no node.
        wanted: The events after which the pod may fit a node.
    """

    message: str
    error: bool = False
    wanted: frozenset[Event] = ALL_EVENTS


class Scheduling:
    """Schedules the pods with one `schedulerName`. It can be started once.

    Args:
        extenders: The extenders, in the order in which they are called.
        scheduler: The `schedulerName` of the pods.
        backoff: The shortest and the longest back-off, in seconds.
    """

    def __init__(
        self,
        api: Api,
        extenders: Sequence[Extender] = (),
        *,
        scheduler: str = NAME,
        backoff: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        self._api = api
        self._extenders = tuple(extenders)
        self._scheduler = scheduler
        self._ignored = frozenset(name for extender in extenders for name in extender.ignored)
        self._cache = Cache()
        self._queue = Queue(*backoff)
        self._events = Recorder(api, scheduler)
        self._binders = ThreadPoolExecutor(_BINDERS, "bind")
        self._claims = ClaimScheduling(api, self._queue.changed, self._claim_created)
        self._unready: dict[str, Raw] = {}  # pods whose claims do not exist yet, by UID; `_unready_lock` guards it
        self._unready_lock = threading.Lock()
        self._nodes = Reflector(api, "/api/v1/nodes", self._node_changed, self._node_gone)
        self._pods = Reflector(api, "/api/v1/pods", self._pod_changed, self._pod_gone)
        self._thread = threading.Thread(target=self._run, name="scheduling", daemon=True)

    def start(self) -> None:
        self._nodes.start()
        self._pods.start()
        self._claims.start()
        self._thread.start()

    def stop(self) -> None:
        self._nodes.stop()
        self._pods.stop()
        self._claims.stop()
        self._queue.close()
        if self._thread.is_alive():
            self._thread.join(10)
        self._binders.shutdown(wait=True, cancel_futures=True)

    def _node_changed(self, node: Raw) -> None:
        event = self._cache.set_node(node)
        if event is not None:
            self._queue.changed(event)

    def _node_gone(self, node: Raw) -> None:
        self._cache.remove_node(node["metadata"]["name"])

    def _pod_changed(self, pod: Raw) -> None:
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        with self._unready_lock:
            self._unready.pop(uid, None)
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            self._pod_gone(pod)
        elif spec.get("nodeName"):
            self._queue.remove(uid)
            self._cache.bound(pod)
        elif pod["metadata"].get("deletionTimestamp"):
            self._queue.remove(uid)
        elif spec.get("schedulerName", NAME) == self._scheduler and not spec.get("schedulingGates"):
            self._put(pod)

    def _put(self, pod: Raw) -> None:
        """Add a pod to the queue, or note it if not all of its claims exist."""
        with self._unready_lock:
            if not self._claims.is_ready(pod):
                self._unready[pod["metadata"]["uid"]] = pod
                return
        self._queue.put(pod)

    def _claim_created(self) -> None:
        with self._unready_lock:
            waiting = list(self._unready.values())
            self._unready.clear()
        for pod in waiting:
            self._put(pod)

    def _pod_gone(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        with self._unready_lock:
            self._unready.pop(uid, None)
        self._queue.remove(uid)
        if self._cache.gone(uid):
            self._queue.changed(Event.POD)

    def _run(self) -> None:
        self._nodes.wait_synced(60)
        self._pods.wait_synced(60)
        self._claims.wait_synced(60)
        while (pod := self._queue.pop()) is not None:
            claims = self._claims.begin(pod)
            chosen = self._choose(pod, claims)
            if isinstance(chosen, Unschedulable):
                if isinstance(claims, PodClaims) and not chosen.error:
                    claims.give_up()
                self._refuse(pod, chosen)
                continue
            reserved = claims if isinstance(claims, PodClaims) else None
            if reserved is not None:
                reserved.reserve(chosen)
            self._cache.assume(pod, chosen)
            self._binders.submit(self._bind, pod, chosen, reserved)

    def _choose(self, pod: Raw, claims: PodClaims | Blocked | None) -> str | Unschedulable:
        """Return the name of the node with the highest score, or the reason why there is no node.

        If several nodes have the highest score, return the first of their names in alphabetical order.
        """
        snapshot = self._cache.snapshot()
        if not snapshot:
            return Unschedulable("no nodes available to schedule pods")
        if isinstance(claims, Blocked):
            reason = f"0/{len(snapshot)} nodes are available: {claims.reason}."
            return Unschedulable(reason, wanted=_CLAIM_EVENTS)
        try:
            filtered = self._filter(pod, claims, snapshot)
            scores = dict(filtered.scores)
            for extender in self._extenders:
                if scores and extender.manages(pod):
                    answer = extender.filter(pod, scores)
                    for name, reason in answer.failed.items():
                        filtered.refuse(name, [reason], ALL_EVENTS)
                    added = extender.prioritize(pod, answer.nodes) if answer.nodes else {}
                    scores = {name: scores[name] + added.get(name, 0) for name in answer.nodes}
        except ExtenderError as error:
            return Unschedulable(str(error), error=True)
        except AllocationError as error:
            return Unschedulable(f'running Filter plugin "DynamicResources": {error}', error=True)
        if not scores:
            return Unschedulable(fit.message(filtered.reasons, len(snapshot)), wanted=frozenset(filtered.wanted))
        return min(scores, key=lambda name: (-scores[name], name))

    def _filter(
        self, pod: Raw, claims: PodClaims | None, snapshot: Sequence[tuple[Raw, Mapping[str, int]]]
    ) -> "_Filtered":
        """Call the filters for all nodes. Raises AllocationError."""
        result = _Filtered()
        for node, reserved in snapshot:
            name = node["metadata"]["name"]
            own = claims.is_counted(node) if claims is not None else None
            counted = partial(_is_counted, self._ignored, own)
            found = fit.fits(pod, node, dict(reserved), counted=counted)
            if found:
                result.refuse(name, found, _FIT_EVENTS)
            elif claims is not None and (missing := claims.filter(node)):
                result.refuse(name, missing, _CLAIM_EVENTS)
            else:
                result.scores[name] = _least_allocated(pod, node, reserved)
        return result

    def _refuse(self, pod: Raw, refusal: Unschedulable) -> None:
        """Report the refusal as an Event and in the condition PodScheduled, then put the pod back into the queue."""
        meta = pod["metadata"]
        self._events.warn(_reference(pod), "FailedScheduling", fit.as_event(refusal.message))
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulerError" if refusal.error else "Unschedulable",
            "message": refusal.message,
        }
        known = (pod.get("status") or {}).get("conditions") or ()
        if not any(condition.items() <= dict(row).items() for row in known):
            body = {"metadata": {"uid": meta["uid"]}, "status": {"conditions": [condition]}}
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
            try:
                self._api.patch(path, body, _STRATEGIC_PATCH)
            except (ApiError, Unreachable) as error:
                log.info("condition of pod %s not written: %s", meta["name"], error)
        self._queue.refused(meta["uid"], error=refusal.error, wanted=refusal.wanted)

    def _bind(self, pod: Raw, node: str, claims: PodClaims | None) -> None:
        """Write the pod's claims and post its Binding. If that fails, release its resources and refuse it."""
        meta = pod["metadata"]
        try:
            if claims is not None:
                claims.bind(node)
        except (ApiError, Unreachable, BindError) as error:
            self._unreserve(pod, claims, f'running PreBind plugin "DynamicResources": {_text(error)}')
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            self._api.create(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding", binding)
        except (ApiError, Unreachable) as error:
            self._unreserve(pod, claims, f'running Bind plugin "DefaultBinder": {_text(error)}')
            return
        key = f"{meta['namespace']}/{meta['name']}"
        self._events.record(_reference(pod), "Scheduled", f"Successfully assigned {key} to {node}")

    def _unreserve(self, pod: Raw, claims: PodClaims | None, reason: str) -> None:
        self._cache.forget(pod["metadata"]["uid"])
        if claims is not None:
            claims.unreserve()
        self._refuse(pod, Unschedulable(reason, error=True))


@dataclass(slots=True)
class _Filtered:
    """The result of the filters.

    Attributes:
        scores: The scores of the nodes that fit, by their names.
        reasons: The reasons of the others.
        wanted: The events after which the pod may fit one of the others.
    """

    scores: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, Sequence[str]] = field(default_factory=dict)
    wanted: set[Event] = field(default_factory=set)

    def refuse(self, node: str, reasons: Sequence[str], wanted: Iterable[Event]) -> None:
        self.reasons[node] = reasons
        self.wanted.update(wanted)


def _is_counted(ignored: Collection[str], own: Callable[[str], bool] | None, resource: str) -> bool:
    return resource not in ignored and (own is None or own(resource))


def _text(error: Exception) -> str:
    return str(getattr(error, "message", error))


def _least_allocated(pod: Raw, node: Raw, used: Mapping[str, int]) -> int:
    """Return the score that kube-scheduler gives with the strategy LeastAllocated, from 0 to 100.

    The score is the average of the percentages of CPU and memory that stay free if the pod is bound to the node.
    """
    there, wanted = allocatable(node), requests_of(pod)
    parts = [
        100 * max(0, total - used.get(name, 0) - wanted.get(name, 0)) // total
        for name in ("cpu", "memory")
        if (total := there.get(name, 0))
    ]
    return sum(parts) // len(parts) if parts else 0


def _reference(pod: Raw) -> dict[str, Any]:
    meta = pod["metadata"]
    return pod_reference(meta["namespace"], meta["name"], meta["uid"])
