"""What the scheduler decides about one pod and one node: pure, for the scheduler process and `mgpu simulate` alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu import dialects
from mgpu.model.cards import CardState, noun, states_of_type
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import GroupCard
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Node, Pod
from mgpu.model.slice_names import is_slice
from mgpu.settings import Settings
from scheduler.engine import FULL, Effort, Limits, Policy, node_score, place, policy_named
from scheduler.engine.card_constraints import same_card_group_rejection, spread_group_score
from scheduler.engine.card_policy import CardScore, Scoring
from scheduler.engine.learning.node_board import Judge
from scheduler.engine.learning.shapes import NodeClass, class_of, free_milli, free_milli_of_card, node_rows


def foresight_scoring(judge: Judge, node: NodeClass, room: CpuMemory, needs: CpuMemory) -> Scoring:
    """The worth of the node with only this card changed: exact for pods on one card.

    room: what the node has free of cpu and memory without the pod, which needs `needs` of it.
    """
    after = room.minus(needs)

    def scoring(cards: Sequence[CardState], _weight_of_core: int) -> CardScore:
        known: dict[tuple[int, int], list[int]] = {}
        now = free_milli(cards)
        # Sorted, so that equal cards are of equal worth to the last bit.
        before = node_rows(node, room, [sorted(now)])

        def score(position: int, core: int, memory: int) -> int:
            worths = known.get((core, memory))
            if worths is None:  # of all cards at once: the other ones are asked about next
                left = [free_milli_of_card(state, core, memory) for state in cards]
                ways = [sorted((*now[:i], milli, *now[i + 1 :])) for i, milli in enumerate(left)]
                worths = known[core, memory] = judge.rate_changes(before, node_rows(node, after, ways)).tolist()
            return worths[position]

        return score

    return scoring


_CAPPED = 10_000
_FORESIGHT = 400
"""Steps of the engine's effort for what a judge says of all cards under one more amount."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """What policies that have learnt look at beside the cards. judges: by policy (scheduler/cluster/forecast.py).

    room: what the node has free of cpu and memory without the pod, which needs `needs` of it.
    """

    judges: Mapping[str, Judge]
    room: CpuMemory
    needs: CpuMemory


def assess(
    request: GpuRequest,
    node: Node,
    cards: Sequence[CardState],
    settings: Settings,
    foresight: Foresight | None = None,
    *,
    seats: Sequence[GroupCard] = (),
    limits: Limits = FULL,
    effort: Effort | None = None,
) -> Placement | Rejection:
    """The cards that `node` gives to a pod with this ask, or why it has none.

    cards: the node's, without what the pod itself holds there, and its devices of other types if the pod asks for some.
    A Rejection is hopeless where no eviction on the node can help: it has no cards, or it is not what the dialect
    requires (docs/design/mgpu.md, "Filter").
    foresight: makes a difference to which cards, never to whether there are any.
    seats: where the pods of the ask's same-card group are, on whatever node, without the pod itself.
    limits: of the search on this node. effort: counts its steps, and may end it
    (`scheduler/decisions/effort_budgets.py`).
    """
    unmet = request.unmet_requirement(node)
    if unmet is not None:
        return Rejection(RejectionKind.NODE_LABEL, unmet, hopeless=True)
    limits = _capped(limits, request, settings)
    found: Placement | Rejection = Placement(())
    if request.containers:
        gpus = states_of_type(cards)
        if not gpus:
            return Rejection(RejectionKind.NO_DEVICE, _no_cards(node), hopeless=True)
        found = same_card_group_rejection(request, gpus, seats) or place(
            request, gpus, _card_policy(request, node, gpus, settings, foresight), limits=limits, effort=effort
        )
    return (
        found
        if isinstance(found, Rejection) or not request.others
        else _with_others(found, request, node, cards, limits, effort)
    )


def _no_cards(node: Node) -> str:
    mode = node.labels.get(LABEL)
    if mode:
        return f"node {node.name} has no whole GPU cards: its cards are cut into slices ({LABEL}={mode})"
    return f"node {node.name} has no GPU cards (no Device)"


def _with_others(
    found: Placement, request: GpuRequest, node: Node, cards: Sequence[CardState], limits: Limits, effort: Effort | None
) -> Placement | Rejection:
    """The same with devices of the other types that the pod asks for, each type by itself, in minor order."""
    for type in dict.fromkeys(c.type for c in request.others):
        devices = states_of_type(cards, type)
        if not devices:
            made = f"no {noun(type)} is made on node {node.name}"
            text = made if is_slice(type) else f"node {node.name} has no {noun(type)}"
            return Rejection(RejectionKind.NO_DEVICE, text, hopeless=True)
        part = GpuRequest(request.dialect, tuple(c for c in request.others if c.type == type))
        placed = place(part, devices, policy_named("minor", 0), limits=limits, effort=effort)
        if isinstance(placed, Rejection):
            return placed
        chosen = tuple((type, container, indexes) for container, indexes in placed.containers)
        found = replace(found, others=(*found.others, *chosen), proven=found.proven and placed.proven)
    return found


def _card_policy(
    request: GpuRequest, node: Node, cards: Sequence[CardState], settings: Settings, foresight: Foresight | None
) -> Policy:
    name = dialects.card_policy(request, settings)
    judge = foresight.judges.get(name) if foresight else None
    if judge is not None and foresight is not None:
        scoring = foresight_scoring(judge, class_of(node, cards), foresight.room, foresight.needs)
        return Policy(scoring, _weight_of_core(settings), _FORESIGHT)
    return policy_named(name, _weight_of_core(settings))


def score(request: GpuRequest, placement: Placement, cards: Sequence[CardState], settings: Settings) -> int:
    """How good a node is for the pod under `nodePolicy`, 0..10; cards: as for `assess`."""
    by_policy = node_score(request, placement, cards, settings.node_policy, _weight_of_core(settings))
    return spread_group_score(by_policy, request, placement, states_of_type(cards))


def record(
    pod: Pod, request: GpuRequest, placement: Placement, cards: Sequence[CardState], settings: Settings, now_ns: int
) -> dict[str, str]:
    """The annotations that make `placement` known; they travel in the Binding. cards: the node's, of all types."""
    known = [state.card for state in cards]
    return dialects.by_name(request.dialect).write_placement(pod, request, placement, known, settings, now_ns)


def _weight_of_core(settings: Settings) -> int:
    return settings.dialects.mgpu.weight_of_core


def _capped(limits: Limits, request: GpuRequest, settings: Settings) -> Limits:
    """`MGPUMaxContainersNumPolicyValid`: less effort for more containers (docs/design/mgpu.md, "Allocate")."""
    most = settings.dialects.mgpu.max_containers_exact
    if most is None or len(request.containers) <= most:
        return limits
    return Limits(min(limits.search, _CAPPED), limits.fallback)
