"""Plans the slices of one node's cards, so that a pod finds the slices that it requests.

Mainly `partitionable_node` calls this module. With a sufficient budget, `can_offer` must be True for a request exactly
if `plan_cards` returns a plan for it. A plan must keep every slice in use at its place. Source: docs/design/slices.md,
"Scheduling".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu.model.cards import Card
from mgpu.model.gpu_requests import CardRefusal, Rejection, RejectionKind, cards_rejection
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice, mode_of
from scheduler.engine.effort import BRIEF, SHORT, Budget, Effort, Exhausted, full_budget
from scheduler.engine.partitioning.geometry import (
    CardPartition,
    Counts,
    Geometries,
    GeometryTable,
    MigCard,
    Place,
    add_counts,
    counts_of,
    mig_card,
    table_of,
)
from scheduler.engine.partitioning.mps_shares import MpsCard, mps_card
from scheduler.engine.partitioning.slice_allocation import CardShare, find_allocation, find_best_allocation

NOT_PROVEN = (
    "the search for slices was ended because it takes too long, and whether they fit is not proven; it will be "
    "repeated; a search for fewer different sizes takes less time"
)


@dataclass(frozen=True, slots=True)
class PartitionableCards:
    """The cards of a node that can be partitioned. The object is valid until the node or its holdings change.

    Attributes:
        mode: MIG or MPS; "" if the node's cards are not partitioned.
        cards: The index of each card that can be partitioned, and the card, in ascending order.
        refusals: The reasons why the other cards cannot be partitioned.
        blocked_by_pods: The cards that could be partitioned if the caller had not excluded them.
        kept: The slices on all cards that are not in `cards`.
    """

    mode: str
    cards: tuple[tuple[int, MigCard | MpsCard], ...] = ()
    refusals: tuple[CardRefusal, ...] = ()
    blocked_by_pods: tuple[MigCard | MpsCard, ...] = ()
    kept: tuple[Slice, ...] = ()


def partitionable_cards(
    gpus: Iterable[Card],
    observed: NodeSlices,
    used: Iterable[Slice],
    geometries: Geometries,
    unavailable: Mapping[int, str],
) -> PartitionableCards:
    """Return which cards of a node can be partitioned.

    Args:
        gpus: All GPUs of the node.
        observed: What the node reports about its slices.
        used: The slices that are in use according to the ledger or to the node's report.
        geometries: The geometries that the settings allow.
        unavailable: By index, the reasons why the caller excludes cards because of the pods that use them. Unhealthy
            cards and cards that are not in MIG mode need not be listed.
    """
    used_places, free_places = _places_by_card(used, observed)
    table: GeometryTable | None = None
    model: tuple[str, int] | None = None
    cards, refusals, blocked, kept = [], [], [], []
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        if model != (gpu.model, gpu.memory) and observed.mode == MIG:
            model = (gpu.model, gpu.memory)
            table = table_of(gpu, geometries)
        places = used_places.pop(gpu.index, ()), free_places.pop(gpu.index, ())
        card = _card(gpu, observed.mode, table, *places)
        reason = _state_reason(gpu, observed) or unavailable.get(gpu.index) or (card if isinstance(card, str) else None)
        if reason is None and not isinstance(card, str):
            cards.append((gpu.index, card))
            continue
        refusals.append(CardRefusal(gpu.index, RejectionKind.SLICES, reason or ""))
        kept += [Slice(gpu.index, *place) for listed in places for place in listed]
        if reason == unavailable.get(gpu.index) and not isinstance(card, str):
            blocked.append(card)
    # The remaining slices are on cards that the node no longer reports.
    kept += [Slice(i, *place) for places in (used_places, free_places) for i, rows in places.items() for place in rows]
    return PartitionableCards(observed.mode, tuple(cards), tuple(refusals), tuple(blocked), tuple(sorted(kept)))


def _places_by_card(
    used: Iterable[Slice], observed: NodeSlices
) -> tuple[dict[int, list[Place]], dict[int, list[Place]]]:
    """Return, by card, the places in use and the other existing places, in ascending order and without duplicates."""
    busy = {(s.card, s.start, s.name) for s in used}
    idle = {(s.card, s.start, s.name) for s in observed.existing} - busy
    by_card: tuple[dict[int, list[Place]], dict[int, list[Place]]] = ({}, {})
    for places, listed in zip((busy, idle), by_card, strict=True):
        for card, start, name in sorted(places):
            listed.setdefault(card, []).append((start, name))
    return by_card


def _card(
    gpu: Card, mode: str, table: GeometryTable | None, used: Iterable[Place], free: Iterable[Place]
) -> MigCard | MpsCard | str:
    if mode == MPS:
        return mps_card(gpu, used, free)
    return "cannot be partitioned" if table is None else mig_card(table, used, free)


def _state_reason(gpu: Card, observed: NodeSlices) -> str | None:
    """Return why the card cannot be partitioned in its present state, or None if its state does not prevent it."""
    if not gpu.healthy:
        return "unhealthy"
    if observed.mode == MIG and not observed.has_positions:
        return "the places of its instances are not known"
    return "not in MIG mode" if observed.mode == MIG and gpu.index not in observed.cards else None


def can_offer(node: PartitionableCards, request: Mapping[str, int], budget: Budget | None = None) -> bool:
    """Return whether the node has, or can be partitioned to have, free slices for this whole request.

    Raises Exhausted if the budget ends before the answer is known. A request for a single kind of slice needs no
    budget.

    Args:
        request: The number of slices by name.
    """
    need = counts_of(request.items())
    if any(mode_of(name) != node.mode for name, _ in need):
        return False
    if len(need) == 1:
        [(name, missing)] = need
        for _, card in node.cards:
            missing -= card.max_free(name)
            if missing <= 0:
                return True
        return False
    return find_allocation(tuple(card for _, card in node.cards), need, budget) is not None


def plan_cards(
    node: PartitionableCards, requests: Sequence[Mapping[str, int]], budget: Budget | None = None
) -> tuple[Slice, ...] | Rejection:
    """Return all slices that the node should have, in ascending order. Slices in use stay at their places.

    The first pod gets all that it requests, or a Rejection is returned. Free slices that exist may be among them. The
    requests of the other pods are served as far as possible, card by card. The Rejection is unproven if the budget
    ended before it was known whether the first pod fits, or whether evictions would help.

    Args:
        requests: The number of slices by name that each pod requests, the most important pod first.
    """
    budget = full_budget() if budget is None else budget
    try:
        return _plan(node, requests, budget)
    except Exhausted:
        return Rejection(RejectionKind.NOT_PROVEN, NOT_PROVEN, proven=False)


def _plan(
    node: PartitionableCards, requests: Sequence[Mapping[str, int]], budget: Budget
) -> tuple[Slice, ...] | Rejection:
    first, *others = requests or ({},)
    need = counts_of(first.items())
    cards = tuple(card for _, card in node.cards)
    shares = find_best_allocation(cards, need, budget) if can_offer(node, first, budget) else None
    if shares is None:
        return _rejection(node, need, budget)
    # The other pods may be of other namespaces. They have a budget of their own, which the first pod cannot use up.
    for_others = Budget(Effort(), SHORT.search)
    extra = add_counts(*(counts_of(request.items()) for request in others if _is_servable(node, request, for_others)))
    partitions = _serve_extra(node, shares, extra, budget.beyond())
    slices = [
        Slice(index, start, name)
        for (index, _), partition in zip(node.cards, partitions, strict=True)
        for start, name in partition.slices
    ]
    return tuple(sorted((*node.kept, *slices)))


def _is_servable(node: PartitionableCards, request: Mapping[str, int], budget: Budget) -> bool:
    """Return whether the node can serve this request. False may also mean that the search took too many steps."""
    part = budget.part(BRIEF.search)
    try:
        return can_offer(node, request, part)
    except Exhausted:
        return False
    finally:
        budget.give_back(part)


def _serve_extra(
    node: PartitionableCards, shares: Sequence[CardShare], extra: Counts, budget: Budget
) -> list[CardPartition]:
    """Return the partitions of the cards with as many extra slices as possible.

    Free slices on cards that the plan does not change are used first. Then come cards that the plan changes anyway, and
    then the other cards, whole ones last.
    """
    missing = dict(extra)
    requested = [share.requested for share in shares]
    partitions = [share.partition for share in shares]
    for i, (_, card) in enumerate(node.cards):
        if not partitions[i].touched:
            own = dict(requested[i])
            spare = counts_of((name, min(n, card.count_free(name) - own.get(name, 0))) for name, n in missing.items())
            requested[i] = add_counts(requested[i], spare)
            _subtract(missing, spare)
    for i in sorted(range(len(partitions)), key=lambda i: (not partitions[i].touched, node.cards[i][1].is_whole, i)):
        wanted = counts_of(missing.items())
        partition = node.cards[i][1].partition(requested[i], wanted, budget) if wanted else None
        if partition and partition.served:
            partitions[i] = partition
            _subtract(missing, partition.served)
    return partitions


def _subtract(missing: dict[str, int], served: Counts) -> None:
    for name, count in served:
        missing[name] -= count


def _rejection(node: PartitionableCards, need: Counts, budget: Budget) -> Rejection:
    if not node.mode:
        return Rejection(RejectionKind.SLICES, "the node's cards are not partitioned", hopeless=True)
    wrong = next((name for name, _ in need if mode_of(name) != node.mode), None)
    if wrong is not None:
        text = f"the node's cards are partitioned by {node.mode}, and {wrong} is not a slice of {node.mode}"
        return Rejection(RejectionKind.SLICES, text, hopeless=True)
    if not node.cards and not node.refusals:
        return Rejection(RejectionKind.NO_DEVICE, "the node has no cards", hopeless=True)
    refusals = [
        *node.refusals,
        *(CardRefusal(index, RejectionKind.SLICES, _card_reason(card, need)) for index, card in node.cards),
    ]
    emptied = tuple(card.emptied() for card in (*(card for _, card in node.cards), *node.blocked_by_pods))
    rejection = cards_rejection(sorted(refusals, key=lambda refusal: refusal.index))
    try:
        return replace(rejection, hopeless=find_allocation(emptied, need, budget) is None)
    except Exhausted:  # the pod does not fit, but it is not known whether evictions help
        return replace(rejection, proven=False)


def _card_reason(card: MigCard | MpsCard, need: Counts) -> str:
    """Return why this card without the others cannot give all of these slices."""
    for name, count in need:
        most = card.max_free(name)
        if most == 0:
            return card.no_room_reason(name)
        if most < count:
            return f"room for {most} of {count} {name}"
    return f"no combination found for {', '.join(f'{count} {name}' for name, count in need)}"
