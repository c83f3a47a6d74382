"""What was decided for pods that have not appeared on their nodes yet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu.model.compute_resources import NO_CPU_MEMORY, CpuMemory
from mgpu.model.gpu_requests import GpuRequest, Placement

_LIVES = 4
_MOMENT_SECONDS = 2.0
"""The write of a Binding takes milliseconds, and its time-out in kube-scheduler's client is not in sight."""
_PAUSE_MOMENTS = 10
_GONE_SECONDS, _MOST_GONE = 120.0, 1 << 16
"""How long, and of how many pods, it is known that they were deleted: longer than any request takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Cards reserved for a pod on a node until it appears there. annotations: what its Binding is to carry.

    needs: what the pod reserves of the node's cpu and memory. gpuid: for which it occupies a card.
    """

    uid: str
    namespace: str
    name: str
    node: str
    request: GpuRequest
    placement: Placement
    annotations: Mapping[str, str]
    needs: CpuMemory = NO_CPU_MEMORY
    gpuid: str = ""


@dataclass(slots=True)
class _Row:
    """How long a pod has had reservations in a row. since: the first one. made, until: the latest one."""

    since: float
    made: float
    until: float


class Reservations:
    """Reservations in force, by the uid of the pod, each with the time until which the pod should have appeared.

    A reservation begins with the write of a Binding and is needed for as long as that write takes: gangs and Permit
    plugins wait before it. So bindings that fail again and again hold cards for `_LIVES` times `seconds` in all; after
    that each attempt holds them for a moment, with a pause of nine such moments in between. A Binding that the API
    server accepts still succeeds after the pause, because schedulers try again. A pod without a reservation for the
    whole of that time begins anew.

    Not thread-safe. seconds: how long a reservation lasts.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._most = _LIVES * seconds
        self._moment = min(_MOMENT_SECONDS, seconds)
        self._known: dict[str, tuple[Reservation, float]] = {}
        self._rows: dict[str, _Row] = {}
        self._gone: dict[str, float] = {}

    def get(self, uid: str) -> Reservation | None:
        return self._known[uid][0] if uid in self._known else None

    def put(self, decision: Reservation) -> None:
        """In place of the pod's last one. Its time is the full one, or a moment for a pod that used up its own."""
        now = self._clock()
        row = self._rows.setdefault(decision.uid, _Row(now, now, now))
        if now - row.until > self._most:
            row.since = now
        row.made = now
        row.until = now + (self._seconds if now - row.since < self._most else self._moment)
        self._known[decision.uid] = (decision, row.until)

    def keep(self, decision: Reservation) -> None:
        """Give it its full time again: the pod is bound, or whether it is cannot be found out."""
        now = self._clock()
        self._rows[decision.uid].until = now + self._seconds
        self._known[decision.uid] = (decision, now + self._seconds)

    def pause(self, uid: str) -> float:
        """Seconds until cards may be reserved for the pod again; 0: now."""
        row, now = self._rows.get(uid), self._clock()
        if row is None or now - row.since < self._most or now - row.until > self._most:
            return 0.0
        return max(0.0, row.made + _PAUSE_MOMENTS * self._moment - now)

    def drop(self, uid: str) -> None:
        self._known.pop(uid, None)

    def bury(self, uid: str) -> None:
        """Note that the pod was deleted.

        Its Binding may be under way: a reservation that is made for it now would be nobody's, and would hold cards for
        its whole time. A tenant could repeat that at will, and no quota counts a pod that was deleted.
        """
        now = self._clock()
        self._gone[uid] = now
        while len(self._gone) > _MOST_GONE or now - next(iter(self._gone.values())) > _GONE_SECONDS:
            del self._gone[next(iter(self._gone))]

    def is_gone(self, uid: str) -> bool:
        """Return whether the pod was deleted a short time ago."""
        return uid in self._gone

    def made_within(self, seconds: float) -> bool:
        """Whether one was made, or given its time again, in the last so many seconds."""
        since = self._clock() - seconds
        return any(self._rows[uid].made > since for uid in self._known)

    def overdue(self) -> tuple[Reservation, ...]:
        """Those whose pod has not appeared in time, oldest first."""
        now = self._clock()
        self._rows = {u: r for u, r in self._rows.items() if u in self._known or now - r.until <= self._most}
        rows = sorted((until, d.uid, d) for d, until in self._known.values() if until <= now)
        return tuple(decision for *_, decision in rows)
