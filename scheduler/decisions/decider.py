"""Decides which cards a pod gets on a node, and reserves them before the decision is answered.

The binding webhook, `bind` of the extender and the late binding call `Decider.decide`. The reservation holds the cards
until the watch shows the pod on its node; `check_overdue` releases reservations whose write has failed.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from mgpu import dialects
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.ledger import shares_of
from mgpu.model.pods import GATED, Node, Pod, read_pod
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import Subject
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid, read_gpu_pod
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.effort_budgets import Call, CallerGone, EffortBudgets, EffortExceeded, never
from scheduler.engine import FULL, nvidia_plugin
from scheduler.engine.card_constraints import same_card_group_rejection, still_fits
from scheduler.engine.node_assessment import Foresight, assess, record

log = logging.getLogger(__name__)

# A try fails only where another decision on this node has succeeded meanwhile, and there are not this many at once.
_TRIES = 50


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


class Decider:
    """Thread-safe. Idempotent per pod UID: the same node again gives the same cards, another node moves them there."""

    def __init__(self, state: ClusterCache, api: Api, settings: Settings, budgets: EffortBudgets | None = None) -> None:
        self._state, self._api, self._settings = state, api, settings
        self._budgets = budgets or EffortBudgets()

    def find(self, namespace: str, name: str, uid: str = "", *, live: bool = False) -> tuple[str, GpuPod | None]:
        """Return the UID of the pod of this name, and the pod, or None where it requests no GPU.

        From the cache, where that knows the pod of this uid, else from the API: without one, who had the name before
        may still be cached. "" for the uid: there is no such pod. Raises RetryLater where the API does not answer.
        """
        if uid and not live and uid == self._state.uid_of(namespace, name):
            return uid, self._state.gpu_pod(uid)
        raw = self._read(namespace, name)
        found = str(raw["metadata"]["uid"]) if raw else ""
        if raw is None or (uid and uid != found and not live):
            return "", None
        return found, self._read_pod(raw)

    def read(self, raw: Mapping[str, Any]) -> GpuPod | None:
        """Return the pod if it requests GPUs. One of the same version as in the cache is not read again.

        Raises BadObject only where it is no pod at all.
        """
        meta = table_at(raw, "metadata")
        uid, version = meta.get("uid"), meta.get("resourceVersion")
        cached = self._state.gpu_pod(uid) if isinstance(uid, str) else None
        return cached if cached and version and cached.version == version else self._read_pod(raw)

    def _read_pod(self, raw: Mapping[str, Any]) -> GpuPod | None:
        return read_gpu_pod(raw, self._settings, self._state.records)

    def decide(
        self, known: GpuPod, node: str, *, reserve: bool = True, gone: CallerGone = never
    ) -> Reservation | Rejection:
        """Return the reserved cards of a pod on a node, or why there are none.

        reserve False (dry run): nothing is held for the pod. gone: tells whether the caller has given up.

        Raises:
            EffortExceeded: The search was ended for the sake of others; the pod may fit.
            RetryLater: That, or the caller is gone, or the API does not answer.
        """
        found = self._decide(known, node, gone, reserve=reserve)
        if isinstance(found, Rejection) and reserve:
            metrics.REJECTIONS.labels("decision", found.kind).inc()
        return found

    def _decide(self, known: GpuPod, node: str, gone: CallerGone, *, reserve: bool) -> Reservation | Rejection:
        uid = known.pod.uid
        for _ in range(_TRIES):
            known = self._state.gpu_pod(uid) or known
            request, refusal = known.request, self._state.binding_problem(uid, node)
            if request is None or refusal:
                kind = RejectionKind.BOUND_ALREADY if request else RejectionKind.MALFORMED
                return Rejection(kind, refusal or "; ".join(map(str, known.problems)), hopeless=True)
            held, view = (
                self._state.reservation(uid),
                self._state.node_snapshot(node, uid, occupied_gpuid(known.pod, node)),
            )
            if not known.pod.node and (not_now := self._not_now(known.pod, reserve=reserve)):
                return not_now
            if problem := self._agent_problem(known, request, node, view):
                return Rejection(RejectionKind.AGENT, problem, hopeless=True)
            if held is not None and held.node == node and held.request == request and self._stands(held, view):
                if not reserve or self._state.renew(held):
                    return held
                continue
            if held is not None and held.node != node and reserve:
                refusal = self._landed(held)
                if refusal:
                    return Rejection(RejectionKind.BOUND_ALREADY, refusal, hopeless=True)
            if problem := self._state.remnant_problem(known.pod):
                if known.pod.node:
                    raise RetryLater(problem)  # it waits on its node; a rejection would fail the pod
                return Rejection(RejectionKind.OTHER, problem, hopeless=True)
            decision = self._choose(known, request, node, view, gone)
            if isinstance(decision, Rejection) or not reserve or self._reserve(decision, view):
                return decision
        raise RetryLater(f"node {node} changes faster than cards can be decided on it")

    def _not_now(self, pod: Pod, *, reserve: bool) -> Rejection | None:
        """Return why nothing may be reserved for a pod that is not bound, whatever is free."""
        if pod.gated:
            raw = self._read(pod.namespace, pod.name)  # the watch may be behind the removal of the last gate
            if raw is None or raw["metadata"]["uid"] != pod.uid or read_pod(raw).gated:
                return Rejection(RejectionKind.GATED, GATED, hopeless=True)
        pause = self._state.reservation_pause(pod.uid) if reserve else 0.0
        if not pause:
            return None
        text = f"bindings of this pod keep failing; cards are reserved again in {pause:.0f} s"
        return Rejection(RejectionKind.BINDINGS_FAIL, text, hopeless=True)

    def _agent_problem(self, known: GpuPod, request: GpuRequest, node: str, view: NodeSnapshot) -> str | None:
        """Return why the agent of the node would not start the pod now.

        A pod that is bound already is not refused: it waits there for its cards, and its agent may come back. What
        NVIDIA's plugin gives out needs no agent of mgpu.
        """
        if known.pod.node or nvidia_plugin.chooses_cards(view.node, request):
            return None
        return self._state.agent_problem(node)

    def _reserve(self, decision: Reservation, view: NodeSnapshot) -> bool:
        if not self._state.reserve(decision, view.version):
            return False
        theirs = nvidia_plugin.chooses_cards(view.node, decision.request)
        policy = nvidia_plugin.NVIDIA if theirs else dialects.card_policy(decision.request, self._settings)
        metrics.DECISIONS.labels(policy, decision.request.dialect).inc()
        return True

    def _stands(self, held: Reservation, view: NodeSnapshot) -> bool:
        """Whether a reservation's cards may still be given to its pod.

        They are free, being reserved, but for what another replica decided that has led since, or a node gave away.
        """
        if same_card_group_rejection(held.request, view.cards, self._state.seats(held.request, held.uid)):
            return False
        return still_fits(held.request, shares_of(held.request, held.placement), (*view.cards, *view.other_devices))

    def _choose(
        self, known: GpuPod, request: GpuRequest, node: str, view: NodeSnapshot, gone: CallerGone
    ) -> Reservation | Rejection:
        if view.node is None:
            return Rejection(RejectionKind.UNKNOWN_NODE, f"node {node} is not known to mgpu (yet)")
        pod, gpuid = known.pod, occupied_gpuid(known.pod, node)
        who = (pod.uid, pod.namespace, pod.name, node)
        if nvidia_plugin.chooses_cards(view.node, request):
            refused = nvidia_plugin.refusal(request, view.node, view.cards, view.mgpu_cards)
            return refused or Reservation(*who, request, Placement(()), {}, pod.needs, gpuid)
        with self._budgets.call(pod.namespace, request, gone) as call:
            found = self._search(known, request, view.node, view, call)
        if isinstance(found, Rejection):
            return found
        written = record(pod, request, found, (*view.cards, *view.other_devices), self._settings, time.time_ns())
        annotations = self._state.records.sealed(Subject(*who), written)
        return Reservation(*who, request, found, annotations, pod.needs, gpuid)

    def _search(
        self, known: GpuPod, request: GpuRequest, node: Node, view: NodeSnapshot, call: Call
    ) -> Placement | Rejection:
        """Beside what is kept for nominated pods, and where that does not do without regard to it.

        A search that ends without proof under a policy that looks ahead is made again without looking ahead, as the
        filter makes it: what the filter has passed is found here too.
        """
        seats = self._state.seats(request, known.pod.uid)
        cards = (*view.cards, *view.other_devices)
        available_cards = (*view.available_cards, *view.available_other_devices)
        judges = self._state.forecast.judges
        ahead = [Foresight(judges, view.free_resources, known.pod.needs)] if judges else []
        found: Placement | Rejection | None = None
        for there in (available_cards, cards) if available_cards != cards else (cards,):
            limits = call.require_limits()
            for foresight in (*ahead, None):
                found = assess(
                    request, node, there, self._settings, foresight, seats=seats, limits=limits, effort=call.effort
                )
                if isinstance(found, Placement):
                    return found
                if not found.proven and limits is not FULL:
                    metrics.SEARCHES_ENDED.labels("rationed").inc()
                    raise EffortExceeded(str(found))
                if found.proven:
                    break
        assert found is not None
        return found

    def check_overdue(self) -> None:
        """Ask the API what became of reservations whose pod has not appeared on its node in time."""
        for decision in self._state.overdue_reservations():
            self.check(decision)

    def check(self, decision: Reservation) -> None:
        """Release a reservation whose write has failed; keep it where the pod is bound or the API does not answer."""
        try:
            raw = self._read(decision.namespace, decision.name)
        except RetryLater as error:
            log.warning("reservation kept, it cannot be checked: %s", error, extra={"pod": decision.uid})
            self._state.keep(decision)
            return
        if raw is not None and raw["metadata"]["uid"] == decision.uid and (raw.get("spec") or {}).get("nodeName"):
            self._state.keep(decision)  # bound: its event is on the way, or its late decision
        else:
            log.info("reservation released, its write failed", extra={"pod": decision.uid, "node": decision.node})
            self._state.cancel(decision)
            metrics.RELEASED.inc()

    def _landed(self, held: Reservation) -> str:
        """Why a reservation may not be moved: its write has landed after all, or the pod is gone; "": it may."""
        raw = self._read(held.namespace, held.name)
        if raw is None or raw["metadata"]["uid"] != held.uid:
            self._state.cancel(held)
            return "the pod is gone"
        node = (raw.get("spec") or {}).get("nodeName")
        return f"the pod is bound to {node} already" if node else ""

    def _read(self, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return self._api.get(pod_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise RetryLater(str(error)) from error
        except Unreachable as error:
            raise RetryLater(str(error)) from error
