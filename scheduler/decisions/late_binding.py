"""Late binding: pods that are bound without cards get them on the node where they are, or fail.

Such pods were created with `nodeName`, or bound while the binding webhook could not be reached. Their containers wait
at the node agent for the allocation record (docs/design/design.md, "Scheduler process"). `ClusterCache` reports each
such pod, and `scheduler/runtime.py` runs the one thread that decides.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

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
"""How long a pod waits for a node without cards, whose agent may just be starting."""
_RECUT_SECONDS = 120.0
"""How long a pod waits until its node's cards are partitioned for it."""
_CONFLICTS = 5
_CLEAN_AT = 64


class LateDecisions:
    """A work queue of pods by UID, for one thread. A UID stays in it until the pod is decided, failed or deleted.

    Args:
        api: Writes only while this replica leads (`mgpu.kube.fence`).
        warn: Sends an Event.
        may_decide: Raises RetryLater while this replica must not decide.
        can_repartition: Plans a partitioning that gives the pod its slices, and tells whether there is one.
    """

    def __init__(
        self,
        state: ClusterCache,
        decider: Decider,
        api: Api,
        settings: Settings,
        warn: Warn,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        can_repartition: Callable[[GpuPod], bool] = lambda _: False,
    ) -> None:
        self._state = state
        self._decider = decider
        self._api = api
        self._settings = settings
        self._warn = warn
        self._may_decide = may_decide
        self._clock = clock
        self._can_repartition = can_repartition
        self._queue = Queue(clock)
        self._first_seen: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._clean_at = _CLEAN_AT

    def add(self, uid: str, after: float = 0.0) -> None:
        """Process this pod in `after` seconds, or earlier if that is due already."""
        self._queue.add(uid, after, self._namespace(uid))

    def _namespace(self, uid: str) -> str:
        """Return the namespace of a pod, so that the queue takes turns between namespaces."""
        known = self._state.gpu_pod(uid)
        return "" if known is None else known.pod.namespace

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, which must be followed by `wake`."""
        self._queue.run(self.process, stop)

    def wake(self) -> None:
        self._queue.wake()

    def work(self) -> None:
        """Process all that is due now."""
        while (uid := self._queue.next()) is not None:
            self.process(uid)

    def process(self, uid: str) -> None:
        """Process one pod. What fails is tried again later, with growing pauses."""
        try:
            self._may_decide()
        except RetryLater:
            return  # the replica that decides next begins with all undecided pods
        try:
            again = self._attempt(uid)
        except (ApiError, Unreachable, RetryLater) as error:
            log.warning("late binding will be retried: %s", error, extra={"pod": uid})
            self._queue.add_again(uid, self._namespace(uid))
            return
        except Exception:
            # The outermost handler of the thread: one odd pod must not keep the others waiting.
            log.exception("late binding failed", extra={"pod": uid})
            again = MAX_PAUSE
        if again:
            self.add(uid, again)
            return
        self._queue.done(uid)
        self._first_seen.pop(uid, None)

    def _attempt(self, uid: str) -> float:
        """Make one attempt. Returns the seconds until the next one, 0 where the pod needs none."""
        known = self._state.gpu_pod(uid)
        for _ in range(_CONFLICTS):
            if known is None or not self._state.is_undecided(uid):
                return 0
            wanted = self._wanted(known)
            if isinstance(wanted, float):
                return wanted
            try:
                self._write(known, wanted)
            except ApiError as error:
                if error.status == 404:
                    return 0  # its deletion is on the way here
                if error.status != 409:
                    raise
                known = self._read(known)
            else:
                return 0
        raise RetryLater("the pod changes faster than it can be written")

    def _wanted(self, known: GpuPod) -> Reservation | str | float:
        """Return the cards of the pod, or why it fails, or in how many seconds to try again."""
        pod = known.pod
        if pod.uid in self._failed:
            # Its failure is written already, and its controller may have replaced it: it must not get cards after all.
            return self._failed[pod.uid]
        if known.request is None:
            return "; ".join(map(str, known.problems))
        view = self._state.node_snapshot(pod.node, pod.uid)
        waited = self._clock() - self._first_seen.setdefault(pod.uid, self._clock())
        if view.node is None or (not (view.cards or view.other_devices) and waited < _NO_CARDS_YET_SECONDS):
            self._can_repartition(known)
            return 1.0  # the node may be starting; Kubernetes itself removes pods of nodes that do not exist
        decision = self._decider.decide(known, pod.node)
        if isinstance(decision, Reservation):
            return decision
        return 1.0 if waited < _RECUT_SECONDS and self._can_repartition(known) else str(decision)

    def _write(self, known: GpuPod, wanted: Reservation | str) -> None:
        pod = known.pod
        meta: dict[str, Any] = {"uid": pod.uid, "resourceVersion": known.version}
        path = pod_path(pod.namespace, pod.name)
        if isinstance(wanted, Reservation):
            # A record that does not count is removed in the same write, since it would break the seal of the new one.
            stale = self._recorded(path) if known.finding else {}
            self._api.patch(path, {"metadata": {**meta, "annotations": {**stale, **wanted.annotations}}})
            metrics.LATE.labels("decided").inc()
            log.info("cards decided after the binding", extra={"pod": pod.uid, "node": pod.node})
            return
        message = f"no cards on {pod.node}: {wanted}"
        status = {"phase": "Failed", "reason": REASON, "message": message}
        self._api.patch(f"{path}/status", {"metadata": meta, "status": status})
        metrics.LATE.labels("failed").inc()
        self._remember_failed(pod.uid, wanted)
        self._warn(pod_reference(pod.namespace, pod.name, pod.uid), REASON, message)

    def _remember_failed(self, uid: str, reason: str) -> None:
        """Remember it until the pod is deleted. Deleted pods are dropped whenever the number has doubled."""
        self._failed[uid] = reason
        if len(self._failed) >= self._clean_at:
            self._failed = {uid: reason for uid, reason in self._failed.items() if self._state.gpu_pod(uid)}
            self._clean_at = max(_CLEAN_AT, 2 * len(self._failed))

    def _recorded(self, path: str) -> dict[str, None]:
        """Return the annotations of the pod's record, each with None, so that a patch removes them.

        They are read from the API, since the cache does not keep a record of any size. The patch names the
        resourceVersion that was decided on, so it is refused (409) if the pod has changed meanwhile.
        """
        annotations = table_at(self._api.get(path), "metadata", "annotations")
        return {key: None for key in annotations if dialects.is_placement_annotation(key)}

    def _read(self, known: GpuPod) -> GpuPod | None:
        """Read the pod again. Returns None where it no longer waits for cards."""
        raw = self._api.get(pod_path(known.pod.namespace, known.pod.name))
        if raw["metadata"]["uid"] != known.pod.uid:
            return None
        fresh = read_gpu_pod(raw, self._settings, self._state.records)
        if fresh is None or fresh.pod.ended or fresh.pod.deleting or dialects.has_run(fresh.pod, fresh.request):
            return None
        return fresh if _without_record(fresh) else None


def _without_record(known: GpuPod) -> bool:
    try:
        return recorded_shares(known) is None
    except BadObject:
        return True
