"""Decides about one pod on one node: whether it fits and on which cards, the node's score, and the allocation record.

The filter, preemption, the binding admission and `mgpu simulate` must all call `assess`, so that they agree. A policy
that has learnt may change which cards a pod gets, but not whether the pod fits, unless a search reaches its limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu import dialects
from mgpu.model.cards import CardState, noun, states_of_type
from mgpu.model.compute_resources import CpuMemory
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import GroupCard
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Node, Pod
from mgpu.model.resource_claims import DRA
from mgpu.settings import Settings
from scheduler.engine import FULL, Effort, Limits, Policy, node_score, place, policy_named
from scheduler.engine.card_constraints import same_card_group_rejection, spread_group_score
from scheduler.engine.card_policy import CardScore, Scoring
from scheduler.engine.learning.node_board import Judge
from scheduler.engine.learning.shapes import NodeClass, class_of, free_milli, free_milli_of_card, node_rows


def foresight_scoring(judge: Judge, node: NodeClass, room: CpuMemory, needs: CpuMemory) -> Scoring:
    """Return the scoring of a policy that has learnt. It rates a card by the node as if only this card changed.

    Args:
        node: The class of the node.
        room: The CPU and memory of the node that are free without the pod.
        needs: The CPU and memory that the pod requests.
    """
    after = room.minus(needs)

    def scoring(cards: Sequence[CardState], _weight_of_core: int) -> CardScore:
        cached: dict[tuple[int, int], list[int]] = {}
        now = free_milli(cards)
        # Sorted, so that equal cards get exactly equal values.
        before = node_rows(node, room, [sorted(now)])

        def score(position: int, core: int, memory: int) -> int:
            values = cached.get((core, memory))
            if values is None:  # all cards are rated at once, because the caller asks for the other cards next
                left = [free_milli_of_card(state, core, memory) for state in cards]
                states = [sorted((*now[:i], milli, *now[i + 1 :])) for i, milli in enumerate(left)]
                values = cached[core, memory] = judge.rate_changes(before, node_rows(node, after, states)).tolist()
            return values[position]

        return score

    return scoring


_CAPPED_STEPS = 10_000
"""The steps of the exact search for a pod with more containers than `MGPUMaxContainersNumPolicyValid`."""
_FORESIGHT_STEPS = 400
"""The steps that a judge takes to rate all cards for one pair of core and memory (`Policy.steps`)."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """What policies that have learnt need to know besides the cards.

    Attributes:
        judges: The judges by the name of their policy (`scheduler.cluster.forecast`).
        room: The CPU and memory of the node that are free without the pod.
        needs: The CPU and memory that the pod requests.
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
    group_cards: Sequence[GroupCard] = (),
    limits: Limits = FULL,
    effort: Effort | None = None,
) -> Placement | Rejection:
    """Return the cards that the node gives to a pod with this request, or why the pod does not fit.

    A Rejection is hopeless if no eviction on the node can help, for example because the node has no cards or does not
    meet a requirement of the dialect (docs/design/mgpu.md, "Filter").

    Args:
        cards: The cards of the node without what the pod itself holds, and its other devices if the pod requests some.
        foresight: What policies that have learnt need to know; None if no policy has learnt.
        group_cards: The cards of the other pods of the request's same-card group, on any node.
        effort: Counts the steps, and may end the search by an exception (`scheduler.decisions.effort_budgets`).
    """
    unmet = request.unmet_requirement(node)
    if unmet is not None:
        return Rejection(RejectionKind.NODE_LABEL, unmet, hopeless=True)
    limits = _capped(limits, request, settings)
    placement: Placement | Rejection = Placement(())
    if request.containers:
        gpus = states_of_type(cards)
        if not gpus:
            return Rejection(RejectionKind.NO_DEVICE, _no_cards(node), hopeless=True)
        policy = choose_policy(request, node, gpus, settings, foresight)
        placement = same_card_group_rejection(request, gpus, group_cards) or place(
            request, gpus, policy, limits=limits, effort=effort
        )
    if isinstance(placement, Rejection) or not request.others:
        return placement
    return _with_other_devices(placement, request, node, cards, limits, effort)


def _no_cards(node: Node) -> str:
    mode = node.labels.get(LABEL)
    if mode:
        return f"node {node.name} has no whole GPU cards: its cards are partitioned into slices ({LABEL}={mode})"
    return f"node {node.name} has no GPU cards (no Device)"


def _with_other_devices(
    placement: Placement,
    request: GpuRequest,
    node: Node,
    cards: Sequence[CardState],
    limits: Limits,
    effort: Effort | None,
) -> Placement | Rejection:
    """Add the devices of other types that the pod requests: of each type, those with the lowest minors that fit."""
    for type in dict.fromkeys(c.type for c in request.others):
        devices = states_of_type(cards, type)
        if not devices:
            text = f"node {node.name} has no {noun(type)}"
            return Rejection(RejectionKind.NO_DEVICE, text, hopeless=True)
        part = GpuRequest(request.dialect, tuple(c for c in request.others if c.type == type))
        placed = place(part, devices, policy_named("minor", 0), limits=limits, effort=effort)
        if isinstance(placed, Rejection):
            return placed
        chosen = tuple((type, container, indexes) for container, indexes in placed.containers)
        placement = replace(placement, others=(*placement.others, *chosen), proven=placement.proven and placed.proven)
    return placement


def choose_policy(
    request: GpuRequest, node: Node, cards: Sequence[CardState], settings: Settings, foresight: Foresight | None
) -> Policy:
    """Return the card policy for a request on this node, with what it has learnt.

    Args:
        cards: The GPUs of the node.
    """
    name = dialects.card_policy(request, settings)
    judge = foresight.judges.get(name) if foresight else None
    if judge is not None and foresight is not None:
        scoring = foresight_scoring(judge, class_of(node, cards), foresight.room, foresight.needs)
        return Policy(scoring, _weight_of_core(settings), _FORESIGHT_STEPS)
    return policy_named(name, _weight_of_core(settings))


def score(request: GpuRequest, placement: Placement, cards: Sequence[CardState], settings: Settings) -> int:
    """Return the node's score for this placement under `nodePolicy`, 0 to 10."""
    by_policy = node_score(request, placement, cards, settings.node_policy, _weight_of_core(settings))
    return spread_group_score(by_policy, request, placement, states_of_type(cards))


def record(
    pod: Pod, request: GpuRequest, placement: Placement, cards: Sequence[CardState], settings: Settings, now_ns: int
) -> dict[str, str]:
    """Return the annotations that store the placement (the allocation record, without its seal).

    The cards of claims are stored in the claims, so the result is empty for a request of claims.

    Args:
        cards: The devices of the node, of all types.
        now_ns: The time of the decision, in nanoseconds since 1970.
    """
    if request.dialect == DRA:
        return {}
    known = [state.card for state in cards]
    return dialects.by_name(request.dialect).write_placement(pod, request, placement, known, settings, now_ns)


def _weight_of_core(settings: Settings) -> int:
    return settings.dialects.mgpu.weight_of_core


def _capped(limits: Limits, request: GpuRequest, settings: Settings) -> Limits:
    """Return lower limits for a pod with more containers than `MGPUMaxContainersNumPolicyValid`.

    Source: docs/design/mgpu.md, "Allocate".
    """
    most = settings.dialects.mgpu.max_containers_exact
    if most is None or len(request.containers) <= most:
        return limits
    return Limits(min(limits.search, _CAPPED_STEPS), limits.fallback)
