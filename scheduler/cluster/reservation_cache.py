"""Makes, renews and releases reservations in the cluster cache.

`ClusterCache.reservations` is the only instance. It is a facade of the parts of the cluster cache that a reservation
concerns, and acquires the lock of the cluster cache for each call. `Decider`, the filter for gangs and Volcano's verbs
call it. A reservation and the holding of its cards begin and end together. `ClusterCache.reservation` reads one.
"""

import threading

from mgpu.model.gangs import GangName
from mgpu.model.pods import Pod
from mgpu.model.resource_claims import DRA
from scheduler.cluster.events import CardsFreed, Publisher
from scheduler.cluster.gangs import Gangs
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.nominations import Nominations
from scheduler.cluster.pods import Pods
from scheduler.cluster.reservations import Reservation, Reservations
from scheduler.engine.card_constraints import same_card_group_rejection


class ReservationCache:
    """The reservations in force, with the cards, cpu and memory that they hold. Thread-safe."""

    def __init__(
        self,
        lock: threading.RLock,
        pods: Pods,
        gangs: Gangs,
        reservations: Reservations,
        holdings: Holdings,
        nominations: Nominations,
        snapshots: NodeSnapshots,
        events: Publisher,
    ) -> None:
        self._lock = lock
        self._pods = pods
        self._gangs = gangs
        self._reservations = reservations
        self._holdings = holdings
        self._nominations = nominations
        self._snapshots = snapshots
        self._events = events
        self._is_closed = False

    def placed_members(self, gang: GangName) -> set[str]:
        """Return the UIDs of the members that are bound, have reserved cards, or need no cards."""
        members = self._gangs.members(gang)
        with self._lock:
            return {uid for uid, is_placed in members.items() if is_placed or self._reservations.get(uid) is not None}

    def reserve(
        self,
        reservation: Reservation,
        version: int,
        *,
        before: Reservation | None = None,
        provisional: bool = False,
    ) -> bool:
        """Hold the cards for the pod, in place of its previous reservation.

        Args:
            version: The version of the snapshot of the node from which the cards were chosen.
            before: The reservation of the pod when the decision began; None if it had none.
            provisional: Whether the reservation may be withdrawn until a Binding uses it.

        Returns False, and changes nothing, if cards must be decided for the pod again: the node has changed since
        `version`, another call has decided, the pod's same-card group is now on another card, or the pod cannot be
        bound (`binding_problem`). The other call may have decided for another node, and the pod may be bound there.
        Until the watch delivers that, nothing but the other reservation holds its cards. After `close` it always
        returns False.
        """
        with self._lock:
            if self._reservations.get(reservation.uid) is not before:
                return False
            if self._is_closed or self._snapshots.version(reservation.node) != version:
                return False
            if self.binding_problem(reservation.uid, reservation.node) is not None:
                return False
            ledger = self._holdings.ledger
            cards = ledger.cards(reservation.node, reservation.uid)
            if same_card_group_rejection(
                reservation.request,
                cards,
                ledger.group_cards(reservation.request.constraints.same_card, reservation.uid),
            ):
                return False
            self._holdings.reserve(reservation, provisional=provisional)
            self._snapshots.mark(self._nominations.reserved(reservation.uid))
            self._snapshots.set_usage(reservation.uid, reservation.node, reservation.needs)
            return True

    def binding_problem(self, uid: str, node: str) -> str | None:
        """Return the reason why this pod cannot be bound to this node however much capacity is free, or None."""
        with self._lock:
            gpu_pod = self._pods.get(uid)
            if gpu_pod is None:
                return "the pod has been deleted" if self._reservations.is_deleted(uid) else None
            pod = gpu_pod.pod
            is_late = pod.node == node and self._holdings.is_undecided(uid)
            if is_late or not (pod.node or pod.ended):
                return None
            return f"the pod is bound to {pod.node} already" if pod.node else f"the pod has {pod.phase.lower()}"

    def renew(self, reservation: Reservation, *, provisional: bool = False) -> bool:
        """Restart the time of a reservation for another attempt to bind.

        Unless `provisional`, a Binding is about to use the reservation, so it can no longer be withdrawn. Return False
        if the reservation is no longer in force, or after `close`.
        """
        with self._lock:
            if self._is_closed or self._reservations.get(reservation.uid) is not reservation:
                return False
            self._reservations.put(reservation, provisional=provisional)
            return True

    def withdraw(self, uid: str, node: str) -> bool:
        """Release the reservation of a pod on this node, if it is provisional. Return whether it was released.

        No Binding can be in progress that uses the reservation. If one comes later, its cards are decided then.
        """
        with self._lock:
            reservation = self._reservations.get(uid)
            if reservation is None or reservation.node != node or not self._reservations.is_provisional(uid):
                return False
            self.cancel(reservation)
            self._reservations.end_series(uid)
            return True

    def keep(self, reservation: Reservation) -> None:
        """Restart the full time of a reservation, if it is in force.

        Call this if the pod is bound, or if it is not known whether it is.
        """
        with self._lock:
            if not self._is_closed and self._reservations.get(reservation.uid) is reservation:
                self._reservations.keep(reservation)

    def pause(self, uid: str) -> float:
        """Return the seconds until cards may be reserved again after failed bindings of the pod; 0 if they may be
        now."""
        with self._lock:
            return self._reservations.pause(uid)

    def cancel(self, reservation: Reservation) -> None:
        """Release the reservation, if it is in force."""
        uid = reservation.uid
        with self._lock:
            if self._reservations.get(uid) is reservation:
                if reservation.request.dialect == DRA:
                    self._holdings.claim_released(uid, reservation.node)
                else:
                    self._holdings.release(uid)
                self._snapshots.mark(self._nominations.reserved(uid))
                self._events.publish(CardsFreed(reservation.node))
                self._snapshots.drop_usage(uid)
                gpu_pod = self._pods.get(uid)
                if gpu_pod is not None:
                    self._holdings.settle(gpu_pod)
                    self.count_usage(gpu_pod.pod)

    def close(self) -> None:
        """Accept no more reservations, even from threads that have already checked that this replica may decide."""
        with self._lock:
            self._is_closed = True

    def has_unobserved(self, seconds: float) -> bool:
        """Return whether a reservation of the last `seconds` is still waiting for its pod to appear on the node."""
        with self._lock:
            return self._reservations.made_within(seconds)

    def overdue(self) -> tuple[Reservation, ...]:
        """Return the reservations whose pods have not appeared on their nodes in time, the longest overdue first."""
        with self._lock:
            return self._reservations.overdue()

    def count_usage(self, pod: Pod) -> None:
        """Count the cpu and memory of the pod on its node, or until it is bound, on that of its reservation.

        `ClusterCache` calls it for each change of a pod.
        """
        reservation = self._reservations.get(pod.uid)
        reserved = reservation.node if reservation is not None else ""
        self._snapshots.set_usage(pod.uid, "" if pod.ended else pod.node or reserved, pod.cpu_memory)
