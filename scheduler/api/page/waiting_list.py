"""The pods that have no cards, and why: asked of a filter of its own, beside those who look and those who decide."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from mgpu.model.gpu_requests import GpuRequest
from mgpu.presentation.mtgpupod_tables import read_all
from scheduler.api.page.page_data import Json, mtgpupod_json, pod_json, said_json, why_json
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.filter import Filter

log = logging.getLogger(__name__)

MOST = 500
"""Pods that are listed; of the others only how many there are is told."""
STALE_SECONDS = 30.0
"""What is kept for pods that are nominated somewhere changes no node."""
_RESTS_AT_FIRST, _RESTS_THEN = 1, 9
"""Somebody waits for a reason that is not known yet; to renew those of a busy cluster never ends."""

Raw = Mapping[str, Any]
Key = tuple[GpuRequest, int]


class _Why(NamedTuple):
    """version: that of all nodes when it was asked; asked: when."""

    version: int
    asked: float
    said: Json


def in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="reasons", daemon=True).start()


class Waiting:
    """Asked by one thread at a time. mtgpupods: those that are known, as the API has them. beside: has the reasons
    worked out, and does not wait for them; each answer has those that are known. pace: its own, and its filter's.

    Its filter is told of nobody: that somebody looks at a pod must never make a plan for it.
    """

    def __init__(
        self,
        state: ClusterCache,
        filter_: Filter,
        mtgpupods: Callable[[], Iterable[Raw]],
        pace: Pace,
        beside: Callable[[Callable[[], None]], None] = in_a_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._filter, self._mtgpupods, self._clock = state, filter_, mtgpupods, clock
        self._pace, self._beside = pace, beside
        self._lock, self._working = threading.Lock(), threading.Lock()
        self._why: dict[Key, _Why] = {}
        self._due: deque[tuple[Key, GpuPod]] = deque()
        self._names: Sequence[str] = ()
        self._version = 0

    def json(self, names: Sequence[str], version: int) -> Json:
        """`{"total", "pods", "whys"}`. names: all nodes. version: moves with every change of them."""
        known_pods = self._state.gpu_pods()
        waiting = [known for known in known_pods if not known.pod.node and not known.pod.ended]
        undecided = (self._state.gpu_pod(uid) for uid in self._state.undecided())
        mtgpupods = [raw for raw in self._mtgpupods() if _has_no_card(raw)]
        shown = [*(known for known in undecided if known), *nsmallest(MOST, waiting, key=_turn)][:MOST]
        known_whys = self._ask(shown, names, version)
        whys: dict[object, int] = {}
        said: list[Json] = []

        def at(key: object, why: Json) -> int:
            if key not in whys:
                whys[key] = len(said)
                said.append(why)
            return whys[key]

        rows = []
        for known in shown:
            key, why = _said(known, known_whys)
            rows.append(pod_json(known.pod, known.request, at(key, why) if why else -1))
        rows += self._of_mtgpupods(mtgpupods[: MOST - len(rows)], at)
        total = len(waiting) + len(self._state.undecided()) + len(mtgpupods)
        return {"total": total, "pods": rows, "whys": said}

    def _ask(self, shown: Iterable[GpuPod], names: Sequence[str], version: int) -> Mapping[Key, _Why]:
        """What is known, and have the rest worked out: first what was not asked yet, then what is the oldest."""
        wanted = {(known.request, known.pod.priority): known for known in shown if known.request and not known.pod.node}
        now = self._clock()
        with self._lock:
            self._why = {key: why for key in wanted if (why := self._why.get(key))}
            rows = [(self._why.get(key), key, known) for key, known in wanted.items()]
            stale = [row for row in rows if not _holds(row[0], version, now)]
            stale.sort(key=lambda row: row[0].asked if row[0] else -1.0)
            self._due = deque((key, known) for _, key, known in stale)
            self._names, self._version = names, version
        if stale and self._working.acquire(blocking=False):
            self._beside(self._work)
        with self._lock:
            return dict(self._why)

    def _work(self) -> None:
        """Until nothing is due; whoever looks meanwhile says anew what is."""
        try:
            while True:
                with self._lock:
                    if not self._due:
                        return
                    key, known = self._due.popleft()
                    names, version = self._names, self._version
                    self._pace.rests = _RESTS_THEN if key in self._why else _RESTS_AT_FIRST
                said = self._reason(known, names)
                with self._lock:
                    self._why[key] = _Why(version, self._clock(), said)
                self._pace()
        finally:
            self._working.release()

    def _reason(self, known: GpuPod, names: Sequence[str]) -> Json:
        try:
            return why_json(self._filter.filter(known, names), int(time.time()))
        except Exception:
            # The thread's outermost: the other pods' reasons would never be worked out.
            log.exception("no reason worked out", extra={"pod": known.pod.key})
            return said_json("why is not known: working it out failed, and the scheduler's log says how")

    def _of_mtgpupods(self, raws: Sequence[Raw], at: Callable[[object, Json], int]) -> list[Json]:
        found = read_all(raws, ())
        rows = []
        for view in found.views:
            text = ": ".join(filter(None, (view.reason, view.message))) or "nothing was said of it yet"
            rows.append(mtgpupod_json(view, at(text, said_json(text))))
        return rows


def _said(known: GpuPod, whys: Mapping[Key, _Why]) -> tuple[object, Json | None]:
    """The reason, and what tells it from others; None: not known yet."""
    if known.pod.node:
        text = f"it is bound to {known.pod.node}, and its cards are not decided yet"
        return text, said_json(text)
    if known.request is None:
        text = "; ".join(map(str, known.problems))
        return text, said_json(text)
    key = known.request, known.pod.priority
    return key, whys[key].said if key in whys else None


def _holds(why: _Why | None, version: int, now: float) -> bool:
    return why is not None and why.version == version and now - why.asked < STALE_SECONDS


def _turn(known: GpuPod) -> tuple[int, str, str, str]:
    pod = known.pod
    return -pod.priority, pod.created, pod.key, pod.uid


def _has_no_card(raw: Raw) -> bool:
    status = raw.get("status") or {}
    return not status.get("BoundDeviceID") and status.get("phase") not in ("Succeeded", "Failed")
