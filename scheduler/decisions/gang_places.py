"""Chooses, keeps and reserves the places of the members of one gang.

`decisions.gang_filter` has a `Places` for each gang, and says what must hold. The cards of a place are known before
they are reserved, so that all places of a gang can be reserved at the same time.
"""

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, replace

from mgpu.model.gangs import Gang, gang_name
from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.ledger import Holding
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never
from scheduler.decisions.filter import Filter, Filtered

log = logging.getLogger(__name__)

_PLACE_SECONDS = 60.0
"""How long a place is kept after the last call for its pod. Coscheduling lets a member wait as long for the others."""
_CHOICE_SECONDS = 1.0
"""After its gang did not fit, a member keeps its place for at least this long, because kube-scheduler may call hundreds
of times a second."""
_ATTEMPTS = 5
"""The most attempts to reserve a place on a node that other pods change meanwhile."""
SPARE_NODES = 16
"""The most nodes that a search tries in vain, apart from those with places of the gang."""


@dataclass(slots=True)
class _Place:
    """The node and the cards of one member.

    Attributes:
        holding: What the member would hold.
        checked: The version of the cluster for which it is known that the cards are free.
        failures: How often the gang had not fitted when the cards were chosen.
        chosen: When the cards were chosen.
        called: When the filter was last called for the member.
        complete: Whether the gang was complete at that time or later, so that its scheduler may bind the member.
    """

    decision: Reservation
    holding: Holding
    checked: int
    failures: int
    chosen: float
    called: float
    complete: bool = False

    @property
    def node(self) -> str:
        return self.decision.node


@dataclass(frozen=True, slots=True)
class Parts:
    """What all gangs share. `announce` makes the scheduler retry the rejected pods, by an announcement of a node."""

    state: ClusterCache
    pods: Filter
    decider: Decider
    announce: Callable[[str], None]
    clock: Callable[[], float]


class Places:
    """The places of one gang. Its lock guards the other fields.

    `_failures` counts how often a member fitted nowhere or a place was lost, and `_failed` has the time of the former
    by UID. `_refused` has the members that a binding found without their cards, each with its node.
    """

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._parts = parts
        self._lock = threading.RLock()
        self._by_uid: dict[str, _Place] = {}
        self._failures = 0
        self._failed: dict[str, float] = {}
        self._refused: dict[str, str] = {}

    def filter(self, gang: Gang, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone) -> Filtered:
        uid = gpu_pod.pod.uid
        with self._lock:
            if self._is_away_from_nomination(gpu_pod, names):
                return _rejected(names, "the pod has a place with its gang on another node", hopeless=False)
            self._refused.pop(uid, None)
            reserved = self._keep_reservation(gpu_pod, names)
            placed = self._state.reservations.placed_members(gang.name) - {uid}
            is_complete = len(placed) + 1 >= gang.min_count
            if reserved and (is_complete or not self._state.reservations.withdraw(uid, reserved)):
                return Filtered(passed=[reserved])
            place = self._keep_place(gpu_pod, names)
            if len(placed) >= gang.min_count:
                self._by_uid.pop(uid, None)
                return self._parts.pods.filter(gpu_pod, names, gone)
            self._drop_ended(gang, _PLACE_SECONDS)
            if place is None:
                chosen = self._choose(gpu_pod, names, gone)
                if isinstance(chosen, Filtered):
                    self._fits_nowhere(gpu_pod, names)
                    return chosen
                place = self._by_uid[uid] = chosen
            return self._answer(gang, place, placed, names)

    def refusal(self, gang: Gang, uid: str, node: str) -> Rejection | None:
        with self._lock:
            if self._state.reservation(uid) is not None:
                return None
            if self._refused.get(uid) != node:
                self._drop_ended(gang, math.inf)  # A scheduler that binds still counts on all of them.
                place = self._by_uid.get(uid)
                with_place = {*self._state.reservations.placed_members(gang.name), *self._by_uid}
                if place is None or place.node != node:
                    return None
                if len(with_place) < gang.min_count:
                    text = f"gang {gang.name} has too few members now; its pods are placed again"
                    return Rejection(RejectionKind.GANG, text, hopeless=True) if place.complete else None
                lost = self._reserve()
                if lost is None:
                    return None
                self._refused = {member: other.node for member, other in self._by_uid.items()}
                self._refused[lost.decision.uid] = lost.node
                self._parts.announce(lost.node)
            return _lost(gang, node)

    def beside(self, uid: str) -> tuple[Holding, ...]:
        """Return what members hold tentatively, without those that have a reservation, and without this one."""
        with self._lock:
            return tuple(
                place.holding
                for other, place in self._by_uid.items()
                if other != uid and self._state.reservation(other) is None
            )

    def _is_away_from_nomination(self, gpu_pod: GpuPod, names: Sequence[str]) -> bool:
        """Return whether the call is only for the nominated node of the pod, and its place is elsewhere.

        kube-scheduler calls with the nominated node alone, and if it is rejected, at once with all nodes.
        """
        pod = gpu_pod.pod
        if not pod.nominated_node or list(names) != [pod.nominated_node]:
            return False
        place = self._state.reservation(pod.uid) or self._by_uid.get(pod.uid)
        return place is not None and place.node != pod.nominated_node

    def _keep_reservation(self, gpu_pod: GpuPod, names: Collection[str]) -> str | None:
        """Return the node of the pod's reservation. If the pod can no longer use it there, withdraw it."""
        reserved = self._state.reservation(gpu_pod.pod.uid)
        if reserved is None:
            return None
        is_same = reserved.node in names and reserved.request == gpu_pod.request
        if is_same and self._parts.decider.holds(reserved) is not None:
            return reserved.node
        self._by_uid.pop(reserved.uid, None)
        self._state.reservations.withdraw(reserved.uid, reserved.node)
        return None

    def _keep_place(self, gpu_pod: GpuPod, names: Collection[str]) -> _Place | None:
        """Return the place of the pod. If the pod cannot keep it, or should look for a better one, drop it."""
        uid = gpu_pod.pod.uid
        place = self._by_uid.get(uid)
        if place is None:
            return None
        now = self._parts.clock()
        version = self._state.version
        is_same = place.node in names and place.decision.request == gpu_pod.request
        if is_same and place.checked != version:
            # Since the gang did not fit, cards may have come free for another distribution of its members.
            is_stale = place.failures != self._failures and now - place.chosen >= _CHOICE_SECONDS
            is_same = not is_stale and self._parts.decider.holds(place.decision, self.beside(uid)) is not None
        if not is_same or self._state.agent_problem(place.node) is not None:
            del self._by_uid[uid]
            return None
        place.checked = version
        place.called = now
        return place

    def _drop_ended(self, gang: Gang, overdue: float) -> None:
        """Drop the places of members that are bound, have ended, are deleted, have changed, or have left the gang.

        Places without a call for `overdue` seconds are dropped, too, unless the pod is nominated: it is not called,
        because it waits for the other members.
        """
        now = self._parts.clock()
        self._failed = {uid: at for uid, at in self._failed.items() if now - at < _PLACE_SECONDS}
        for uid, place in list(self._by_uid.items()):
            known = self._state.gpu_pod(uid)
            is_ended = self._state.reservations.binding_problem(uid, place.node) is not None
            if known is not None:
                is_ended |= known.pod.deleting or known.request != place.decision.request
                is_ended |= gang_name(known.pod) != gang.name
            is_nominated = known is not None and known.pod.nominated_node == place.node
            if is_ended or (now - place.called >= overdue and not is_nominated):
                del self._by_uid[uid]
                self._state.reservations.withdraw(uid, place.node)

    def _choose(self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone) -> _Place | Filtered:
        """Return the best place for the pod beside the other members, or why there is none."""
        beside = self.beside(gpu_pod.pod.uid)
        found = self._parts.pods.filter(gpu_pod, names, gone, beside)
        for tried, node in enumerate(order_nodes(self._parts.pods, gpu_pod, found.passed, beside, gone)):
            if tried >= len(self._by_uid) + SPARE_NODES:
                break
            version = self._state.version
            try:
                decision = self._parts.decider.decide_beside(gpu_pod, node, beside, gone)
            except EffortExceeded as error:
                decision = Rejection(RejectionKind.NOT_PROVEN, str(error), proven=False)
            if isinstance(decision, Reservation):
                now = self._parts.clock()
                return _Place(decision, decision.holding, version, self._failures, now, now)
            found.reject((node,), rejection_beside(decision))
        rest = [name for name in found.passed if name not in found.failed and name not in found.hopeless]
        found.reject(rest, Rejection(RejectionKind.NOT_PROVEN, "not examined for a member of a gang", proven=False))
        found.passed = []
        return found

    def _fits_nowhere(self, gpu_pod: GpuPod, names: Sequence[str]) -> None:
        """Note that a member fits nowhere, unless only its nominated node was asked for.

        The tentative places of the others stay, because the scheduler may go on with the next member, and would count
        on them.
        """
        if gpu_pod.pod.nominated_node and list(names) == [gpu_pod.pod.nominated_node]:
            return
        self._failures += 1
        self._failed[gpu_pod.pod.uid] = self._parts.clock()
        self._withdraw()

    def _withdraw(self) -> None:
        """Release the reservations of the gang that no Binding has used. The places stay tentative."""
        for uid, place in self._by_uid.items():
            self._state.reservations.withdraw(uid, place.node)

    def _answer(self, gang: Gang, place: _Place, placed: Set[str], names: Sequence[str]) -> Filtered:
        """Answer for a member that has a place. If it completes the gang, reserve all places."""
        with_place = {*placed, *self._by_uid}
        if len(with_place) >= gang.min_count:
            lost = self._reserve()
            if lost is None:
                log.info("reserved cards for a gang", extra={"gang": str(gang.name), "members": len(with_place)})
                if not gang.waits:
                    self._parts.announce(place.node)  # The other members were rejected until now.
                return Filtered(passed=[place.node])
            self._parts.announce(lost.node)
            return _rejected(names, _lost(gang, lost.node).reason)
        place.complete = False
        if placed & self._by_uid.keys():
            self._withdraw()  # Members have been deleted or look for another node, or the gang needs more of them now.
        if gang.waits:
            return Filtered(passed=[place.node])
        uncalled = self._state.gangs.members(gang.name).keys() - with_place - self._failed.keys()
        if uncalled and len(with_place) + len(uncalled) >= gang.min_count:
            self._parts.announce(place.node)
        text = f"the pod waits for its gang {gang.name}: {len(with_place)} of {gang.min_count} members fit now"
        return _rejected(names, text)

    def _reserve(self) -> _Place | None:
        """Reserve all places. If one is lost, drop it, withdraw the others, and return it."""
        for uid, place in list(self._by_uid.items()):
            if self._state.reservation(uid) is None and not self._reserve_one(uid, place):
                del self._by_uid[uid]
                self._failures += 1
                self._withdraw()
                return place
        for place in self._by_uid.values():
            place.complete = True
        return None

    def _reserve_one(self, uid: str, place: _Place) -> bool:
        """Reserve the cards of a place, or if another pod has taken them, other cards of the same node."""
        decider = self._parts.decider
        for _ in range(_ATTEMPTS):
            beside = self.beside(uid)
            version = decider.holds(place.decision, beside)
            if version is None:
                gpu_pod = self._state.gpu_pod(uid)
                try:
                    decision = decider.decide_beside(gpu_pod, place.node, beside) if gpu_pod else None
                except EffortExceeded:
                    decision = None
                if not isinstance(decision, Reservation):
                    return False
                place.decision, place.holding = decision, decision.holding
            elif self._state.reservations.reserve(place.decision, version, provisional=True):
                return True
        return False


def order_nodes(
    pods: Filter, gpu_pod: GpuPod, passed: Sequence[str], beside: Sequence[Holding], gone: CallerGone = never
) -> list[str]:
    """Return the nodes on which a member fits, the best first. Those with its same-card group come before all others.

    Args:
        beside: What the other members hold tentatively.
    """
    group = gpu_pod.constraints.same_card
    near = {h.node for h in beside if group is not None and h.constraints.same_card == group}
    scores = pods.scores(gpu_pod, passed, gone)
    rows = [(name not in near, -score, i) for i, (name, score) in enumerate(zip(passed, scores, strict=True))]
    return [passed[i] for *_, i in sorted(rows)]


def rejection_beside(rejection: Rejection) -> Rejection:
    """Return the rejection of a member on a node where other members of its gang have places."""
    rejection = rejection.summary()
    return replace(rejection, reason=f"{rejection.reason} (beside the other members of its gang)")


def _lost(gang: Gang, node: str) -> Rejection:
    text = f"another pod took the cards that gang {gang.name} needs on {node}; its pods are placed again"
    return Rejection(RejectionKind.GANG, text, hopeless=True)


def _rejected(names: Sequence[str], reason: str, *, hopeless: bool = True) -> Filtered:
    """Reject all nodes. If it is hopeless, the scheduler evicts no pods."""
    found = Filtered()
    found.reject(names, Rejection(RejectionKind.GANG, reason, hopeless=hopeless))
    return found
