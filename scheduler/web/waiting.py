"""The pods that have no cards, and why: asked of a filter of its own, a little at a time."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from mgpu.cli.mtgpupods import read_all
from mgpu.model.asks import Ask
from scheduler.filtering import Filter
from scheduler.gpu_pods import GpuPod
from scheduler.state import State
from scheduler.web.data import Json, mtgpupod_json, pod_json, said_json, why_json

MOST = 500
"""Pods that are listed; of the others only how many there are is told."""
BUDGET_SECONDS = 0.02
"""What one look at the page may cost of the filter's time. Who is not reached is next the next time."""
STALE_SECONDS = 30.0
"""What is kept for pods that are nominated somewhere changes no node."""

Raw = Mapping[str, Any]
Key = tuple[Ask, int]


class _Why(NamedTuple):
    """version: that of all nodes when it was asked; asked: when."""

    version: int
    asked: float
    said: Json


class Waiting:
    """Not thread-safe. mtgpupods: those that are known, as the API has them.

    Its filter is told of nobody: that somebody looks at a pod must never make a plan for it.
    """

    def __init__(
        self,
        state: State,
        filter_: Filter,
        mtgpupods: Callable[[], Iterable[Raw]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._filter, self._mtgpupods, self._clock = state, filter_, mtgpupods, clock
        self._why: dict[Key, _Why] = {}

    def json(self, names: Sequence[str], version: int) -> Json:
        """`{"total", "pods", "whys"}`. names: all nodes. version: moves with every change of them."""
        known_pods = self._state.snapshots.gpu_pods()
        waiting = [known for known in known_pods if not known.pod.node and not known.pod.ended]
        undecided = (self._state.gpu_pod(uid) for uid in self._state.undecided())
        mtgpupods = [raw for raw in self._mtgpupods() if _has_no_card(raw)]
        shown = [*(known for known in undecided if known), *nsmallest(MOST, waiting, key=_turn)][:MOST]
        self._ask(shown, names, version)
        whys: dict[object, int] = {}
        said: list[Json] = []

        def at(key: object, why: Json) -> int:
            if key not in whys:
                whys[key] = len(said)
                said.append(why)
            return whys[key]

        rows = []
        for known in shown:
            key, why = self._said(known)
            rows.append(pod_json(known.pod, known.ask, at(key, why) if why else -1))
        rows += self._of_mtgpupods(mtgpupods[: MOST - len(rows)], at)
        total = len(waiting) + len(self._state.undecided()) + len(mtgpupods)
        return {"total": total, "pods": rows, "whys": said}

    def _ask(self, shown: Iterable[GpuPod], names: Sequence[str], version: int) -> None:
        """Those of which it was not asked yet, then those whose answers are the oldest."""
        wanted = {(known.ask, known.pod.priority): known for known in shown if known.ask and not known.pod.node}
        self._why = {key: why for key, why in self._why.items() if key in wanted}
        now = self._clock()
        due = [key for key in wanted if not self._holds(key, version, now)]
        for key in sorted(due, key=lambda key: self._why[key].asked if key in self._why else -1.0):
            said = why_json(self._filter.filter(wanted[key], names), int(time.time()))
            self._why[key] = _Why(version, self._clock(), said)
            if self._clock() >= now + BUDGET_SECONDS:
                return

    def _holds(self, key: Key, version: int, now: float) -> bool:
        why = self._why.get(key)
        return why is not None and why.version == version and now - why.asked < STALE_SECONDS

    def _said(self, known: GpuPod) -> tuple[object, Json | None]:
        """The reason, and what tells it from others; None: not known yet."""
        if known.pod.node:
            text = f"it is bound to {known.pod.node}, and its cards are not decided yet"
            return text, said_json(text)
        if known.ask is None:
            text = "; ".join(map(str, known.problems))
            return text, said_json(text)
        key = known.ask, known.pod.priority
        return key, self._why[key].said if key in self._why else None

    def _of_mtgpupods(self, raws: Sequence[Raw], at: Callable[[object, Json], int]) -> list[Json]:
        found = read_all(raws, ())
        rows = []
        for view in found.views:
            text = ": ".join(filter(None, (view.reason, view.message))) or "nothing was said of it yet"
            rows.append(mtgpupod_json(view, at(text, said_json(text))))
        return rows


def _turn(known: GpuPod) -> tuple[int, str, str, str]:
    pod = known.pod
    return -pod.priority, pod.created, pod.key, pod.uid


def _has_no_card(raw: Raw) -> bool:
    status = raw.get("status") or {}
    return not status.get("BoundDeviceID") and status.get("phase") not in ("Succeeded", "Failed")
