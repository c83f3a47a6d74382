"""Into what the cards of one node are cut, so that a pod finds its slices there. Pure.

Source: docs/design/slices.md, "Scheduling".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mgpu.model.cards import Card
from mgpu.model.gpu_requests import CardRefusal, Rejection, RejectionKind, cards_rejection
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice, mode_of
from scheduler.engine.effort import BRIEF, SHORT, Budget, Effort, Exhausted, full_budget
from scheduler.engine.partitioning.geometry import (
    Counts,
    Cut,
    Geometries,
    GeometryTable,
    MigCard,
    Place,
    added,
    counts_of,
    mig_card,
    table_of,
)
from scheduler.engine.partitioning.mps_shares import MpsCard, mps_card
from scheduler.engine.partitioning.slice_allocation import Share, find_allocation, find_best_allocation

NOT_PROVEN = (
    "slices: the search was ended, whether they fit is not proven, and it is tried again; fewer different sizes are "
    "found faster"
)
_NOBODY: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PartitionableCards:
    """What of a node can be cut: a value to keep until the node changes, or what is held there.

    cards: by index, ascending. refusals: why others cannot be cut. barred: those of the others that could be, were it
    not for the pods that hold them. kept: the slices that lie on the others.
    """

    mode: str
    cards: tuple[tuple[int, MigCard | MpsCard], ...] = ()
    refusals: tuple[CardRefusal, ...] = ()
    barred: tuple[MigCard | MpsCard, ...] = ()
    kept: tuple[Slice, ...] = ()


def partitionable_cards(
    gpus: Iterable[Card],
    found: NodeSlices,
    used: Iterable[Slice],
    geometries: Geometries,
    *,
    barred: Mapping[int, str] = _NOBODY,
) -> PartitionableCards:
    """gpus: all of the node's. used: the slices in use, by the ledger or by the node's status.

    barred: card → why the caller does not let it be cut, such as that pods of other vocabularies hold shares of it.
    Cards that are not well, or not in MIG mode, need not stand there.
    """
    in_use, free = _by_card(used, found)
    table: GeometryTable | None = None
    cards, refusals, closed, kept = [], [], [], []
    model: tuple[str, int] | None = None
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        if model != (gpu.model, gpu.memory) and found.mode == MIG:
            model, table = (gpu.model, gpu.memory), table_of(gpu, geometries)
        there = in_use.pop(gpu.index, ()), free.pop(gpu.index, ())
        card = _card(gpu, found.mode, table, *there)
        why = _closed(gpu, found) or barred.get(gpu.index, "") or (card if isinstance(card, str) else "")
        if not why and not isinstance(card, str):
            cards.append((gpu.index, card))
            continue
        refusals.append(CardRefusal(gpu.index, RejectionKind.SLICES, why))
        kept += [Slice(gpu.index, *place) for places in there for place in places]
        if why == barred.get(gpu.index) and not isinstance(card, str):
            closed.append(card)
    kept += [Slice(i, *place) for places in (in_use, free) for i, rows in places.items() for place in rows]
    return PartitionableCards(found.mode, tuple(cards), tuple(refusals), tuple(closed), tuple(sorted(kept)))


def _by_card(used: Iterable[Slice], found: NodeSlices) -> tuple[dict[int, list[Place]], dict[int, list[Place]]]:
    """The places in use, and the others that are made, each once and in ascending order."""
    busy = {(s.card, s.start, s.name) for s in used}
    idle = {(s.card, s.start, s.name) for s in found.existing} - busy
    return _listed(busy), _listed(idle)


def _listed(places: Iterable[tuple[int, int, str]]) -> dict[int, list[Place]]:
    found: dict[int, list[Place]] = {}
    for card, start, name in sorted(places):
        found.setdefault(card, []).append((start, name))
    return found


def _card(
    gpu: Card, mode: str, table: GeometryTable | None, used: Iterable[Place], free: Iterable[Place]
) -> MigCard | MpsCard | str:
    if mode == MPS:
        return mps_card(gpu, used, free)
    return "cannot be cut" if table is None else mig_card(table, used, free)


def _closed(gpu: Card, found: NodeSlices) -> str:
    """Why nobody may cut this card."""
    if not gpu.healthy:
        return "unhealthy"
    if found.mode == MIG and not found.has_positions:
        return "where its instances lie is not known"
    return "not in MIG mode" if found.mode == MIG and gpu.index not in found.cards else ""


def can_offer(node: PartitionableCards, request: Mapping[str, int], budget: Budget | None = None) -> bool:
    """Whether the node has, or can be cut to have, free slices for all of this ask: slice → how many.

    For a filter over thousands of nodes. It is True exactly where `plan` is no Rejection. Raises Exhausted where the
    budget ends before that is known; an ask for one kind of slices takes none of it.
    """
    need = counts_of(request.items())
    if any(mode_of(name) != node.mode for name, _ in need):
        return False
    if len(need) == 1:
        [(name, left)] = need
        for _, card in node.cards:
            left -= card.most(name)
            if left <= 0:
                return True
        return False
    return find_allocation(tuple(card for _, card in node.cards), need, budget) is not None


def plan(
    gpus: Iterable[Card],
    found: NodeSlices,
    used: Iterable[Slice],
    wanted: Sequence[Mapping[str, int]],
    geometries: Geometries,
    *,
    barred: Mapping[int, str] = _NOBODY,
) -> tuple[Slice, ...] | Rejection:
    """All slices of the node as they shall be, ascending: those in use where they lie, and for the first pod its own.

    wanted: of pods in their order, slice → how many. What is free already counts. Of the pods after the first as many
    requests are served as can be beside the first one's, card by card.
    The other arguments are those of `partitionable_cards`.
    """
    return plan_cards(partitionable_cards(gpus, found, used, geometries, barred=barred), wanted)


def plan_cards(
    node: PartitionableCards, wanted: Sequence[Mapping[str, int]], budget: Budget | None = None
) -> tuple[Slice, ...] | Rejection:
    """Plan the cards that `partitionable_cards` returned. A Rejection is unproven if the budget ended first."""
    budget = full_budget() if budget is None else budget
    try:
        return _plan(node, wanted, budget)
    except Exhausted:
        return Rejection(RejectionKind.NOT_PROVEN, NOT_PROVEN, proven=False)


def _plan(
    node: PartitionableCards, wanted: Sequence[Mapping[str, int]], budget: Budget
) -> tuple[Slice, ...] | Rejection:
    first, *others = wanted or ({},)
    need = counts_of(first.items())
    shares = (
        find_best_allocation(tuple(card for _, card in node.cards), need, budget)
        if can_offer(node, first, budget)
        else None
    )
    if shares is None:
        return _rejection(node, need, budget)
    for_others = Budget(Effort(), SHORT.search)
    constraints = added(*(counts_of(request.items()) for request in others if _can_wish(node, request, for_others)))
    slices = [
        Slice(index, start, name)
        for (index, _), cut in zip(node.cards, _with_wishes(node, shares, constraints, budget.beyond()), strict=True)
        for start, name in cut.slices
    ]
    return tuple(sorted((*node.kept, *slices)))


def _can_wish(node: PartitionableCards, request: Mapping[str, int], budget: Budget) -> bool:
    """Return whether a pod beside the first one is known to find its slices.

    budget: of all pods beside the first one, and none of that one's: it may be of another namespace than a pod that is
    hard to serve.
    """
    part = budget.part(BRIEF.search)
    try:
        return can_offer(node, request, part)
    except Exhausted:
        return False
    finally:
        budget.give_back(part)


def _with_wishes(node: PartitionableCards, shares: Sequence[Share], constraints: Counts, budget: Budget) -> list[Cut]:
    """The cards with as much of the wishes as they can have: first what is free, then cards that change anyway."""
    left = dict(constraints)
    asked = [share.asked for share in shares]
    cuts = [share.cut for share in shares]
    for i, (_, card) in enumerate(node.cards):
        if not cuts[i].touched:
            given = dict(asked[i])
            spare = counts_of((name, min(n, card.has(name) - given.get(name, 0))) for name, n in left.items())
            asked[i] = added(asked[i], spare)
            _subtract(left, spare)
    for i in sorted(range(len(cuts)), key=lambda i: (not cuts[i].touched, node.cards[i][1].whole, i)):
        lacking = counts_of(left.items())
        cut = node.cards[i][1].cut(asked[i], lacking, budget) if lacking else None
        if cut and cut.served:
            cuts[i] = cut
            _subtract(left, cut.served)
    return cuts


def _subtract(left: dict[str, int], given: Counts) -> None:
    for name, count in given:
        left[name] -= count


def _rejection(node: PartitionableCards, need: Counts, budget: Budget) -> Rejection:
    if not node.mode:
        return Rejection(RejectionKind.SLICES, "the node's cards are not cut", hopeless=True)
    wrong = next((name for name, _ in need if mode_of(name) != node.mode), None)
    if wrong is not None:
        text = f"the node's cards are cut by {node.mode}, not into {wrong}"
        return Rejection(RejectionKind.SLICES, text, hopeless=True)
    if not node.cards and not node.refusals:
        return Rejection(RejectionKind.NO_DEVICE, "the node has no cards", hopeless=True)
    refusals = [
        *node.refusals,
        *(CardRefusal(index, RejectionKind.SLICES, _why(card, need)) for index, card in node.cards),
    ]
    cards = tuple(card.emptied() for card in (*(card for _, card in node.cards), *node.barred))
    rejection = cards_rejection(sorted(refusals, key=lambda refusal: refusal.index))
    try:
        return replace(rejection, hopeless=find_allocation(cards, need, budget) is None)
    except Exhausted:  # it does not fit, but whether evictions help is not known
        return replace(rejection, proven=False)


def _why(card: MigCard | MpsCard, need: Counts) -> str:
    for name, count in need:
        most = card.most(name)
        if most == 0:
            return card.why(name)
        if most < count:
            return f"room for {most} of {count} {name}"
    return f"no way found for {', '.join(f'{count} {name}' for name, count in need)}"
