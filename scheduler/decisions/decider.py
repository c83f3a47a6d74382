"""Decides which cards a pod gets on a node, and reserves them before the caller learns which cards they are.

`api.binding_webhook`, `api.extender` and `decisions.late_binding` call `Decider.decide`, and `scheduler.runtime` calls
`check_overdue` regularly. The reservation holds the cards until the watch delivers the pod on its node. If the write of
the decision fails, `check_overdue` releases the reservation. `decide` must not return cards that are not reserved yet:
the order of snapshot, search and `ReservationCache.reserve` in `_decide` guarantees that.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from mgpu import dialects
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.cards import GPU
from mgpu.model.claim_object import has_results
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding, shares_of
from mgpu.model.pods import GATED, Node, read_pod
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import Subject
from mgpu.model.resource_claims import DRA, claim_path
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid, read_gpu_pod
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.effort_budgets import Call, CallerGone, EffortBudgets, EffortExceeded, never
from scheduler.decisions.in_flight import PodsInFlight
from scheduler.engine import FULL, nvidia_plugin
from scheduler.engine.card_constraints import same_card_group_rejection, still_fits
from scheduler.engine.node_assessment import Foresight, assess, record

log = logging.getLogger(__name__)

_ATTEMPTS = 50
"""The most attempts at one decision. If all of them fail, the caller gets RetryLater.

An attempt fails if the node changes during it, in most cases because another pod gets cards on the node.
"""


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


class FoundPod(NamedTuple):
    """A pod that exists. `gpu_pod` is None if it requests no GPU."""

    uid: str
    gpu_pod: GpuPod | None


class Decider:
    """Decides and reserves cards. Thread-safe.

    Decisions are idempotent for each UID. If the pod is decided again for the same node, it gets the same cards, as
    long as they still fit. If it is decided for another node, its reservation moves there.

    Args:
        flights: The pods in flight (`decisions.in_flight_filter`).
    """

    def __init__(
        self,
        state: ClusterCache,
        api: Api,
        settings: Settings,
        budgets: EffortBudgets | None = None,
        flights: PodsInFlight | None = None,
    ) -> None:
        self._state = state
        self._api = api
        self._settings = settings
        self._budgets = budgets or EffortBudgets()
        self._flights = flights or PodsInFlight()

    def find(self, namespace: str, name: str, uid: str = "", *, live: bool = False) -> FoundPod | None:
        """Return the pod with this name and UID, or None if there is none.

        The pod is taken from the cache if the cache has it with this UID. Otherwise it is read from the API server,
        because the cache may still have an older pod of this name.

        Args:
            uid: The UID of the pod, or "" for any UID.
            live: Whether to ignore the cache and `uid`, and to return the pod that has this name now.

        Raises:
            RetryLater: The API server does not answer, or returns an error.
        """
        if uid and not live and uid == self._state.uid_of(namespace, name):
            return FoundPod(uid, self._state.gpu_pod(uid))
        raw = self._read(namespace, name)
        if raw is None:
            return None
        current_uid = str(raw["metadata"]["uid"])
        if uid and uid != current_uid and not live:
            return None
        return FoundPod(current_uid, self._parse(raw))

    def needs_claim(self, gpu_pod: GpuPod | None, node: str) -> bool:
        """Return whether whole cards that the pod requests are served only through a ResourceClaim on this node."""
        return gpu_pod is not None and nvidia_plugin.needs_claim(self._state.nodes((node,))[0], gpu_pod.request)

    def read(self, raw: Mapping[str, Any]) -> GpuPod | None:
        """Return the pod, or None if it requests no GPU. It comes from the cache if that has the same version.

        Raises:
            BadObject: The object is not a pod.
        """
        meta = table_at(raw, "metadata")
        uid = meta.get("uid")
        version = meta.get("resourceVersion")
        cached = self._state.gpu_pod(uid) if isinstance(uid, str) else None
        return cached if cached and version and cached.version == version else self._parse(raw)

    def _parse(self, raw: Mapping[str, Any]) -> GpuPod | None:
        return read_gpu_pod(raw, self._settings, self._state.records)

    def decide(
        self,
        gpu_pod: GpuPod,
        node: str,
        *,
        reserve: bool = True,
        provisional: bool = False,
        gone: CallerGone = never,
    ) -> Reservation | Rejection:
        """Return the reserved cards of a pod on a node, or why there are none.

        Args:
            reserve: False for a dry run, which reserves nothing.
            provisional: Whether no Binding follows yet, so that the reservation may be withdrawn.
            gone: Returns whether the caller has given up.

        Raises:
            EffortExceeded: The search ended because other pods need the time. The pod may fit.
            RetryLater: No decision is possible now, for example because the API server does not answer, the caller has
                given up, or the node changes too fast.
        """
        try:
            decision = self._decide(gpu_pod, node, gone, reserve=reserve, provisional=provisional)
        finally:
            if reserve:
                self._flights.end(gpu_pod.pod.uid)
        if isinstance(decision, Rejection) and reserve:
            metrics.REJECTIONS.labels("decision", decision.kind).inc()
        return decision

    def decide_beside(
        self, gpu_pod: GpuPod, node: str, beside: Sequence[Holding], gone: CallerGone = never
    ) -> Reservation | Rejection:
        """Return cards for an unbound pod on a node, or why there are none. Nothing is reserved.

        Args:
            beside: What other pods hold tentatively, on any node. It counts as held.

        The arguments and errors are those of `decide`.
        """
        gpu_pod = self._state.gpu_pod(gpu_pod.pod.uid) or gpu_pod
        request = gpu_pod.request
        if request is None:
            return _final(RejectionKind.MALFORMED, "; ".join(map(str, gpu_pod.problems)))
        snapshot = self._state.node_snapshot(node, gpu_pod.pod.uid, occupied_gpuid(gpu_pod.pod, node))
        rejection = self._rejection_before_search(gpu_pod, request, node, snapshot, reserve=True)
        if rejection is not None:
            return rejection
        return self._choose(gpu_pod, request, node, snapshot.beside(node, beside), gone, beside)

    def holds(self, reservation: Reservation, beside: Sequence[Holding] = ()) -> int | None:
        """Return the version of the node if its pod may get the cards of a reservation now, or else None.

        The reservation need not be in force.

        Args:
            beside: As for `decide_beside`.
        """
        if self._state.reservations.pause(reservation.uid):
            return None
        snapshot = self._state.node_snapshot(reservation.node, reservation.uid, reservation.gpuid)
        served = nvidia_plugin.chooses_cards(snapshot.node, reservation.request)
        if not served and self._state.agent_problem(reservation.node) is not None:
            return None
        if snapshot.node is None or not self._holds(reservation, snapshot.beside(reservation.node, beside)):
            return None
        return snapshot.version

    def _decide(
        self, gpu_pod: GpuPod, node: str, gone: CallerGone, *, reserve: bool, provisional: bool
    ) -> Reservation | Rejection:
        uid = gpu_pod.pod.uid
        for _ in range(_ATTEMPTS):
            gpu_pod = self._state.gpu_pod(uid) or gpu_pod
            bound = self._state.reservations.binding_problem(uid, node)
            if bound:
                return _final(RejectionKind.BOUND_ALREADY, bound)
            request = gpu_pod.request
            if request is None:
                return _final(RejectionKind.MALFORMED, "; ".join(map(str, gpu_pod.problems)))
            reserved = self._state.reservation(uid)
            snapshot = self._state.node_snapshot(node, uid, occupied_gpuid(gpu_pod.pod, node))
            rejection = self._rejection_before_search(gpu_pod, request, node, snapshot, reserve=reserve)
            if rejection is not None:
                return rejection
            if reserved and reserved.node == node and reserved.request == request and self._holds(reserved, snapshot):
                if not reserve or self._state.reservations.renew(reserved, provisional=provisional):
                    return reserved
                continue
            rejection = self._immovable(reserved, node) if reserve else None
            if rejection is not None:
                return rejection
            remnants = self._state.remnant_problem(gpu_pod.pod)
            if remnants:
                if gpu_pod.pod.node:
                    raise RetryLater(remnants)  # The pod is bound, and a rejection would set its phase to Failed.
                return _final(RejectionKind.OTHER, remnants)
            expected = self._flights.expected(uid, node)
            decision = self._choose(gpu_pod, request, node, snapshot, gone, expected=expected)
            if isinstance(decision, Rejection) or not reserve:
                return decision
            answer = self._reserve(decision, snapshot, reserved, provisional)
            if answer is not None:
                return answer
        raise RetryLater(f"node {node} changes faster than cards can be decided on it")

    def _rejection_before_search(
        self, gpu_pod: GpuPod, request: GpuRequest, node: str, snapshot: NodeSnapshot, *, reserve: bool
    ) -> Rejection | None:
        """Return why an unbound pod gets no cards on this node now, regardless of free capacity, or None.

        For a bound pod the result is always None, because a rejection would set its phase to Failed.
        """
        pod = gpu_pod.pod
        if pod.node:
            return None
        if pod.gated:
            raw = self._read(pod.namespace, pod.name)  # The watch may not have delivered the removal of the gates yet.
            if raw is None or raw["metadata"]["uid"] != pod.uid or read_pod(raw).gated:
                return _final(RejectionKind.GATED, GATED)
        if nvidia_plugin.needs_claim(snapshot.node, request):
            text = (
                "nvidia.com/gpu is served through ResourceClaims on this node, and the pod has none; use kube-scheduler"
            )
            return _final(RejectionKind.NVIDIA_PLUGIN, text)
        pause = self._state.reservations.pause(pod.uid) if reserve else 0.0
        if pause:
            text = f"bindings of this pod keep failing; cards are reserved again in {pause:.0f} s"
            return _final(RejectionKind.BINDINGS_FAIL, text)
        # Cards that NVIDIA's device plugin hands out need no agent of mgpu.
        problem = None if nvidia_plugin.chooses_cards(snapshot.node, request) else self._state.agent_problem(node)
        return _final(RejectionKind.AGENT, problem) if problem else None

    def _reserve(
        self, decision: Reservation, snapshot: NodeSnapshot, before: Reservation | None, provisional: bool
    ) -> Reservation | Rejection | None:
        """Reserve the cards. Return None if they must be decided again."""
        # Again, because the search may have taken long: an earlier Binding may have been written meanwhile.
        rejection = self._immovable(before, decision.node)
        if rejection is not None:
            return rejection
        if not self._state.reservations.reserve(decision, snapshot.version, before=before, provisional=provisional):
            return None
        if nvidia_plugin.chooses_cards(snapshot.node, decision.request):
            policy = nvidia_plugin.NVIDIA
        else:
            policy = dialects.card_policy(decision.request, self._settings)
        metrics.DECISIONS.labels(policy, decision.request.dialect).inc()
        return decision

    def _holds(self, reserved: Reservation, snapshot: NodeSnapshot) -> bool:
        """Return whether the pod may still get the cards of its reservation.

        No other decision of this replica uses these cards. But another replica may have led in the meantime and given
        them to other pods, and pods may run on them without an allocation record.
        """
        group_cards = self._state.group_cards(reserved.request, reserved.uid)
        if same_card_group_rejection(reserved.request, snapshot.cards, group_cards):
            return False
        shares = shares_of(reserved.request, reserved.placement)
        return still_fits(reserved.request, shares, (*snapshot.cards, *snapshot.other_devices))

    def _choose(
        self,
        gpu_pod: GpuPod,
        request: GpuRequest,
        node: str,
        snapshot: NodeSnapshot,
        gone: CallerGone,
        beside: Sequence[Holding] = (),
        expected: Reservation | None = None,
    ) -> Reservation | Rejection:
        if snapshot.node is None:
            return Rejection(RejectionKind.UNKNOWN_NODE, f"node {node} is not known to mgpu (yet)")
        pod = gpu_pod.pod
        gpuid = occupied_gpuid(pod, node)
        subject = (pod.uid, pod.namespace, pod.name, node)
        if nvidia_plugin.chooses_cards(snapshot.node, request):
            rejection = nvidia_plugin.rejection(request, snapshot.node, snapshot.cards, snapshot.mgpu_cards)
            return rejection or Reservation(*subject, request, Placement(()), {}, pod.cpu_memory, gpuid)
        result: Placement | Rejection
        if expected and expected.request == request and self._holds(expected, snapshot.without_nominated_cards()):
            result = expected.placement
        else:
            with self._budgets.call(pod.namespace, request, gone) as call:
                group_cards = (
                    *self._state.group_cards(request, pod.uid),
                    *(card for holding in beside for card in held_group_cards(request, holding)),
                )
                result = self._search(gpu_pod, request, snapshot.node, snapshot, call, group_cards)
        if isinstance(result, Rejection):
            return result
        cards = (*snapshot.cards, *snapshot.other_devices)
        written = record(pod, request, result, cards, self._settings, time.time_ns())
        annotations = self._state.records.sealed(Subject(*subject), written)
        return Reservation(*subject, request, result, annotations, pod.cpu_memory, gpuid)

    def _search(
        self,
        gpu_pod: GpuPod,
        request: GpuRequest,
        node: Node,
        snapshot: NodeSnapshot,
        call: Call,
        group_cards: Sequence[GroupCard],
    ) -> Placement | Rejection:
        """Search without the cards that are kept free for nominated pods. If that finds nothing, search with them.

        A learning policy has a judge, which rates choices of cards for future pods. If a full search with the judge
        reaches its limits and finds no cards, it is repeated without the judge, because the filter searches without
        one. So a pod that has passed the filter gets cards here too.
        """
        cards = (*snapshot.cards, *snapshot.other_devices)
        available_cards = (*snapshot.available_cards, *snapshot.available_other_devices)
        judges = self._state.forecast.judges
        foresight = [Foresight(judges, snapshot.free_resources, gpu_pod.pod.cpu_memory)] if judges else []
        result: Placement | Rejection | None = None
        for candidates in (available_cards, cards) if available_cards != cards else (cards,):
            limits = call.require_limits()
            for ahead in (*foresight, None):
                result = assess(
                    request,
                    node,
                    candidates,
                    self._settings,
                    ahead,
                    group_cards=group_cards,
                    limits=limits,
                    effort=call.effort,
                )
                if isinstance(result, Placement):
                    return result
                if not result.proven and limits is not FULL:
                    metrics.SEARCHES_ENDED.labels("rationed").inc()
                    raise EffortExceeded(str(result))
                if result.proven:
                    break
        assert result is not None
        return result

    def check_overdue(self) -> None:
        """Check the reservations whose pods or claims the watch has not delivered on their nodes in time."""
        for decision in self._state.reservations.overdue():
            self.check(decision)

    def check(self, decision: Reservation) -> None:
        """Release a reservation unless its pod is bound, its claim is allocated, or the API server does not answer."""
        is_claim = decision.request.dialect == DRA
        path = claim_path if is_claim else pod_path
        try:
            raw = self._read_at(path(decision.namespace, decision.name))
        except RetryLater as error:
            log.warning("reservation kept, because it cannot be checked: %s", error, extra={"pod": decision.uid})
            self._state.reservations.keep(decision)
            return
        is_written = has_results(raw) if is_claim else bool(table_at(raw, "spec").get("nodeName"))
        if raw is not None and raw["metadata"]["uid"] == decision.uid and is_written:
            self._state.reservations.keep(decision)  # The watch will deliver the bound pod or the allocated claim.
        else:
            extra = {"claim" if is_claim else "pod": decision.uid, "node": decision.node}
            log.info("reservation released, because its write has failed", extra=extra)
            self._state.reservations.cancel(decision)
            metrics.RELEASED.inc()

    def _immovable(self, reserved: Reservation | None, node: str) -> Rejection | None:
        """Return why a reservation cannot move to this node, or None if it can, or if it is of this node.

        Its pod may be bound or deleted, and the watch may not have delivered that yet. If the pod is deleted, the
        reservation is cancelled.
        """
        if reserved is None or reserved.node == node:
            return None
        raw = self._read(reserved.namespace, reserved.name)
        if raw is None or raw["metadata"]["uid"] != reserved.uid:
            self._state.reservations.cancel(reserved)
            return _final(RejectionKind.BOUND_ALREADY, "the pod is gone")
        bound = (raw.get("spec") or {}).get("nodeName")
        return _final(RejectionKind.BOUND_ALREADY, f"the pod is bound to {bound} already") if bound else None

    def _read(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the pod as the API server has it, or None if there is none. Raises RetryLater on other errors."""
        return self._read_at(pod_path(namespace, name))

    def _read_at(self, path: str) -> dict[str, Any] | None:
        try:
            return self._api.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise RetryLater(str(error)) from error
        except Unreachable as error:
            raise RetryLater(str(error)) from error


def held_group_cards(request: GpuRequest, holding: Holding) -> Iterator[GroupCard]:
    """Yield the cards of a holding if its pod is in the same-card group of the request."""
    group = request.constraints.same_card
    if group is not None and holding.constraints.same_card == group:
        yield from (GroupCard(holding.node, str(s.card)) for s in holding.shares if s.type == GPU)


def _final(kind: RejectionKind, reason: str) -> Rejection:
    """Return a rejection that no eviction of pods can resolve."""
    return Rejection(kind, reason, hopeless=True)
