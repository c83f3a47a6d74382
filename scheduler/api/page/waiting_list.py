"""The pods that have no cards yet, and the reasons, for the web page.

A reason comes from the filter, which may take long for a hard pod on thousands of nodes. So a thread works the reasons
out with a filter of its own, and each answer to the page contains those that are known by then.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from mgpu.model.gpu_requests import GpuRequest
from mgpu.presentation.mtgpupod_tables import read_mtgpupods
from scheduler.api.page.page_data import Json, mtgpupod_json, pod_json, reason_json, why_json
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.filter import Filter

log = logging.getLogger(__name__)

MOST = 500
"""Pods that are listed. The others are only counted."""
STALE_SECONDS = 30.0
"""How long a reason holds while no node changes: nominations change what is free without changing a node."""
_RESTS_FIRST_TIME = 1
"""Pauses, as a multiple of the work, while a reason is worked out that a viewer waits for."""
_RESTS_AGAIN = 9
"""The same while a known reason is renewed, which never ends in a busy cluster."""

Raw = Mapping[str, Any]
Key = tuple[GpuRequest, int]


class _Reason(NamedTuple):
    """A reason that was worked out at a time of the clock, when all nodes together had this version."""

    version: int
    at: float
    json: Json


def in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="reasons", daemon=True).start()


class Waiting:
    """The list of waiting pods. One thread at a time may call `json`.

    The filter must not report to the planner of partitions: that a user looks at a pod must not make a plan for it.

    Args:
        mtgpupods: Returns all MtgpuPods that are known, as the API has them.
        pace: That of the filter too.
        in_background: Runs the function that it gets without waiting for it.
    """

    def __init__(
        self,
        state: ClusterCache,
        filter_: Filter,
        mtgpupods: Callable[[], Iterable[Raw]],
        pace: Pace,
        in_background: Callable[[Callable[[], None]], None] = in_a_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._filter = filter_
        self._mtgpupods = mtgpupods
        self._clock = clock
        self._pace = pace
        self._in_background = in_background
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._reasons: dict[Key, _Reason] = {}
        self._due: deque[tuple[Key, GpuPod]] = deque()
        self._names: Sequence[str] = ()
        self._version = 0

    def json(self, names: Sequence[str], version: int) -> Json:
        """Return `{"total", "pods", "whys"}`; each pod has the position of its reason in `whys`.

        Args:
            names: All nodes.
            version: Changes whenever one of them does.
        """
        known_pods = self._state.gpu_pods()
        waiting = [known for known in known_pods if not known.pod.node and not known.pod.ended]
        undecided = (self._state.gpu_pod(uid) for uid in self._state.undecided_pods())
        mtgpupods = [raw for raw in self._mtgpupods() if _has_no_card(raw)]
        shown = [*(known for known in undecided if known), *nsmallest(MOST, waiting, key=_turn)][:MOST]
        known_reasons = self._ask(shown, names, version)
        reasons = _Numbered()
        rows = []
        for known in shown:
            key, reason = _reason_of(known, known_reasons)
            rows.append(pod_json(known.pod, known.request, reasons.number(key, reason) if reason else -1))
        for view in read_mtgpupods(mtgpupods[: MOST - len(rows)], ()).views:
            text = ": ".join(filter(None, (view.reason, view.message))) or "its status has no reason yet"
            rows.append(mtgpupod_json(view, reasons.number(text, reason_json(text))))
        total = len(waiting) + len(self._state.undecided_pods()) + len(mtgpupods)
        return {"total": total, "pods": rows, "whys": reasons.rows}

    def _ask(self, shown: Iterable[GpuPod], names: Sequence[str], version: int) -> Mapping[Key, _Reason]:
        """Return the reasons that are known, and have missing ones worked out first, then old ones by their age."""
        wanted = {(known.request, known.pod.priority): known for known in shown if known.request and not known.pod.node}
        now = self._clock()
        with self._lock:
            self._reasons = {key: reason for key in wanted if (reason := self._reasons.get(key))}
            rows = [(self._reasons.get(key), key, known) for key, known in wanted.items()]
            stale = [row for row in rows if not _is_current(row[0], version, now)]
            stale.sort(key=lambda row: row[0].at if row[0] else -1.0)
            self._due = deque((key, known) for _, key, known in stale)
            self._names, self._version = names, version
        if stale and self._working.acquire(blocking=False):
            self._in_background(self._work)
        with self._lock:
            return dict(self._reasons)

    def _work(self) -> None:
        """Work out reasons until none is due. Each call of `json` meanwhile replaces the list of those that are."""
        try:
            while True:
                with self._lock:
                    if not self._due:
                        return
                    key, known = self._due.popleft()
                    names, version = self._names, self._version
                    self._pace.rests = _RESTS_AGAIN if key in self._reasons else _RESTS_FIRST_TIME
                reason = self._work_out(known, names)
                with self._lock:
                    self._reasons[key] = _Reason(version, self._clock(), reason)
                self._pace()
        finally:
            self._working.release()

    def _work_out(self, known: GpuPod, names: Sequence[str]) -> Json:
        try:
            return why_json(self._filter.filter(known, names), int(time.time()))
        except Exception:
            # The outermost handler of the thread: without it one odd pod would leave all others without reasons.
            log.exception("cannot work out why the pod waits", extra={"pod": known.pod.key})
            return reason_json("unknown: an internal error occurred; the scheduler's log has the details")


class _Numbered:
    """The different reasons in one answer, each with its position."""

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._numbers: dict[object, int] = {}

    def number(self, key: object, reason: Json) -> int:
        """Return the position of the reason, which is added if no reason has this key yet."""
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(reason)
        return self._numbers[key]


def _reason_of(known: GpuPod, reasons: Mapping[Key, _Reason]) -> tuple[object, Json | None]:
    """Return a key that equal reasons share, and the reason, or None while it is not known."""
    if known.pod.node:
        text = f"it is bound to {known.pod.node}, and its cards are not decided yet"
        return text, reason_json(text)
    if known.request is None:
        text = "; ".join(map(str, known.problems))
        return text, reason_json(text)
    key = known.request, known.pod.priority
    return key, reasons[key].json if key in reasons else None


def _is_current(reason: _Reason | None, version: int, now: float) -> bool:
    return reason is not None and reason.version == version and now - reason.at < STALE_SECONDS


def _turn(known: GpuPod) -> tuple[int, str, str, str]:
    """Return the sort key of waiting pods: the order in which kube-scheduler tries them, by priority and age."""
    pod = known.pod
    return -pod.priority, pod.created, pod.key, pod.uid


def _has_no_card(raw: Raw) -> bool:
    status = raw.get("status") or {}
    return not status.get("BoundDeviceID") and status.get("phase") not in ("Succeeded", "Failed")
