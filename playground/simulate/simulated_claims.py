"""The ResourceClaims of `mgpu simulate`: which claims a pod uses, and what they hold.

It takes the place of the controller that creates claims from templates, and of kube-scheduler, which allocates the
claims of a pod on the node of the pod. `pipeline` calls `SimulatedClaims`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deviceplugin.dra.claim_views import WHOLE_CLAIM, View, parent_index, views_of
from mgpu.model.cards import Card, CardState
from mgpu.model.claim_object import read_claim
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.mig_devices import offer_of
from mgpu.model.pods import Pod
from mgpu.model.quantities import quantity_of_bytes
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import CORES, DRA, MEMORY, MILLI_PER_PERCENT, Claim, Consumer, claim_holding
from mgpu.presentation.card_views import percent
from mgpu.settings import CARD_POLICIES, Settings
from playground.scheduling.claims.extended_resources import extended_claim
from playground.simulate.claim_files import CLAIM, TEMPLATE, WHOLE_CARDS, ClaimObjects
from playground.simulate.claim_trials import Allocation, Trials, first_request
from playground.simulate.documents import Raw
from playground.simulate.simulated_cluster import SimulatedCluster
from scheduler.engine.node_assessment import score

WHOLE = ""
"""The entry of the claim that kube-scheduler creates for the extended resources of a pod."""


@dataclass(frozen=True, slots=True)
class PodClaims:
    """The claims of a pod.

    Attributes:
        claims: The claims by the names of the entries in the pod's `spec.resourceClaims`.
        missing: What the pod waits for, because the input does not contain it; "" if it is complete.
        mapped: For each container that requests whole cards by their old name, its requests of the claim `WHOLE`.
    """

    claims: Mapping[str, Claim] = field(default_factory=dict)
    missing: str = ""
    mapped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def open(self) -> list[Claim]:
        """The claims without an allocation. Several entries may name the same claim, which counts once."""
        found = {claim.uid: claim for claim in self.claims.values() if not claim.allocated}
        return list(found.values())

    def request(self) -> GpuRequest | None:
        """Return what the open claims request, for what learning policies expect; None if they request nothing."""
        return joined([(claim, first_request(claim)) for claim in self.open])


def joined(requests: Iterable[tuple[Claim, GpuRequest]]) -> GpuRequest | None:
    """Return the requests of several claims as that of one pod, whose containers are named after them."""
    found = list(requests)
    containers = [
        replace(one, container=f"{claim.name}/{one.container}")
        for claim, request in found
        for one in request.containers
    ]
    return GpuRequest(DRA, tuple(containers), constraints=found[0][1].constraints) if containers else None


class SimulatedClaims:
    """All claims of a simulation.

    Args:
        objects: The claims, templates and classes of the input.
    """

    def __init__(self, cluster: SimulatedCluster, settings: Settings, objects: ClaimObjects) -> None:
        self._cluster = cluster
        self._settings = settings
        self._templates = dict(objects.templates)
        self._claims = dict(objects.claims)
        self._extended = objects.extended
        self._trials = Trials(cluster, settings, objects.classes)

    def take_in(self) -> None:
        """Hold the cards of the claims that are allocated in the input."""
        for claim in self._claims.values():
            self._hold(claim)

    def add_template(self, raw: Raw) -> None:
        """Add the template that the scheduler creates for a converted pod."""
        meta = raw["metadata"]
        annotations = table_at(raw, "spec", "metadata")
        claim = read_claim({"metadata": annotations, "spec": raw["spec"]["spec"]}, CARD_POLICIES)
        self._templates[f"{meta['namespace']}/{meta['name']}"] = claim

    def of_pod(self, pod: Pod, raw: Raw) -> PodClaims:
        """Return the claims of a pod. Claims from templates that do not exist yet are described, but not created."""
        statuses = table_at(raw, "status").get("resourceClaimStatuses") or ()
        created = {row["name"]: row.get("resourceClaimName") for row in statuses}
        found: dict[str, Claim] = {}
        for entry in table_at(raw, "spec").get("resourceClaims") or ():
            name = entry.get("resourceClaimName") or created.get(entry["name"])
            template = f"{pod.namespace}/{entry.get('resourceClaimTemplateName')}"
            claim = self._claims.get(f"{pod.namespace}/{name or _generated_name(pod, entry)}")
            if claim is None and (name or template not in self._templates):
                missing = f"{CLAIM} {pod.namespace}/{name}" if name else f"{TEMPLATE} {template}"
                return PodClaims(found, f"{missing} does not exist")
            found[entry["name"]] = claim or self._generated(pod, entry, self._templates[template])
        return PodClaims(found)

    def with_whole_cards(self, pod: Pod, raw: Raw, claims: PodClaims) -> PodClaims:
        """Return the claims of a pod with the one that kube-scheduler would create for its `nvidia.com/gpu`."""
        if WHOLE_CARDS not in self._extended:
            return replace(claims, missing=f"no DeviceClass stands for {WHOLE_CARDS}")
        made = extended_claim(raw, [WHOLE_CARDS], self._extended)
        name = f"{pod.name}-extended-resources"
        meta = {"namespace": pod.namespace, "name": name, "uid": f"{CLAIM}/{pod.namespace}/{name}"}
        mapped: dict[str, list[str]] = {}
        for row in made.mappings:
            mapped.setdefault(row["containerName"], []).append(row["requestName"])
        claim = read_claim({**made.claim, "metadata": meta})
        return replace(claims, claims={**claims.claims, WHOLE: claim}, mapped=mapped)

    def _generated(self, pod: Pod, entry: Raw, template: Claim) -> Claim:
        name = _generated_name(pod, entry)
        uid = f"{CLAIM}/{pod.namespace}/{name}"
        return replace(template, uid=uid, namespace=pod.namespace, name=name, owner=pod.uid)

    def allocate(self, pod: Pod, claims: PodClaims, node: str) -> list[Allocation] | Rejection | str:
        """Return the allocations of the pod's open claims on a node, or why one of them gets none.

        The claims are allocated one after the other, so each one counts when the next one is placed. Afterwards none of
        them holds anything, until `bind` is called.
        """
        other = next((c for c in claims.claims.values() if c.allocated and c.node not in ("", node)), None)
        if other is not None:
            return f"its {CLAIM} {other.name} is allocated on {other.node}"
        found: list[Allocation] = []
        try:
            for claim in claims.open:
                answer = self._trials.allocate(claim, node, pod.cpu_memory)
                if isinstance(answer, Rejection):
                    return f"claim {claim.name}: {answer}" if len(claims.claims) > 1 else answer
                found.append(answer)
                self._hold(answer.claim)
        finally:
            for allocation in found:
                self._cluster.release(allocation.claim.uid)
        return found

    def hold(self, allocations: Sequence[Allocation]) -> None:
        """Hold the cards of allocations, as if they were written."""
        for allocation in allocations:
            self._hold(allocation.claim)

    def release(self, allocations: Sequence[Allocation]) -> None:
        for allocation in allocations:
            self._cluster.release(allocation.claim.uid)

    def score(self, allocations: Sequence[Allocation], states: Sequence[CardState]) -> int | None:
        """Return the score of a node for a pod with these allocations, or None if its claims were allocated before."""
        request = joined([(one.claim, one.request) for one in allocations])
        if request is None:
            return None
        rows = [(f"{one.claim.name}/{name}", cards) for one in allocations for name, cards in one.placement.containers]
        return score(request, Placement(tuple(rows)), states, self._settings)

    def bind(self, pod: Pod, claims: PodClaims, allocations: Sequence[Allocation]) -> PodClaims:
        """Write the allocations, and make the pod a consumer of its claims. Return the claims as they are then."""
        allocated = {one.claim.uid: one.claim for one in allocations}
        consumer = Consumer("pods", pod.name, pod.uid)
        for claim in {claim.uid: claim for claim in claims.claims.values()}.values():
            written = allocated.get(claim.uid, claim)
            self._claims[claim.key] = replace(written, consumers=(*written.consumers, consumer))
            self._hold(written)
        return replace(claims, claims={entry: self._claims[claim.key] for entry, claim in claims.claims.items()})

    def _hold(self, claim: Claim) -> None:
        holding = claim_holding(claim)
        if holding is not None and holding.node in self._cluster.raw:
            self._cluster.hold(holding)


def _generated_name(pod: Pod, entry: Raw) -> str:
    """Return the name of a claim from a template. A cluster adds a random suffix."""
    return f"{pod.name}-{entry['name']}"


def claim_rows(claims: PodClaims) -> list[dict[str, Any]]:
    """Return the claims of a pod for the output: their names, and the results of mgpu's driver."""
    found = {claim.uid: claim for claim in claims.claims.values()}
    return [{"name": claim.name, "node": claim.node or None, "results": _results(claim)} for claim in found.values()]


def _results(claim: Claim) -> list[dict[str, Any]]:
    return [
        {
            "request": result.request,
            "device": result.device,
            "consumedCapacity": {
                CORES: f"{(result.core or 0) / MILLI_PER_PERCENT:g}",
                MEMORY: quantity_of_bytes(result.memory or 0),
            },
        }
        for result in claim.results
    ]


def delivered(raw: Raw, claims: PodClaims, cards: Sequence[Card]) -> dict[str, Raw]:
    """Return what the agent delivers to each container of a pod that uses claims, in the form of `Delivery`."""
    views = views_of_containers(raw, claims, cards)
    return {name: _delivered(found) for name, found in views.items()}


def views_of_containers(raw: Raw, claims: PodClaims, cards: Sequence[Card]) -> dict[str, list[View]]:
    """Return what each container sees of claims of mgpu, one view for each of its references to them.

    If it has several, the agent refuses to prepare the claims of the pod, because the variables of the last one would
    hide the others (`deviceplugin.dra.claim_views`).
    """
    spec = raw["spec"]
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    views = {container["name"]: list(_views(container, claims, cards)) for container in containers}
    return {name: found for name, found in views.items() if found}


def _views(container: Raw, claims: PodClaims, cards: Sequence[Card]) -> Iterator[View]:
    rows = (container.get("resources") or {}).get("claims") or ()
    wanted = [(row["name"], row.get("request") or WHOLE_CLAIM) for row in rows]
    wanted += [(WHOLE, request) for request in claims.mapped.get(container["name"], ())]
    for entry, request in wanted:
        claim = claims.claims[entry]
        by_name = {view.name: view for view in views_of(claim, (*cards, *_instances(claim, cards)))}
        if request == WHOLE_CLAIM and len(by_name) == 1:  # a claim with one request has no view of its own
            yield from by_name.values()
        elif request in by_name:
            yield by_name[request]


def _instances(claim: Claim, cards: Sequence[Card]) -> Iterator[Card]:
    """Yield the MIG instances of a claim as devices. Their UUIDs are made up."""
    for result in claim.results:
        offer = offer_of(result.mig_device, cards) if result.mig_device is not None else None
        if offer is not None:
            uuid = f"MIG-{offer.card.uuid}-{offer.instance.profile}-{offer.instance.start}"
            yield replace(offer.as_card(), uuid=uuid)


def _delivered(views: Sequence[View]) -> Raw:
    """Return the cards, the amounts and the environment of a container. Of several claims the last one sets it."""
    pairs = [
        (card, share.amount(card))
        for view in views
        for share in view.shares
        for card in view.cards
        if share.is_on(card)
    ]
    return {
        "cards": list(dict.fromkeys(parent_index(card) for card, _ in pairs)),
        "core": [percent(amount.core) for _, amount in pairs],
        "memory": [amount.memory for _, amount in pairs],
        "env": views[-1].environment(),
    }
