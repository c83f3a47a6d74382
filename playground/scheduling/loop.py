"""Runs the scheduling loop, which chooses the best node for one pod after the other.

A thread pool posts the Bindings, so the loop does not wait for them. `playground.cluster` starts a `Scheduling`.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.compute_resources import allocatable, requests_of
from playground import fit
from playground.scheduling.extender_client import Extender, ExtenderError
from playground.scheduling.queue import Cache, Queue

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
NAME = "default-scheduler"
"""The `schedulerName` of pods that do not set one."""
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_BINDERS = 16
"""The number of threads that post Bindings."""


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """The result for a pod for which no node was chosen.

    Attributes:
        message: The reason.
        error: Whether something failed, such as a call of an extender. Otherwise the pod fits no node.
    """

    message: str
    error: bool = False


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
        self._nodes = Reflector(api, "/api/v1/nodes", self._node_changed, self._node_gone)
        self._pods = Reflector(api, "/api/v1/pods", self._pod_changed, self._pod_gone)
        self._thread = threading.Thread(target=self._run, name="scheduling", daemon=True)

    def start(self) -> None:
        self._nodes.start()
        self._pods.start()
        self._thread.start()

    def stop(self) -> None:
        self._nodes.stop()
        self._pods.stop()
        self._queue.close()
        if self._thread.is_alive():
            self._thread.join(10)
        self._binders.shutdown(wait=True, cancel_futures=True)

    def _node_changed(self, node: Raw) -> None:
        if self._cache.set_node(node):
            self._queue.changed()

    def _node_gone(self, node: Raw) -> None:
        self._cache.remove_node(node["metadata"]["name"])

    def _pod_changed(self, pod: Raw) -> None:
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            self._pod_gone(pod)
        elif spec.get("nodeName"):
            self._queue.remove(uid)
            self._cache.bound(pod)
        elif pod["metadata"].get("deletionTimestamp"):
            self._queue.remove(uid)
        elif spec.get("schedulerName", NAME) == self._scheduler and not spec.get("schedulingGates"):
            self._queue.put(pod)

    def _pod_gone(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        self._queue.remove(uid)
        if self._cache.gone(uid):
            self._queue.changed()

    def _run(self) -> None:
        self._nodes.wait_synced(60)
        self._pods.wait_synced(60)
        while (pod := self._queue.pop()) is not None:
            chosen = self._choose(pod)
            if isinstance(chosen, Unschedulable):
                self._refuse(pod, chosen)
                continue
            self._cache.assume(pod, chosen)
            self._binders.submit(self._bind, pod, chosen)

    def _choose(self, pod: Raw) -> str | Unschedulable:
        """Return the name of the node with the highest score, or the reason why there is no node.

        If several nodes have the highest score, return the first of their names in alphabetical order.
        """
        snapshot = self._cache.snapshot()
        if not snapshot:
            return Unschedulable("no nodes available to schedule pods")
        reasons: dict[str, Sequence[str]] = {}
        scores: dict[str, int] = {}
        for node, reserved in snapshot:
            name = node["metadata"]["name"]
            found = fit.fits(pod, node, dict(reserved), counted=lambda resource: resource not in self._ignored)
            if found:
                reasons[name] = found
            else:
                scores[name] = _least_allocated(pod, node, reserved)
        try:
            for extender in self._extenders:
                if scores and extender.manages(pod):
                    filtered = extender.filter(pod, scores)
                    reasons |= {name: [reason] for name, reason in filtered.failed.items()}
                    added = extender.prioritize(pod, filtered.nodes) if filtered.nodes else {}
                    scores = {name: scores[name] + added.get(name, 0) for name in filtered.nodes}
        except ExtenderError as error:
            return Unschedulable(str(error), error=True)
        if not scores:
            return Unschedulable(fit.message(reasons, len(snapshot)))
        return min(scores, key=lambda name: (-scores[name], name))

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
        self._queue.refused(meta["uid"], error=refusal.error)

    def _bind(self, pod: Raw, node: str) -> None:
        """Post the Binding of the pod. If that fails, release the pod's resources and refuse the pod."""
        meta = pod["metadata"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            self._api.create(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding", binding)
        except (ApiError, Unreachable) as error:
            self._cache.forget(meta["uid"])
            reason = getattr(error, "message", error)
            self._refuse(pod, Unschedulable(f'running Bind plugin "DefaultBinder": {reason}', error=True))
            return
        key = f"{meta['namespace']}/{meta['name']}"
        self._events.record(_reference(pod), "Scheduled", f"Successfully assigned {key} to {node}")


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
