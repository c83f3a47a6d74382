"""Decides which MIG instances a ResourceClaim gets on a node with the label `gpu.partitioning=mig-claims`.

`claim_decider` calls `InstanceDecider`, and makes the reservation. kube-scheduler has chosen an instance for each
allocation result. On admission the claim gets the best instances of the same profiles on the same node, among those
that its selectors and constraints allow (`scheduler.engine.mig_placement`). For a claim without an allocation,
`assess` finds out whether it would get any that its selectors allow.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mgpu.model.cards import Card
from mgpu.model.gpu_requests import CardRefusal, GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.mig_attributes import mig_attributes
from mgpu.model.mig_devices import MigCardState, MigDevice, MigOffer, offers_of
from mgpu.model.node_slices import LABEL
from mgpu.model.resource_claims import DRIVER, MAX_RESULTS, Claim, DeviceRequest, Result
from mgpu.model.slice_names import MIG_CLAIMS
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.decisions.claim_selectors import Patience, Selectors, Unsupported
from scheduler.engine.effort import Budget
from scheduler.engine.mig_placement import InstanceRelation, WantedInstance, cost_of, place_instances

_SAMPLE_SECONDS = 10.0
"""How long the instances that the cluster offers are remembered, for the question whether a class is for instances."""


@dataclass(frozen=True, slots=True)
class _PlannedResult:
    """One result of a claim, present or future.

    Attributes:
        request: The name of its request.
        chosen: The instance that kube-scheduler has chosen; None if the claim is not allocated.
    """

    request: str
    chosen: MigDevice | None = None

    @property
    def kind(self) -> tuple[str, str | None]:
        """What is equal for results that may get the same instances: the request and the profile."""
        return self.request, None if self.chosen is None else self.chosen.instance.profile


class InstanceDecider:
    """Decides the MIG instances of claims. Thread-safe.

    Args:
        class_selectors: Returns the CEL selectors of a DeviceClass, or None if the class is not known.
        cards: Returns the cards of the nodes on which claims get instances.
    """

    def __init__(
        self,
        class_selectors: Callable[[str], Sequence[str] | None],
        cards: Callable[[], Iterable[Card]],
        selectors: Selectors,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._class_selectors = class_selectors
        self._cards = cards
        self._selectors = selectors
        self._clock = clock
        self._samples: tuple[float, list[MigOffer]] = (0.0, [])

    def is_for_instances(self, request: DeviceRequest) -> bool:
        """Return whether the request's DeviceClass selects MIG instances, of which the cluster has some."""
        expressions = self._class_selectors(request.device_class)
        if not expressions or request.admin:
            return False
        offers = self._sample_offers()
        excluded = self._selectors.excluded_instances(expressions, offers)
        return not isinstance(excluded, Unsupported) and len(excluded) < len(offers)

    def _sample_offers(self) -> list[MigOffer]:
        """Return the instances of a card of each model and size, since the selectors of a DeviceClass may name those.

        The cards of all nodes are read only from time to time, because the filter calls this for each pod.
        """
        read, samples = self._samples
        if samples and self._clock() - read < _SAMPLE_SECONDS:
            return samples
        cards = {(card.model, card.memory): card for card in self._cards()}
        samples = [offer for i, card in enumerate(cards.values()) for offer in offers_of(replace(card, index=i))]
        self._samples = self._clock(), samples
        return samples

    def place(
        self,
        claim: Claim,
        request: GpuRequest,
        snapshot: NodeSnapshot,
        budget: Budget | None = None,
        patience: Patience | None = None,
    ) -> Placement | Rejection:
        """Return the instances of the results of an allocated claim, in `Placement.others`, or why it gets none.

        Args:
            request: The result of `gpu_request` for the claim.
            budget: The effort that the search may take (`place_instances`).
            patience: The time that is left for the claim's selectors.
        """
        results = [result for result in claim.results if result.mig_device is not None and not result.admin]
        planned = [_PlannedResult(result.request, result.mig_device) for result in results]
        devices = self._devices(claim, planned, snapshot, budget, patience)
        if isinstance(devices, Rejection):
            return devices
        rows = []
        for one in request.others:
            pairs = zip(planned, devices, strict=True)
            own = (d.index for result, d in pairs if result.request == one.container and d.type == one.type)
            rows.append((one.type, one.container, tuple(sorted(own))))
        return Placement((), others=tuple(rows))

    def assess(
        self,
        claim: Claim,
        names: Collection[str],
        snapshot: NodeSnapshot,
        budget: Budget | None = None,
        patience: Patience | None = None,
    ) -> Rejection | None:
        """Return why the node has no instances for these requests of a claim without an allocation, or None."""
        found = self.expected(claim, names, snapshot, budget, patience)
        return found if isinstance(found, Rejection) else None

    def cost(
        self,
        claim: Claim,
        names: Collection[str],
        snapshot: NodeSnapshot,
        budget: Budget | None = None,
        patience: Patience | None = None,
    ) -> int:
        """Return how many instances can no longer be created on the node once these requests have theirs.

        0 if they do not fit.
        """
        found = self.expected(claim, names, snapshot, budget, patience)
        return 0 if isinstance(found, Rejection) else cost_of(snapshot.mig_cards, [device for _, device in found])

    def expected(
        self,
        claim: Claim,
        names: Collection[str],
        snapshot: NodeSnapshot,
        budget: Budget | None = None,
        patience: Patience | None = None,
    ) -> list[tuple[str, MigDevice]] | Rejection:
        """Return the instances that these requests of a claim without an allocation would get on the node.

        Each is beside the name of its request.
        """
        requests = [request for request in claim.requests if request.name in names]
        planned = [_PlannedResult(request.name) for request in requests for _ in range(max(1, request.count))]
        if len(planned) > MAX_RESULTS:
            text = f"the claim requests more than {MAX_RESULTS} devices"
            return Rejection(RejectionKind.MALFORMED, text, hopeless=True)
        found = self._devices(claim, planned, snapshot, budget, patience)
        if isinstance(found, Rejection):
            return found
        return [(result.request, device) for result, device in zip(planned, found, strict=True)]

    def _devices(
        self,
        claim: Claim,
        planned: Sequence[_PlannedResult],
        snapshot: NodeSnapshot,
        budget: Budget | None,
        patience: Patience | None,
    ) -> tuple[MigDevice, ...] | Rejection:
        if not snapshot.mig_cards:
            text = f"the node has no cards whose MIG instances claims can get (label {LABEL}={MIG_CLAIMS})"
            return Rejection(RejectionKind.NO_DEVICE, text, hopeless=True)
        relations = _relations(claim, planned, snapshot.mig_cards)
        if isinstance(relations, Rejection):
            return relations
        wanted, unsupported = self._wanted(claim, planned, snapshot.mig_cards, patience or Patience())
        found = place_instances(snapshot.mig_cards, wanted, relations, budget)
        if found.devices is not None:
            return found.devices
        if unsupported is not None:
            # kube-scheduler can evaluate the selector, and mgpu keeps the instances that it chooses.
            return Rejection(RejectionKind.NOT_PROVEN, unsupported.reason, proven=False)
        if not found.proven:
            text = "no MIG instances were found that exist together, but not all combinations were examined"
            return Rejection(RejectionKind.NOT_PROVEN, text, proven=False)
        return _rejection(claim, planned, wanted, snapshot.mig_cards)

    def _wanted(
        self, claim: Claim, planned: Sequence[_PlannedResult], cards: Sequence[MigCardState], patience: Patience
    ) -> tuple[list[WantedInstance], Unsupported | None]:
        """Return the instances that each result may get: kube-scheduler's own choice, and those like it.

        kube-scheduler has evaluated the selectors for its choice. The annotations of the claim limit its cards, too,
        which kube-scheduler does not know. If mgpu cannot evaluate a selector of a result without a choice, the second
        value says why.
        """
        constraints = claim.card_constraints
        usable = (state.card for state in cards if constraints.reason_against(state.card) is None)
        offers = [offer for card in usable for offer in offers_of(card)]
        selected: dict[tuple[str, str | None], frozenset[MigDevice] | Unsupported] = {}
        wanted: list[WantedInstance] = []
        unsupported: Unsupported | None = None
        for result in planned:
            if result.kind not in selected:
                selected[result.kind] = self._selected(claim, result, offers, patience)
            found = selected[result.kind]
            allowed = frozenset(offer.device for offer in offers if offer.device == result.chosen)
            if not isinstance(found, Unsupported):
                allowed |= found
            elif result.chosen is None:
                unsupported = found
            wanted.append(WantedInstance(result.request, allowed))
        return wanted, unsupported

    def _selected(
        self, claim: Claim, result: _PlannedResult, offers: Sequence[MigOffer], patience: Patience
    ) -> frozenset[MigDevice] | Unsupported:
        """Return the instances like a result that its selectors allow, or why mgpu does not know them."""
        request = claim.request(result.request)
        of_class = self._class_selectors(request.device_class) if request is not None else None
        if request is None or of_class is None:
            return Unsupported("its DeviceClass is not known to mgpu (yet)")
        like = [offer for offer in offers if _is_like(offer, result, request)]
        excluded = self._selectors.excluded_instances((*of_class, *request.selectors), like, patience)
        if isinstance(excluded, Unsupported):
            return excluded
        return frozenset(offer.device for offer in like if offer.device not in excluded)


def _is_like(offer: MigOffer, result: _PlannedResult, request: DeviceRequest) -> bool:
    """Return whether an instance has the chosen profile, and the amounts that the request states."""
    if result.chosen is not None and offer.instance.profile != result.chosen.instance.profile:
        return False
    return offer.core >= (request.core or 0) and offer.memory >= (request.memory or 0)


def _relations(
    claim: Claim, planned: Sequence[_PlannedResult], cards: Sequence[MigCardState]
) -> tuple[InstanceRelation, ...] | Rejection:
    """Return the relations between the instances of the claim, or why mgpu does not support them."""
    found = {
        offer.device: {f"{DRIVER}/{name}": value for name, value in mig_attributes(offer).items()}
        for state in (cards if claim.constraints else ())
        for offer in offers_of(state.card)
    }
    relations = []
    for constraint in claim.constraints:
        concerned = frozenset(at for at, result in enumerate(planned) if constraint.concerns(result.request))
        if concerned and any(constraint.concerns(result.request) for result in _shares(claim)):
            # The cards and the instances are searched one after the other.
            text = f"mgpu does not support the constraint on {constraint.attribute} between cards and MIG instances"
            return Rejection(RejectionKind.CONSTRAINT, text, hopeless=True)

        def value(device: MigDevice, attribute: str = constraint.attribute) -> Hashable:
            # With its type, because in Python True == 1.
            value = found.get(device, {}).get(attribute)
            return None if value is None else (type(value).__name__, value)

        relations.append(InstanceRelation(concerned, value, constraint.distinct))
    return tuple(relations)


def _shares(claim: Claim) -> Iterator[Result]:
    return (result for result in claim.results if result.mig_device is None and not result.admin)


def _rejection(
    claim: Claim, planned: Sequence[_PlannedResult], wanted: Sequence[WantedInstance], cards: Sequence[MigCardState]
) -> Rejection:
    """Return why there are no instances: the first result that gets none even alone, or that they do not fit together.

    Evicting pods cannot help, because pods with claims are not evicted.
    """
    for result, one in zip(planned, wanted, strict=True):
        if any(MigDevice(state.card.index, i) in one.allowed for state in cards for i in state.possible()):
            continue
        refusals = tuple(_refusal(claim, result, one, state) for state in cards)
        return Rejection(RejectionKind.SLICES, "", refusals, hopeless=True)
    text = f"each of the {len(wanted)} requested MIG instances is available alone, but not all of them together"
    return Rejection(RejectionKind.NOT_TOGETHER, text, hopeless=True)


def _refusal(claim: Claim, result: _PlannedResult, one: WantedInstance, state: MigCardState) -> CardRefusal:
    index = state.card.index
    if not state.card.healthy:
        return CardRefusal(index, RejectionKind.UNHEALTHY, "unhealthy")
    if not state.in_mode:
        return CardRefusal(index, RejectionKind.SLICES, "not in MIG mode")
    if state.blocked:
        return CardRefusal(index, RejectionKind.IN_USE, "held by pods that have no MIG instances")
    limited = claim.card_constraints.reason_against(state.card)
    if limited is not None:
        return CardRefusal(index, RejectionKind.CONSTRAINT, limited)
    profiles = {device.instance.profile for device in one.allowed if device.card == index}
    if not profiles:
        name = f"no {result.chosen.instance.profile}" if result.chosen is not None else "no instance"
        return CardRefusal(index, RejectionKind.CONSTRAINT, f"{name} that its selectors allow")
    starts: dict[str, list[int]] = {}
    for start, profile in sorted(state.used):
        starts.setdefault(profile, []).append(start)
    places = ", ".join(f"{profile} in use at {', '.join(map(str, at))}" for profile, at in sorted(starts.items()))
    return CardRefusal(index, RejectionKind.SLICES, f"{places}: no room for {' or '.join(sorted(profiles))}")
