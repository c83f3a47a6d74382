"""Lists the pods that have no cards yet, with the reasons, and the gangs that are not complete, for the web page.

A reason comes from the filter, which may take long for a pod of many containers on thousands of nodes. So a thread
computes the reasons, and each answer contains those that are ready. The filter must not be the one that answers
kube-scheduler: showing a pod must not use up the effort that its namespace is allowed. `feed` calls `Waiting`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from mgpu.model.gangs import gang_name
from mgpu.model.gpu_requests import GpuRequest
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.mtgpupod_tables import read_mtgpupods
from mgpu.presentation.request_text import describe_gates
from scheduler.api.page.page_data import Json, gang_line_json, mtgpupod_json, pod_json, reason_json, why_json
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, scheduling_order
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks

log = logging.getLogger(__name__)

MOST = 500
"""The most pods that are listed. The others are only counted."""
MOST_GANGS = 20
"""The most gangs that are listed. The others are only counted."""
STALE_SECONDS = 30.0
"""The time after which a reason is renewed even if no node has changed. Nominations change the free cards without
changing a node."""
_FIRST_PAUSE_RATIO = 1
"""The `Pace.pause_ratio` while a reason is computed for the first time and viewers wait for it."""
_RENEWAL_PAUSE_RATIO = 9
"""The ratio while a reason is renewed. The pauses are long, because a busy cluster renews reasons all the time."""

Raw = Mapping[str, Any]
Key = tuple[GpuRequest, int] | GangView
"""What a reason is for: pods with an equal request and priority, or a gang in its present state, without its outlook.
"""


class _Reason(NamedTuple):
    """The reason why a pod or a gang waits.

    Attributes:
        version: The version of the nodes from which the reason was computed (`Waiting.json`).
        at: When it was computed, by the clock of `Waiting`.
        json: The reason as `why_json` or `gang_line_json` returns it.
    """

    version: int
    at: float
    json: Json


def in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="reasons", daemon=True).start()


class Waiting:
    """The list of waiting pods. Only one thread at a time may call `json`.

    `_lock` guards the reasons and the requests for reasons. `_working` is held while a thread computes reasons.

    Args:
        gangs: Uses the same filter.
        pace: The `Pace` of the filter. This class changes its `pause_ratio`.
        in_background: Runs a function without waiting for it.
    """

    def __init__(
        self,
        state: ClusterCache,
        filter_: Filter,
        gangs: GangOutlooks,
        pace: Pace,
        in_background: Callable[[Callable[[], None]], None] = in_a_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._filter = filter_
        self._gangs = gangs
        self._clock = clock
        self._pace = pace
        self._in_background = in_background
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._reasons: dict[Key, _Reason] = {}
        self._due: deque[tuple[Key, GpuPod | GangView]] = deque()
        self._names: Sequence[str] = ()
        self._version = 0

    def json(self, names: Sequence[str], version: int) -> Json:
        """Return `{"total", "pods", "whys", "gangs", "moreGangs"}`.

        `total` is the number of all waiting pods, `pods` lists at most MOST of them, and `whys` lists the reasons. Each
        pod has the position of its reason in `whys`, or -1 while the reason is not ready. `gangs` lists at most
        MOST_GANGS of the gangs that are not complete, and `moreGangs` is the number of the others.

        Args:
            names: The names of all nodes.
            version: The version of the nodes, a number that changes whenever one of them changes.
        """
        waiting = [pod for pod in self._state.gpu_pods() if not pod.pod.node and not pod.pod.ended]
        undecided = (self._state.gpu_pod(uid) for uid in self._state.undecided_pods())
        mtgpupods = [raw for raw in self._state.mtgpupods.objects() if _has_no_card(raw)]
        listed = [*(pod for pod in undecided if pod), *nsmallest(MOST, waiting, key=scheduling_order)][:MOST]
        gangs = self._gangs.incomplete(waiting)
        ready = self._request_reasons(listed, gangs[:MOST_GANGS], names, version)
        reasons = _NumberedReasons()
        rows = []
        incomplete = {view.name for view in gangs}
        for gpu_pod in listed:
            key, reason = _reason_of(gpu_pod, ready)
            name = gang_name(gpu_pod.pod)
            gang = str(name) if name in incomplete else ""
            rows.append(pod_json(gpu_pod.pod, gpu_pod.request, reasons.number(key, reason) if reason else -1, gang))
        for view in read_mtgpupods(mtgpupods[: MOST - len(rows)], ()).views:
            text = (
                ": ".join(filter(None, (view.reason, view.message))) or "the status of the MtgpuPod has no reason yet"
            )
            rows.append(mtgpupod_json(view, reasons.number(text, reason_json(text))))
        total = len(waiting) + len(self._state.undecided_pods()) + len(mtgpupods)
        return {
            "total": total,
            "pods": rows,
            "whys": reasons.rows,
            "gangs": [ready[view].json if view in ready else gang_line_json(view) for view in gangs[:MOST_GANGS]],
            "moreGangs": max(0, len(gangs) - MOST_GANGS),
        }

    def _request_reasons(
        self, listed: Iterable[GpuPod], gangs: Iterable[GangView], names: Sequence[str], version: int
    ) -> Mapping[Key, _Reason]:
        """Return the reasons that are ready, and request the others: first those that are missing, then outdated ones.

        The outdated reasons that were computed first are requested first.
        """
        # The filter rejects gated pods on all nodes, and pods without gates may have the same key.
        wanted: dict[Key, GpuPod | GangView] = {
            (pod.request, pod.pod.priority): pod
            for pod in listed
            if pod.request and not pod.pod.node and not pod.pod.gated
        }
        wanted |= {view: view for view in gangs if view.waiting and view.needed is not None}
        now = self._clock()
        with self._lock:
            self._reasons = {key: reason for key in wanted if (reason := self._reasons.get(key))}
            rows = [(self._reasons.get(key), key, subject) for key, subject in wanted.items()]
            stale = [row for row in rows if not _is_current(row[0], version, now)]
            stale.sort(key=lambda row: row[0].at if row[0] else -1.0)
            self._due = deque((key, subject) for _, key, subject in stale)
            self._names = names
            self._version = version
        if stale and self._working.acquire(blocking=False):
            self._in_background(self._work)
        with self._lock:
            return dict(self._reasons)

    def _work(self) -> None:
        """Compute reasons until none is due. Meanwhile, each call of `json` replaces the list of due reasons."""
        try:
            while True:
                with self._lock:
                    if not self._due:
                        return
                    key, subject = self._due.popleft()
                    names = self._names
                    version = self._version
                    self._pace.pause_ratio = _RENEWAL_PAUSE_RATIO if key in self._reasons else _FIRST_PAUSE_RATIO
                reason = self._compute(subject, names)
                with self._lock:
                    self._reasons[key] = _Reason(version, self._clock(), reason)
                self._pace()
        finally:
            self._working.release()

    def _compute(self, subject: GpuPod | GangView, names: Sequence[str]) -> Json:
        try:
            if isinstance(subject, GangView):
                return gang_line_json(self._gangs.with_outlook(subject, names), int(time.time()))
            return why_json(self._filter.filter(subject, names), int(time.time()))
        except Exception:
            # This is the outermost handler of the thread. An error with one pod must not prevent the other reasons.
            if isinstance(subject, GangView):
                log.exception("cannot find out why the gang waits", extra={"gang": str(subject.name)})
                return gang_line_json(subject)
            log.exception("cannot find out why the pod waits", extra={"pod": subject.pod.key})
            return reason_json("unknown: an internal error occurred; the scheduler's log has the details")


class _NumberedReasons:
    """The different reasons in one answer, each with its position.

    Attributes:
        rows: The reasons in the order of their positions.
    """

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._numbers: dict[object, int] = {}

    def number(self, key: object, reason: Json) -> int:
        """Return the position of the reason. Add the reason if there is none with this key yet."""
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(reason)
        return self._numbers[key]


def _reason_of(gpu_pod: GpuPod, reasons: Mapping[Key, _Reason]) -> tuple[object, Json | None]:
    """Return a key that is the same for equal reasons, and the reason, or None if the reason is not ready."""
    if gpu_pod.pod.node:
        text = f"it is bound to {gpu_pod.pod.node}, and its cards are not decided yet"
        return text, reason_json(text)
    if gpu_pod.request is None:
        text = "; ".join(map(str, gpu_pod.problems))
        return text, reason_json(text)
    if gpu_pod.pod.gated:
        text = f"it waits for its scheduling gates: {describe_gates(gpu_pod.pod.gates)}"
        return text, reason_json(text)
    key = gpu_pod.request, gpu_pod.pod.priority
    return key, reasons[key].json if key in reasons else None


def _is_current(reason: _Reason | None, version: int, now: float) -> bool:
    return reason is not None and reason.version == version and now - reason.at < STALE_SECONDS


def _has_no_card(raw: Raw) -> bool:
    status = raw.get("status") or {}
    return not status.get("BoundDeviceID") and status.get("phase") not in ("Succeeded", "Failed")
