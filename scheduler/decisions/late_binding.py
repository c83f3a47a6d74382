"""Late decisions: pods that are bound without cards get them now, on the node where they are, or are failed.

They were created with `nodeName`, or bound while the binding webhook could not be reached. Their containers wait
for the record at the node agent (docs/design/design.md, "Scheduler process").
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
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod, recorded
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider, pod_path
from scheduler.work_queue import MAX_PAUSE, Queue

log = logging.getLogger(__name__)

REASON = "MgpuNoCards"
_NO_CARDS_YET_SECONDS = 30.0
_RECUT_SECONDS = 120.0
"""How long a pod waits for its node's cards to be cut anew for it."""
_CONFLICTS = 5
_CLEAN_AT = 64


class LateDecisions:
    """A queue of uids and one thread. A uid stays until its pod is decided, failed or gone, whatever goes wrong.

    may_decide raises RetryLater while this process must not write. recut: whether a pod for which nothing is free may
    have it once its node's cards are cut anew, which is then seen to.
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
        recut: Callable[[GpuPod], bool] = lambda _: False,
    ) -> None:
        self._state, self._decider, self._api, self._settings = state, decider, api, settings
        self._warn, self._may_decide, self._clock, self._recut = warn, may_decide, clock, recut
        self._queue = Queue(clock)
        self._first_seen: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._clean_at = _CLEAN_AT

    def add(self, uid: str, after: float = 0.0) -> None:
        """Look at this pod in `after` seconds, or earlier if that was the plan already."""
        self._queue.add(uid, after, self._namespace(uid))

    def _namespace(self, uid: str) -> str:
        """Return the tenant of a pod, so that the queue takes turns between tenants."""
        known = self._state.gpu_pod(uid)
        return "" if known is None else known.pod.namespace

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`, which must be followed by `wake`."""
        self._queue.run(self.look_at, stop)

    def wake(self) -> None:
        self._queue.wake()

    def work(self) -> None:
        """Do all that is due now."""
        while (uid := self._queue.next()) is not None:
            self.look_at(uid)

    def look_at(self, uid: str) -> None:
        """One attempt; what did not work is tried again later, with growing pauses."""
        try:
            self._may_decide()
        except RetryLater:
            return  # whoever may decide next starts with all pods that are undecided
        try:
            again = self._attempt(uid)
        except (ApiError, Unreachable, RetryLater) as error:
            log.warning("late decision put off: %s", error, extra={"pod": uid})
            self._queue.add_again(uid, self._namespace(uid))
            return
        except Exception:
            # The thread's outermost loop: one odd pod must not keep the others waiting.
            log.exception("late decision failed", extra={"pod": uid})
            again = MAX_PAUSE
        if again:
            self.add(uid, again)
            return
        self._queue.done(uid)
        self._first_seen.pop(uid, None)

    def _attempt(self, uid: str) -> float:
        """Seconds until the pod must be looked at again, 0: done."""
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
        """The cards of the pod, why it fails, or in how many seconds to look again."""
        pod = known.pod
        if pod.uid in self._failed:
            return self._failed[pod.uid]  # its controller has replaced it by now: no second life
        if known.request is None:
            return "; ".join(map(str, known.problems))
        view = self._state.view(pod.node, pod.uid)
        waited = self._clock() - self._first_seen.setdefault(pod.uid, self._clock())
        if view.node is None or (not (view.cards or view.others) and waited < _NO_CARDS_YET_SECONDS):
            self._recut(known)
            return 1.0  # a node that is starting: Kubernetes itself removes pods of nodes that never come
        decision = self._decider.decide(known, pod.node)
        if isinstance(decision, Reservation):
            return decision
        return 1.0 if waited < _RECUT_SECONDS and self._recut(known) else str(decision)

    def _write(self, known: GpuPod, wanted: Reservation | str) -> None:
        pod = known.pod
        meta: dict[str, Any] = {"uid": pod.uid, "resourceVersion": known.version}
        path = pod_path(pod.namespace, pod.name)
        if isinstance(wanted, Reservation):
            # What does not count of the pod's annotations goes in the same write: it would break the new seal.
            stale = self._recorded(path) if known.finding else {}
            self._api.patch(path, {"metadata": {**meta, "annotations": {**stale, **wanted.annotations}}})
            metrics.LATE.labels("decided").inc()
            log.info("cards decided late", extra={"pod": pod.uid, "node": pod.node})
            return
        message = f"no cards on {pod.node}: {wanted}"
        status = {"phase": "Failed", "reason": REASON, "message": message}
        self._api.patch(f"{path}/status", {"metadata": meta, "status": status})
        metrics.LATE.labels("failed").inc()
        self._remember_failed(pod.uid, wanted)
        self._warn(pod_reference(pod.namespace, pod.name, pod.uid), REASON, message)

    def _remember_failed(self, uid: str, why: str) -> None:
        """Until the pod is deleted. Deleted ones are looked for once there are twice as many as the last time."""
        self._failed[uid] = why
        if len(self._failed) >= self._clean_at:
            self._failed = {uid: why for uid, why in self._failed.items() if self._state.gpu_pod(uid)}
            self._clean_at = max(_CLEAN_AT, 2 * len(self._failed))

    def _recorded(self, path: str) -> dict[str, None]:
        """Return a change that removes the whole record of the pod. It is not kept here, since it may be of any size.

        Where the pod has changed since it was decided on, the write that this is a part of is refused (409).
        """
        annotations = table_at(self._api.get(path), "metadata", "annotations")
        return {key: None for key in annotations if dialects.is_placement_annotation(key)}

    def _read(self, known: GpuPod) -> GpuPod | None:
        """The pod as it is now, if it still is without cards."""
        raw = self._api.get(pod_path(known.pod.namespace, known.pod.name))
        if raw["metadata"]["uid"] != known.pod.uid:
            return None
        fresh = read_gpu_pod(raw, self._settings, self._state.records)
        if fresh is None or fresh.pod.ended or fresh.pod.deleting or dialects.has_run(fresh.pod, fresh.request):
            return None
        return fresh if _without_record(fresh) else None


def _without_record(known: GpuPod) -> bool:
    try:
        return recorded(known) is None
    except BadObject:
        return True
