"""The loop: one pod after the other to the best node that fits; its Binding is posted beside."""

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import Recorder, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.requests import allocatable, requests_of
from playground import fit
from playground.scheduling.cache import Cache
from playground.scheduling.extender import Extender, ExtenderError
from playground.scheduling.queue import Queue

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]
NAME = "default-scheduler"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_BINDERS = 16


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """No node for the pod, in the words of its Event. error: a failure rather than a refusal."""

    message: str
    error: bool = False


class Scheduling:
    """Schedules the pods that name `scheduler`. Start once; `stop` ends it.

    backoff: (first, longest) in seconds.
    """

    def __init__(
        self,
        api: Api,
        extenders: Sequence[Extender] = (),
        *,
        scheduler: str = NAME,
        backoff: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        self._api, self._extenders, self._scheduler = api, tuple(extenders), scheduler
        self._ignored = frozenset(name for extender in extenders for name in extender.ignored)
        self._cache, self._queue = Cache(), Queue(*backoff)
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
        """The node with the highest score; of equal ones the first by name."""
        snapshot = self._cache.snapshot()
        if not snapshot:
            return Unschedulable("no nodes available to schedule pods")
        reasons: dict[str, Sequence[str]] = {}
        feasible: dict[str, Raw] = {}
        used: dict[str, Mapping[str, int]] = {}
        for node, reserved in snapshot:
            name = node["metadata"]["name"]
            found = fit.fits(pod, node, dict(reserved), counted=lambda resource: resource not in self._ignored)
            if found:
                reasons[name] = found
            else:
                feasible[name], used[name] = node, reserved
        scores = {name: _least_allocated(pod, node, used[name]) for name, node in feasible.items()}
        try:
            for extender in self._extenders:
                if feasible and extender.interested(pod):
                    feasible = self._extended(extender, pod, feasible, reasons, scores)
        except ExtenderError as error:
            return Unschedulable(str(error), error=True)
        if not feasible:
            return Unschedulable(fit.message(reasons, len(snapshot)))
        return min(feasible, key=lambda name: (-scores[name], name))

    def _extended(
        self,
        extender: Extender,
        pod: Raw,
        feasible: Mapping[str, Raw],
        reasons: dict[str, Sequence[str]],
        scores: dict[str, int],
    ) -> dict[str, Raw]:
        """What the extender leaves of `feasible`; adds its reasons and scores. Raises ExtenderError."""
        try:
            filtered = extender.filter(pod, list(feasible.values()))
        except ExtenderError:
            if extender.ignorable:
                return dict(feasible)
            raise
        reasons.update({name: [reason] for name, reason in {**filtered.failed, **filtered.hopeless}.items()})
        remaining = {name: feasible[name] for name in filtered.nodes}
        if remaining:
            for name, score in extender.prioritize(pod, list(remaining.values())).items():
                scores[name] = scores.get(name, 0) + score
        return remaining

    def _refuse(self, pod: Raw, why: Unschedulable) -> None:
        """Say so in an Event and in the pod's condition, then let it wait."""
        meta = pod["metadata"]
        self._events.warn(_reference(pod), "FailedScheduling", fit.as_event(why.message))
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulerError" if why.error else "Unschedulable",
            "message": why.message,
        }
        known = (pod.get("status") or {}).get("conditions") or ()
        if not any(condition.items() <= dict(row).items() for row in known):
            body = {"metadata": {"uid": meta["uid"]}, "status": {"conditions": [condition]}}
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
            try:
                self._api.patch(path, body, _STRATEGIC_PATCH)
            except (ApiError, Unreachable) as error:
                log.info("condition of pod %s not written: %s", meta["name"], error)
        self._queue.refused(meta["uid"], error=why.error)

    def _bind(self, pod: Raw, node: str) -> None:
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
            why = getattr(error, "message", error)
            self._refuse(pod, Unschedulable(f'running Bind plugin "DefaultBinder": {why}', error=True))
            return
        key = f"{meta['namespace']}/{meta['name']}"
        self._events.record(_reference(pod), "Scheduled", f"Successfully assigned {key} to {node}")


def _least_allocated(pod: Raw, node: Raw, used: Mapping[str, int]) -> int:
    """0..100: the free part of cpu and memory after the pod, on average (NodeResourcesLeastAllocated)."""
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
