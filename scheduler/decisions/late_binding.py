"""Decides the cards of pods that are bound without any, on the node where they are, or sets their phase to Failed.

Such pods were created with `nodeName`, were bound while the binding webhook could not be reached, or have an invalid
allocation record. Their containers wait at the node agent for a valid record (docs/design/design.md, "Scheduler
process"). A pod that was set to Failed must never get cards afterwards, because its controller may have replaced it.
`scheduler.runtime` runs `LateDecisions` on a thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mgpu import dialects
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import pod_reference
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.raw_objects import table_at
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Warn
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod, recorded_shares
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider, pod_path
from scheduler.work_queue import MAX_PAUSE, Queue

log = logging.getLogger(__name__)

REASON = "MgpuNoCards"
_NO_CARDS_YET_SECONDS = 30.0
"""The longest time that a pod waits for its node to have cards. The agent of the node may just be starting."""
_PARTITION_SECONDS = 120.0
"""The longest time that a pod waits for the cards of its node to be partitioned for it."""
_MAX_CONFLICTS = 5
"""The maximum number of successive attempts to decide and write, if the pod changes in between each time."""
_FIRST_CLEANUP_SIZE = 64
"""The number of remembered failed pods at which those that were deleted are forgotten for the first time."""


class PartitionPlanner(Protocol):
    """The part of `scheduler.partitioning.partition_controller.PartitionController` that late binding uses."""

    def can_serve(self, gpu_pod: GpuPod, /) -> bool:
        """Return whether a plan may create the slices of the pod on its node. If so, request that plan."""


class LateDecisions:
    """A work queue of the UIDs of pods, for one consumer thread. Any thread may call `add` and `wake`.

    A UID stays in the queue until the cards of the pod are decided, its phase is set to Failed, or it is deleted.

    Args:
        api: An API client that writes only while this replica leads (`mgpu.kube.fence`).
        warn: Creates an Event of type Warning.
        may_decide: Raises RetryLater while this replica must not decide.
        planner: Plans partitions for pods that request slices.
    """

    def __init__(
        self,
        state: ClusterCache,
        decider: Decider,
        api: Api,
        settings: Settings,
        warn: Warn,
        may_decide: Callable[[], None],
        planner: PartitionPlanner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._decider = decider
        self._api = api
        self._settings = settings
        self._warn = warn
        self._may_decide = may_decide
        self._planner = planner
        self._clock = clock
        self._queue = Queue(clock)
        self._first_seen: dict[str, float] = {}
        self._failed: dict[str, str] = {}  # By UID, the reason for which the pod was set to Failed.
        self._cleanup_size = _FIRST_CLEANUP_SIZE

    def add(self, uid: str, after: float = 0.0) -> None:
        """Queue this pod for `after` seconds from now, or leave it if it is queued for an earlier time."""
        self._queue.add(uid, after, self._namespace(uid))

    def _namespace(self, uid: str) -> str:
        """Return the namespace of a pod as its group in the queue, or "" if the pod is not known."""
        gpu_pod = self._state.gpu_pod(uid)
        return "" if gpu_pod is None else gpu_pod.pod.namespace

    def run(self, stop: threading.Event) -> None:
        """Process the pods that are due until `stop` is set. Call `wake` after setting it."""
        self._queue.run(self.process, stop)

    def wake(self) -> None:
        """Make `run` check its argument `stop`."""
        self._queue.wake()

    def work(self) -> None:
        """Process all pods that are due, and return."""
        while (uid := self._queue.next()) is not None:
            self.process(uid)

    def process(self, uid: str) -> None:
        """Process one pod. If the attempt fails, retry it later, with growing pauses."""
        try:
            self._may_decide()
        except RetryLater:
            return  # The replica that decides next adds all undecided pods to its queue.
        try:
            again = self._attempt(uid)
        except (ApiError, Unreachable, RetryLater) as error:
            log.warning("late binding will be retried: %s", error, extra={"pod": uid})
            self._queue.add_again(uid, self._namespace(uid))
            return
        except Exception:
            # Nothing outside of this function handles errors. An error with one pod must not delay the others.
            log.exception("late binding failed", extra={"pod": uid})
            again = MAX_PAUSE
        if again:
            self.add(uid, again)
            return
        self._queue.done(uid)
        self._first_seen.pop(uid, None)

    def _attempt(self, uid: str) -> float:
        """Make one attempt. Return the seconds until the next attempt, or 0 if the pod needs none."""
        gpu_pod = self._state.gpu_pod(uid)
        for _ in range(_MAX_CONFLICTS):
            if gpu_pod is None or not self._state.is_undecided(uid):
                return 0
            result = self._decide(gpu_pod)
            if isinstance(result, float):
                return result
            try:
                self._write(gpu_pod, result)
            except ApiError as error:
                if error.status == 404:
                    return 0  # The pod was deleted. The watch will deliver its deletion.
                if error.status != 409:
                    raise
                gpu_pod = self._read(gpu_pod)
            else:
                return 0
        raise RetryLater("the pod changes faster than its cards can be written")

    def _decide(self, gpu_pod: GpuPod) -> Reservation | str | float:
        """Return the cards of the pod, the reason to set its phase to Failed, or the seconds until the next attempt."""
        pod = gpu_pod.pod
        if pod.uid in self._failed:
            # The phase Failed was written before, so the pod must not get cards. A kubelet may have overwritten it.
            return self._failed[pod.uid]
        if gpu_pod.request is None:
            return "; ".join(map(str, gpu_pod.problems))
        snapshot = self._state.node_snapshot(pod.node, pod.uid)
        waited = self._clock() - self._first_seen.setdefault(pod.uid, self._clock())
        has_cards = bool(snapshot.cards or snapshot.other_devices)
        if snapshot.node is None or (not has_cards and waited < _NO_CARDS_YET_SECONDS):
            self._planner.can_serve(gpu_pod)
            return 1.0  # The node may be starting. Kubernetes itself deletes pods of nodes that do not exist.
        decision = self._decider.decide(gpu_pod, pod.node)
        if isinstance(decision, Reservation):
            return decision
        if waited < _PARTITION_SECONDS and self._planner.can_serve(gpu_pod):
            return 1.0
        return str(decision)

    def _write(self, gpu_pod: GpuPod, result: Reservation | str) -> None:
        """Write the pod's cards, or the phase Failed with the reason."""
        pod = gpu_pod.pod
        meta: dict[str, Any] = {"uid": pod.uid, "resourceVersion": gpu_pod.version}
        path = pod_path(pod.namespace, pod.name)
        if isinstance(result, Reservation):
            # The same write removes an invalid record, because its annotations would break the seal of the new record.
            removed = self._recorded(path) if gpu_pod.finding else {}
            self._api.patch(path, {"metadata": {**meta, "annotations": {**removed, **result.annotations}}})
            metrics.LATE.labels("decided").inc()
            log.info("cards decided after the binding", extra={"pod": pod.uid, "node": pod.node})
            return
        message = f"no cards on {pod.node}: {result}"
        status = {"phase": "Failed", "reason": REASON, "message": message}
        self._api.patch(f"{path}/status", {"metadata": meta, "status": status})
        metrics.LATE.labels("failed").inc()
        self._remember_failed(pod.uid, result)
        self._warn(pod_reference(pod.namespace, pod.name, pod.uid), REASON, message)

    def _remember_failed(self, uid: str, reason: str) -> None:
        """Remember a failed pod until it is deleted. Whenever the number of pods has doubled, forget deleted ones."""
        self._failed[uid] = reason
        if len(self._failed) >= self._cleanup_size:
            self._failed = {uid: reason for uid, reason in self._failed.items() if self._state.gpu_pod(uid)}
            self._cleanup_size = max(_FIRST_CLEANUP_SIZE, 2 * len(self._failed))

    def _recorded(self, path: str) -> dict[str, None]:
        """Return the placement annotations of the pod, each with the value None, so that a patch removes them.

        They are read from the API server, because the cache does not store invalid records, which may have any size.
        The patch contains the resourceVersion on which the decision is based, so the API server refuses it (409) if the
        pod has changed since.
        """
        annotations = table_at(self._api.get(path), "metadata", "annotations")
        return {key: None for key in annotations if dialects.is_placement_annotation(key)}

    def _read(self, gpu_pod: GpuPod) -> GpuPod | None:
        """Return the pod as the API server has it, or None if it no longer waits for cards."""
        raw = self._api.get(pod_path(gpu_pod.pod.namespace, gpu_pod.pod.name))
        if raw["metadata"]["uid"] != gpu_pod.pod.uid:
            return None
        fresh = read_gpu_pod(raw, self._settings, self._state.records)
        if fresh is None or fresh.pod.ended or fresh.pod.deleting or dialects.has_run(fresh.pod, fresh.request):
            return None
        return fresh if _without_record(fresh) else None


def _without_record(gpu_pod: GpuPod) -> bool:
    try:
        return recorded_shares(gpu_pod) is None
    except BadObject:
        return True
