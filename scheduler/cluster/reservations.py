"""Stores the reservations: the cards decided for pods that have not appeared on their nodes yet.

A reservation must end in bounded time even if its pod never appears, because no quota counts the cards that it holds.
So `decisions.decider` releases the overdue ones whose pods are not bound. The cluster cache uses `Reservations` with
its lock held.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu.model.compute_resources import NO_CPU_MEMORY, CpuMemory
from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.ledger import Holding, shares_of

_FULL_TIMES = 4
"""The time after which a pod's successive reservations become short, as a multiple of the length of a full one."""
_SHORT_SECONDS = 2.0
"""The length of a short reservation. This is enough for the write of a Binding, which takes milliseconds. It may be
less than kube-scheduler's timeout for the write, which mgpu does not know."""
_PAUSE_FACTOR = 10
"""The interval between the beginnings of short reservations, as a multiple of their length."""
_DELETED_SECONDS = 120.0
"""How long deleted pods are remembered. No request for a binding takes as long."""
_MAX_DELETED = 1 << 16
"""The most deleted pods that are remembered, to limit the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """The cards that are reserved for a pod on a node until the pod appears there.

    Attributes:
        annotations: The allocation record, as annotations of the Binding.
        needs: The cpu and memory that the pod reserves on the node.
        gpuid: The GPUID for which the pod occupies a card; "" if it is no occupy pod.
        version: The resourceVersion of the claim for which the cards were decided, which had no allocation; "" for a
            pod.
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
    version: str = ""

    @property
    def holding(self) -> Holding:
        """What the pod holds with these cards."""
        shares = shares_of(self.request, self.placement)
        owner = (self.uid, self.namespace, self.name, self.node)
        return Holding(*owner, self.request.dialect, shares, bound=False, constraints=self.request.constraints)


@dataclass(slots=True)
class _Series:
    """Consecutive reservations of one pod.

    Attributes:
        first: When the first one was made.
        last: When the last one was made, or renewed for another attempt to bind. `keep` does not change it.
        until: When the last one ends.
    """

    first: float
    last: float
    until: float


class Reservations:
    """The reservations in force, by pod UID. Part of the ClusterCache, which holds its lock around every call.

    A reservation lasts `seconds`. That is long enough, because it is made when the write of a Binding begins, and gangs
    and Permit plugins wait before that. If the bindings of a pod fail again and again, only the reservations that are
    made in the first `_FULL_TIMES` times `seconds` have this length. After that each attempt holds cards for
    `_SHORT_SECONDS`, and a pause of nine times that length follows. A Binding that the API server would accept still
    succeeds after a pause, because schedulers retry. A pod that had no reservation for `_FULL_TIMES` times `seconds`
    starts again with full ones.

    A reservation is provisional until a Binding has used it. The scheduler that ordered a provisional reservation may
    withdraw it, when it gives up a gang for example. That says nothing about the bindings of the pod, so the series
    ends, too.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._full_seconds = _FULL_TIMES * seconds
        self._short_seconds = min(_SHORT_SECONDS, seconds)
        self._in_force: dict[str, tuple[Reservation, float]] = {}  # Each with the time at which it becomes overdue.
        self._series: dict[str, _Series] = {}
        self._provisional: set[str] = set()  # The UIDs of the pods whose reservation no Binding has used.
        self._next_forgetting = -math.inf
        self._deleted: dict[str, float] = {}  # By UID, the time of the deletion.

    def get(self, uid: str) -> Reservation | None:
        return self._in_force[uid][0] if uid in self._in_force else None

    def put(self, reservation: Reservation, *, provisional: bool = False) -> None:
        """Add a reservation in place of the pod's previous one, or renew it.

        Args:
            provisional: False if a Binding is about to use the reservation. Once a Binding has used a reservation of
                the pod, neither it nor one that replaces it is provisional, because the Binding may still be in
                progress.
        """
        if not provisional:
            self._provisional.discard(reservation.uid)
        elif reservation.uid not in self._in_force:
            self._provisional.add(reservation.uid)
        now = self._clock()
        series = self._series.setdefault(reservation.uid, _Series(now, now, now))
        if now - series.until > self._full_seconds:
            series.first = now
        is_full = now - series.first < self._full_seconds
        series.last = now
        series.until = now + (self._seconds if is_full else self._short_seconds)
        self._in_force[reservation.uid] = (reservation, series.until)

    def keep(self, reservation: Reservation) -> None:
        """Restart the full time of a reservation, because the pod is bound or may be bound."""
        until = self._clock() + self._seconds
        self._series[reservation.uid].until = until
        self._in_force[reservation.uid] = (reservation, until)

    def pause(self, uid: str) -> float:
        """Return the seconds until cards may be reserved for the pod again; 0 if they may be reserved now.

        A provisional reservation begins no pause, because the Binding that it is for has not come yet.
        """
        if uid in self._provisional:
            return 0.0
        series = self._series.get(uid)
        now = self._clock()
        if series is None or now - series.first < self._full_seconds or now - series.until > self._full_seconds:
            return 0.0
        return max(0.0, series.last + _PAUSE_FACTOR * self._short_seconds - now)

    def drop(self, uid: str) -> None:
        self._in_force.pop(uid, None)
        self._provisional.discard(uid)

    def is_provisional(self, uid: str) -> bool:
        """Return whether the pod has a reservation that no Binding has used."""
        return uid in self._provisional

    def end_series(self, uid: str) -> None:
        """Let the next reservation of this pod be a full one."""
        self._series.pop(uid, None)

    def mark_deleted(self, uid: str) -> None:
        """Remember that the pod was deleted, so that nothing is reserved for it.

        A Binding of the pod may be in progress. No event would release a reservation that is made for it now, so the
        reservation would hold cards for its whole time. A tenant could repeat this, and no quota counts a deleted pod.
        """
        now = self._clock()
        self._deleted[uid] = now
        while len(self._deleted) > _MAX_DELETED or now - next(iter(self._deleted.values())) > _DELETED_SECONDS:
            del self._deleted[next(iter(self._deleted))]

    def is_deleted(self, uid: str) -> bool:
        """Return whether the pod was deleted recently."""
        return uid in self._deleted

    def made_within(self, seconds: float) -> bool:
        """Return whether any reservation in force was made or renewed in the last `seconds`."""
        since = self._clock() - seconds
        return any(self._series[uid].last > since for uid in self._in_force)

    def overdue(self) -> tuple[Reservation, ...]:
        """Return the reservations whose pods have not appeared in time, the longest overdue first.

        Series that no longer affect the length of the pod's next reservation are forgotten.
        """
        now = self._clock()
        if now >= self._next_forgetting:
            # Not at each call, since thousands of pods may have been bound in the last minutes.
            self._next_forgetting = now + self._full_seconds / 4
            self._series = {
                uid: series
                for uid, series in self._series.items()
                if uid in self._in_force or now - series.until <= self._full_seconds
            }
        overdue = [(until, r.uid, r) for r, until in self._in_force.values() if until <= now]
        return tuple(reservation for *_, reservation in sorted(overdue))
