"""Decides which cards a ResourceClaim gets on the node that kube-scheduler has chosen, and reserves them.

`api.claim_webhook` calls `ClaimDecider.decide` for each allocation that kube-scheduler writes. As for bindings, the
reservation holds the cards until the watch delivers the allocation, and `Decider.check_overdue` releases it if the
write has failed. The allocation of kube-scheduler says how much the claim needs of how many cards, and on which node;
its choice of cards counts only where mgpu cannot judge a selector. `mig_decisions` decides the MIG instances.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mgpu import dialects
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.cards import GPU, Card, CardState, states_of_type
from mgpu.model.compute_resources import NO_CPU_MEMORY
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.ledger import Share, shares_of
from mgpu.model.mig_devices import instances_of
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import (
    DRA,
    MAX_RESULTS,
    Claim,
    DeviceRequest,
    card_index,
    claim_path,
    gpu_request,
    requests_before_allocation,
)
from mgpu.settings import Settings
from scheduler import metrics
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.claim_selectors import Patience, Selectors, Unsupported
from scheduler.decisions.effort_budgets import CallerGone, EffortBudgets, EffortExceeded, never
from scheduler.decisions.in_flight import PodsInFlight
from scheduler.decisions.mig_decisions import InstanceDecider
from scheduler.engine import FULL
from scheduler.engine.card_constraints import same_card_group_rejection, still_fits
from scheduler.engine.claim_placement import place_claim, qualified_attributes
from scheduler.engine.effort import Budget
from scheduler.engine.mig_placement import fit_together
from scheduler.engine.node_assessment import Foresight, choose_policy

_ATTEMPTS = 50
"""The most attempts at one decision, as for pods (`decider._ATTEMPTS`)."""

_SAMPLE_SECONDS = 10.0
"""How long the models of the cluster's cards are remembered, for the question whether a DeviceClass is for cards."""

Found = TypeVar("Found", bound=Placement | Rejection | int | None)

Excluded = Mapping[str, Mapping[int, str]]
"""By request of a claim, the cards that its selectors exclude, each with the reason."""


class ClaimDecider:
    """Decides and reserves the cards of claims. Thread-safe.

    Decisions are idempotent for each UID, because the API server calls the webhook twice for some writes: a claim that
    is decided again for the same node gets the same cards.

    Args:
        flights: The pods in flight (`decisions.in_flight_filter`).
    """

    def __init__(
        self,
        state: ClusterCache,
        api: Api,
        settings: Settings,
        budgets: EffortBudgets | None = None,
        selectors: Selectors | None = None,
        flights: PodsInFlight | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._api = api
        self._settings = settings
        self._budgets = budgets or EffortBudgets()
        self._selectors = selectors or Selectors()
        self._instances = InstanceDecider(state.claims.class_selectors, self._instance_cards, self._selectors, clock)
        self._flights = flights or PodsInFlight()
        self._clock = clock
        self._samples: tuple[float, list[Card]] = (0.0, [])

    def decide(self, claim: Claim, *, reserve: bool = True, gone: CallerGone = never) -> Reservation | Rejection | None:
        """Return the reserved cards of a claim, or why it gets none.

        The result is None if the claim has changed since the call: the API server will refuse the write, because its
        resourceVersion is outdated. A reservation for it would replace what the claim really holds.

        Args:
            claim: The claim with the allocation of kube-scheduler, of which at least one result is of mgpu's driver and
                without administrative access.
            reserve: False for a dry run, which reserves nothing.
            gone: Returns whether the caller has given up.

        Raises:
            EffortExceeded: The search ended because other calls need the time. The claim may fit.
            RetryLater: No decision is possible now.
        """
        pools = sorted({result.pool for result in claim.results})
        if len(pools) > 1:
            return _final(RejectionKind.MALFORMED, f"its devices are of several nodes: {', '.join(pools)}")
        try:
            decision = self._decide(claim, gpu_request(claim), reserve=reserve, gone=gone)
        finally:
            if reserve:
                for consumer in claim.consumers:
                    self._flights.end(consumer.uid)
        if isinstance(decision, Rejection) and reserve:
            metrics.REJECTIONS.labels("decision", decision.kind).inc()
        return decision

    def _decide(
        self, claim: Claim, request: GpuRequest, *, reserve: bool, gone: CallerGone
    ) -> Reservation | Rejection | None:
        node = claim.node
        for _ in range(_ATTEMPTS):
            snapshot = self._state.node_snapshot(node, claim.uid)
            if self._state.claims.is_outdated(claim.uid, claim.version):
                return None
            problem = self._problem(claim, request, snapshot)
            if problem is not None:
                return problem
            reserved = self._state.reservation(claim.uid)
            if reserved and reserved.node == node and reserved.request == request and self._holds(reserved, snapshot):
                if not reserve or self._renew(reserved, claim, snapshot):
                    return reserved
                continue
            if reserved and reserve and self._is_written(reserved):
                return _final(RejectionKind.BOUND_ALREADY, f"the claim is allocated on {reserved.node} already")
            placement = self.place(claim, request, snapshot, gone=gone)
            if isinstance(placement, Rejection):
                return placement
            subject = (claim.uid, claim.namespace, claim.name, node)
            decision = Reservation(*subject, request, placement, {}, NO_CPU_MEMORY, version=claim.version)
            if not reserve:
                return decision
            if reserved and self._is_written(reserved):  # Again, because the search may have taken long.
                return _final(RejectionKind.BOUND_ALREADY, f"the claim is allocated on {reserved.node} already")
            if self._state.claims.reserve(decision, snapshot.version, reserved):
                metrics.DECISIONS.labels(dialects.card_policy(request, self._settings), DRA).inc()
                return decision
        raise RetryLater(f"node {node} changes faster than cards can be decided on it")

    def _renew(self, reserved: Reservation, claim: Claim, snapshot: NodeSnapshot) -> bool:
        """Reserve the same cards for another attempt to write the allocation. Return whether they are reserved."""
        if reserved.version == claim.version:
            return self._state.reservations.renew(reserved)
        # Allocations of the claim before this version do not count any more (`ClaimHoldings`).
        return self._state.claims.reserve(replace(reserved, version=claim.version), snapshot.version, reserved)

    def _problem(self, claim: Claim, request: GpuRequest, snapshot: NodeSnapshot) -> Rejection | None:
        """Return why the claim gets no cards on this node now, regardless of free capacity, or None."""
        if self._state.claims.is_deleted(claim.uid):
            return _final(RejectionKind.BOUND_ALREADY, "the claim has been deleted")
        if snapshot.node is None:
            return _final(RejectionKind.UNKNOWN_NODE, f"node {claim.node} is not known to mgpu (yet)")
        agent = self._state.agent_problem(claim.node)
        if agent is not None:
            return _final(RejectionKind.AGENT, agent)
        if request.containers and not states_of_type(snapshot.cards):
            return _final(RejectionKind.NO_DEVICE, f"node {claim.node} has no whole GPU cards")
        pause = self._state.reservations.pause(claim.uid)
        if pause:
            text = f"writes of this claim keep failing; cards are reserved again in {pause:.0f} s"
            return _final(RejectionKind.BINDINGS_FAIL, text)
        return None

    def place(
        self,
        claim: Claim,
        request: GpuRequest,
        snapshot: NodeSnapshot,
        *,
        gone: CallerGone = never,
        patience: Patience | None = None,
    ) -> Placement | Rejection:
        """Return the cards that the claim would get on the node of a snapshot, or why it fits on none.

        Args:
            patience: The time that is left for the claim's selectors.
        """
        if sum(container.cards for container in (*request.containers, *request.others)) > MAX_RESULTS:
            return _final(RejectionKind.MALFORMED, f"the claim requests more than {MAX_RESULTS} devices")
        instances: Placement | Rejection = Placement(())
        if request.others:
            instances = self._search_instances(
                claim, request, lambda budget: self._instances.place(claim, request, snapshot, budget, patience), gone
            )
        if isinstance(instances, Rejection) or not request.containers:
            return instances
        excluded = self.exclusions(claim, request, snapshot.cards, patience)
        cards = self._search(claim, request, snapshot, excluded, gone)
        return cards if isinstance(cards, Rejection) else replace(cards, others=instances.others)

    def assess(
        self, claim: Claim, names: Collection[str], snapshot: NodeSnapshot, patience: Patience | None = None
    ) -> Rejection | None:
        """Return why these requests of a claim without an allocation do not fit on a node, or None if they fit.

        Requests for devices of other drivers are ignored, unless all of them are.

        Args:
            patience: The time that is left for the claim's selectors, if a caller assesses it several times.
        """
        requests = [request for request in claim.requests if request.name in names]
        of_cards = {one.name for one in requests if self.is_for_cards(one)}
        of_instances = {one.name for one in requests if one.name not in of_cards and self.is_for_instances(one)}
        request = requests_before_allocation(claim, of_cards)
        if not request.containers and not of_instances:
            return _final(RejectionKind.NO_DEVICE, "the claim requests no devices of mgpu's driver")
        rejection = self._assess_cards(claim, request, snapshot, patience) if request.containers else None
        if rejection is not None or not of_instances:
            return rejection
        return self._search_instances(
            claim, request, lambda budget: self._instances.assess(claim, of_instances, snapshot, budget, patience)
        )

    def _assess_cards(
        self, claim: Claim, request: GpuRequest, snapshot: NodeSnapshot, patience: Patience | None
    ) -> Rejection | None:
        """Return why the cards of the node do not suffice for this request of a claim, or None.

        kube-scheduler never chooses a card twice for one request, so a placement that does is a rejection.
        """
        found = self.place(claim, request, snapshot, patience=patience)
        return repeats_rejection(found) if isinstance(found, Placement) else found

    def cost_of_instances(
        self, claim: Claim, names: Collection[str], snapshot: NodeSnapshot, patience: Patience | None = None
    ) -> int:
        """Return how many MIG instances can no longer be created on a node once these requests have theirs.

        0 if they do not fit. Raises EffortExceeded.
        """
        chosen = {one.name for one in claim.requests if one.name in names and self.is_for_instances(one)}
        request = requests_before_allocation(claim, ())
        return self._search_instances(
            claim, request, lambda budget: self._instances.cost(claim, chosen, snapshot, budget, patience)
        )

    def _search_instances(
        self, claim: Claim, request: GpuRequest, search: Callable[[Budget], Found], gone: CallerGone = never
    ) -> Found:
        """Return the result of a search for MIG instances, whose effort is limited like that of a search for cards."""
        with self._budgets.call(claim.namespace, request, gone, charge_single=True) as call:
            limits = call.require_limits()
            found = search(Budget(call.effort, limits.search))
        if isinstance(found, Rejection) and not found.proven and limits is not FULL:
            raise EffortExceeded(str(found))
        return found

    def is_for_instances(self, request: DeviceRequest) -> bool:
        """Return whether the request's DeviceClass selects MIG instances, of which the cluster has some."""
        return self._instances.is_for_instances(request)

    def _instance_cards(self) -> Iterator[Card]:
        return (card for name in self._state.nodes_for_instances() for card in self._state.gpus(name))

    def is_for_cards(self, request: DeviceRequest) -> bool:
        """Return whether the selectors of the request's DeviceClass may select cards of mgpu's driver.

        A class that is not known yet may select them, and one for MIG instances does not.
        """
        expressions = self._state.claims.class_selectors(request.device_class)
        cards = self._sample_cards()
        if not expressions or not cards:
            return True
        excluded = self._selectors.excluded(expressions, cards)
        return isinstance(excluded, Unsupported) or len(excluded) < len(cards)

    def _sample_cards(self) -> list[Card]:
        """Return a card of each model and size, since the selectors of a DeviceClass may name those.

        The cards of all nodes are read only from time to time, because the filter calls this for each pod.
        """
        read, samples = self._samples
        if samples and self._clock() - read < _SAMPLE_SECONDS:
            return samples
        found: dict[tuple[str, int], Card] = {}
        for name in self._state.nodes_for_claims():
            for card in self._state.gpus(name):
                found.setdefault((card.model, card.memory), card)
        samples = [replace(card, index=i) for i, card in enumerate(found.values())]
        self._samples = self._clock(), samples
        return samples

    def exclusions(
        self, claim: Claim, request: GpuRequest, cards: Sequence[CardState], patience: Patience | None = None
    ) -> Excluded:
        """Return which cards the selectors of these requests of the claim and of their DeviceClasses exclude.

        kube-scheduler has evaluated the selectors for the cards that it has chosen, so these are never excluded. If
        mgpu cannot evaluate a selector, or does not know the class yet, no other cards are allowed.
        """
        gpus = [state.card for state in states_of_type(cards)]
        found: dict[str, Mapping[int, str]] = {}
        patience = patience or Patience()
        for name in dict.fromkeys(container.container for container in request.containers):
            own = {card_index(result.device) for result in claim.results if result.request == name} - {None}
            excluded = self._excluded(claim, name, gpus, patience)
            kept = {index: reason for index, reason in excluded.items() if index not in own}
            if kept:
                found[name] = kept
        return found

    def _excluded(self, claim: Claim, name: str, cards: Sequence[Card], patience: Patience) -> Mapping[int, str]:
        request = claim.request(name)
        of_class = self._state.claims.class_selectors(request.device_class) if request is not None else None
        if request is None or of_class is None:
            return {card.index: "its DeviceClass is not known to mgpu (yet)" for card in cards}
        expressions = (*of_class, *request.selectors)
        excluded = self._selectors.excluded(expressions, cards, patience) if expressions else {}
        if isinstance(excluded, Unsupported):
            return {card.index: f"not chosen by kube-scheduler; {excluded.reason}" for card in cards}
        return excluded

    def _search(
        self, claim: Claim, request: GpuRequest, snapshot: NodeSnapshot, excluded: Excluded, gone: CallerGone
    ) -> Placement | Rejection:
        """Search without the cards that are kept free for nominated pods. If that finds nothing, search with them."""
        group_cards = self._state.group_cards(request, claim.uid)
        rejection = same_card_group_rejection(request, snapshot.cards, group_cards)
        if rejection is not None:
            return rejection
        judges = self._state.forecast.judges
        foresight = Foresight(judges, snapshot.free_resources, self._state.claims.needs(claim)) if judges else None
        node = snapshot.node
        assert node is not None
        result: Placement | Rejection | None = None
        # In contrast to that of a pod, one request for several cards may need a search.
        is_long = sum(container.cards for container in request.containers) > 1
        with self._budgets.call(claim.namespace, request, gone, charge_single=is_long) as call:
            for cards in dict.fromkeys((snapshot.available_cards, snapshot.cards)):
                limits = call.require_limits()
                policy = choose_policy(request, node, states_of_type(cards), self._settings, foresight)
                result = place_claim(
                    request,
                    claim.constraints,
                    cards,
                    policy,
                    excluded,
                    qualified_attributes,
                    limits=limits,
                    effort=call.effort,
                )
                if isinstance(result, Placement):
                    return result
                if not result.proven and limits is not FULL:
                    raise EffortExceeded(str(result))
        assert result is not None
        return result

    def _holds(self, reserved: Reservation, snapshot: NodeSnapshot) -> bool:
        """Return whether the claim may still get the cards of its reservation (`Decider._holds`)."""
        if reserved.request.containers:  # Groups have no effect on MIG instances.
            group_cards = self._state.group_cards(reserved.request, reserved.uid)
            if same_card_group_rejection(reserved.request, snapshot.cards, group_cards):
                return False
        return fits(reserved.request, shares_of(reserved.request, reserved.placement), snapshot)

    def _is_written(self, reserved: Reservation) -> bool:
        """Return whether the allocation of a reservation, with other cards than are needed now, has been written.

        The watch may not have delivered it yet. If the claim is gone, the reservation is cancelled.
        """
        try:
            raw = self._api.get(claim_path(reserved.namespace, reserved.name))
        except ApiError as error:
            if error.status != 404:
                raise RetryLater(str(error)) from error
            raw = {}
        except Unreachable as error:
            raise RetryLater(str(error)) from error
        if table_at(raw, "metadata").get("uid") != reserved.uid:
            self._state.reservations.cancel(reserved)
            return False
        return bool(table_at(raw, "status", "allocation"))


def fits(request: GpuRequest, shares: Sequence[Share], snapshot: NodeSnapshot) -> bool:
    """Return whether a claim that has these shares fits beside all others on the node of a snapshot."""
    cards = [share for share in shares if share.type == GPU]
    return still_fits(request, cards, snapshot.cards) and fit_together(snapshot.mig_cards, instances_of(shares))


def repeats_rejection(placement: Placement) -> Rejection | None:
    """Return why kube-scheduler would not allocate a claim that mgpu would place like this, or None if it may.

    mgpu puts several results of a request on one card if there is no other way. kube-scheduler has to choose devices
    before, and chooses different ones for a request (`allocateOne` in k8s.io/dynamic-resource-allocation/structured).
    """
    for container, indexes in placement.containers:
        if len({*indexes}) < len(indexes):
            text = f"request {container} needs {len(indexes)} different cards, and too few can take it"
            return Rejection(RejectionKind.NOT_TOGETHER, text)
    return None


def _final(kind: RejectionKind, reason: str) -> Rejection:
    """Return a rejection that no eviction of pods can resolve."""
    return Rejection(kind, reason, hopeless=True)
