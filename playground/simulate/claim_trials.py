"""Allocates ResourceClaims on a node in `mgpu simulate`, as kube-scheduler and mgpu's admission of claims do together.

kube-scheduler chooses the alternative and the number of devices of each request, and the scheduler process chooses the
cards (`scheduler.decisions.claim_decider`). The cards come from the same functions of the engine. `simulated_claims`
calls `Trials.allocate`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from mgpu.model.cards import Card, CardState
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.mig_devices import offers_of
from mgpu.model.resource_claims import (
    LEAST_MEMORY,
    MILLI_PER_PERCENT,
    Claim,
    DeviceRequest,
    Result,
    device_name,
    gpu_request,
    requests_before_allocation,
)
from mgpu.settings import Settings
from playground.simulate.simulated_cluster import SimulatedCluster
from scheduler.decisions.claim_decider import repeats_rejection
from scheduler.decisions.claim_selectors import Selectors, Unsupported
from scheduler.decisions.mig_decisions import InstanceDecider
from scheduler.decisions.open_claims import alternatives
from scheduler.engine.card_constraints import same_card_group_rejection
from scheduler.engine.claim_placement import place_claim
from scheduler.engine.node_assessment import Foresight, choose_policy

_MOST_SETS = 1000
"""The most sets of alternatives that are tried for a claim on a node."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A claim with its allocation, which is not written yet.

    Attributes:
        claim: The claim with its results.
        request: What the claim requests with the chosen alternatives.
        placement: The cards of the claim, by request.
    """

    claim: Claim
    request: GpuRequest
    placement: Placement


class Trials:
    """Allocates claims on the nodes of a simulated cluster. It changes nothing.

    Args:
        classes: The CEL expressions of the DeviceClasses, by the name of the class.
    """

    def __init__(self, cluster: SimulatedCluster, settings: Settings, classes: Mapping[str, Sequence[str]]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._classes = classes
        self._selectors = Selectors()
        self._instances = InstanceDecider(classes.get, cluster.cards_for_instances, self._selectors)

    def allocate(self, claim: Claim, node: str, needs: CpuMemory) -> Allocation | Rejection:
        """Return the allocation that the claim gets on the node, or why it gets none.

        kube-scheduler tries the alternatives of the first request first, and within these those of the next one.

        Args:
            needs: The cpu and memory that the claim's pod requests.
        """
        rejections: list[Rejection] = []
        for chosen in islice(_alternatives(claim), _MOST_SETS):
            of_instances = [request for request in chosen if self._instances.is_for_instances(request)]
            of_cards = [request for request in chosen if request not in of_instances]
            cards = self._allocate_cards(claim, of_cards, node, needs)
            found = self._add_instances(cards, claim, of_instances, node) if isinstance(cards, Allocation) else cards
            if isinstance(found, Allocation):
                return found
            rejections.append(found)
        return rejections[0]

    def _allocate_cards(
        self, claim: Claim, chosen: Sequence[DeviceRequest], node: str, needs: CpuMemory
    ) -> Allocation | Rejection:
        """Return the allocation of the claim with only these requests, or why they get no cards."""
        if not chosen:
            return Allocation(replace(claim, allocated=True), gpu_request(claim), Placement(()))
        states = self._cluster.node_snapshot(node, claim.uid).cards
        if not states:
            return Rejection(RejectionKind.NO_DEVICE, f"node {node} has no whole GPU cards", hopeless=True)
        excluded = {request.name: self._excluded(request, states) for request in chosen}
        results = [row for request in chosen for row in _results(request, node, states, excluded[request.name])]
        tried = replace(claim, allocated=True, results=_numbered(results))
        found = self._place(tried, node, needs, excluded)
        if isinstance(found, Rejection):
            return found
        return _allocation(tried, found, [state.card for state in states], excluded)

    def _add_instances(
        self, allocation: Allocation, claim: Claim, chosen: Sequence[DeviceRequest], node: str
    ) -> Allocation | Rejection:
        """Return the allocation with the MIG instances of these requests, or why they get none."""
        if not chosen:
            return allocation
        snapshot = self._cluster.node_snapshot(node, claim.uid)
        found = self._instances.expected(claim, {request.name for request in chosen}, snapshot)
        if isinstance(found, Rejection):
            return found
        offers = {offer.device: offer for state in snapshot.mig_cards for offer in offers_of(state.card)}
        results = [
            Result(0, name, node, device.name, core=_percents(offers[device].core), memory=offers[device].memory)
            for name, device in found
        ]
        allocated = replace(allocation.claim, results=_numbered([*allocation.claim.results, *results]))
        return replace(allocation, claim=allocated)

    def _excluded(self, request: DeviceRequest, states: Sequence[CardState]) -> Mapping[int, str]:
        """Return the cards that the selectors of the request and of its DeviceClass exclude, each with the reason."""
        cards = [state.card for state in states]
        if request.device_class not in self._classes:
            return {card.index: f"there is no DeviceClass {request.device_class}" for card in cards}
        expressions = (*self._classes[request.device_class], *request.selectors)
        excluded = self._selectors.excluded(expressions, cards)
        if isinstance(excluded, Unsupported):
            return {card.index: excluded.reason for card in cards}
        return excluded

    def _place(
        self, claim: Claim, node: str, needs: CpuMemory, excluded: Mapping[str, Mapping[int, str]]
    ) -> Placement | Rejection:
        request = gpu_request(claim)
        snapshot = self._cluster.node_snapshot(node, claim.uid)
        group_cards = self._cluster.group_cards(request, claim.uid)
        rejection = same_card_group_rejection(request, snapshot.cards, group_cards)
        if rejection is not None:
            return rejection
        judges = self._cluster.forecast.judges
        foresight = Foresight(judges, snapshot.free_resources, needs) if judges else None
        policy = choose_policy(request, self._cluster.nodes[node], snapshot.cards, self._settings, foresight)
        found = place_claim(request, claim.constraints, snapshot.cards, policy, excluded)
        return repeats_rejection(found) or found if isinstance(found, Placement) else found


def first_request(claim: Claim) -> GpuRequest:
    """Return the request of a claim before its allocation, with the first alternative of each request."""
    return requests_before_allocation(claim, [request.name for request in next(_alternatives(claim))])


def _alternatives(claim: Claim) -> Iterator[tuple[DeviceRequest, ...]]:
    """Yield the sets of requests of which one is enough, in the order in which kube-scheduler tries them."""
    yield from product(*alternatives(claim.requests))


def _results(
    request: DeviceRequest, node: str, states: Sequence[CardState], excluded: Mapping[int, str]
) -> list[Result]:
    """Return the allocation results of a request, whose devices are not decided yet.

    A request for all devices gets one for each card that its selectors allow and that has room.
    """
    core = None if request.core is None else _rounded_up(request.core, MILLI_PER_PERCENT)
    memory = None if request.memory is None else _rounded_up(max(1, request.memory), LEAST_MEMORY)
    one = Result(0, request.name, node, "", core=core, memory=memory, admin=request.admin)
    if request.count:
        return [one] * request.count
    usable = [s for s in states if s.card.index not in excluded and s.card.healthy and _has_room(s, one)]
    return [one] * max(1, len(usable))  # without any card, a single one is refused with the reasons of all cards


def _rounded_up(amount: int, step: int) -> int:
    """Return the amount that kube-scheduler consumes for a request, which is a multiple of the published step."""
    return -(-amount // step) * step


def _percents(core: int) -> int:
    """Return what kube-scheduler sees of an amount of core, which is published in whole percents."""
    return core // MILLI_PER_PERCENT * MILLI_PER_PERCENT


def _has_room(state: CardState, result: Result) -> bool:
    core = state.card.core if result.core is None else result.core
    memory = state.card.memory if result.memory is None else result.memory
    return core <= state.core_free and memory <= state.memory_free


def _numbered(results: Sequence[Result]) -> tuple[Result, ...]:
    return tuple(replace(result, position=i) for i, result in enumerate(results))


def _allocation(
    claim: Claim, placement: Placement, cards: Sequence[Card], excluded: Mapping[str, Mapping[int, str]]
) -> Allocation:
    """Return the claim with the decided cards, and with what it consumes of them.

    A result with administrative access, which holds nothing, is for the first card that its selectors allow.
    """
    request = gpu_request(claim)
    known = {card.index: card for card in cards}
    results = list(claim.results)
    for result in (result for result in claim.results if result.admin):
        first = next((card.index for card in cards if card.index not in excluded[result.request]), 0)
        results[result.position] = replace(result, device=device_name(first))
    for container in request.containers:
        own = [result for result in claim.results if result.request == container.container and not result.admin]
        for result, index in zip(own, placement.cards(container.container), strict=True):
            amount = container.amount_on(known[index])
            results[result.position] = replace(
                result, device=device_name(index), core=amount.core, memory=amount.memory
            )
    return Allocation(replace(claim, results=tuple(results)), request, placement)
