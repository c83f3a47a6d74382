"""What is said of a pod on a node that can be cut, and which of several is cut for it: pure, for the scheduler and
`mgpu simulate` alike.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.pods import Pod
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.effort import Budget, Exhausted, full_budget
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.partitioning.partition_plan import NOT_PROVEN
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, can_be_partitioned_for, plan_node
from scheduler.engine.partitioning.slice_scores import score_for_slices

ANEW = "its cards are cut anew for it"


def _rejected(text: str, *, fits_repartitioned: bool = False) -> NodeFit:
    return NodeFit(Rejection(RejectionKind.SLICES, text), fits_repartitioned=fits_repartitioned)


def rejection_of_slices(target: PartitionableNode, wanted: Mapping[str, int], budget: Budget) -> NodeFit:
    """Say why no cut of the node's cards gives the pod its slices."""
    found = plan_node(target, [wanted], budget)
    if not isinstance(found, Rejection):
        return _rejected(ANEW, fits_repartitioned=True)
    text = found.reason if found.reason else f"insufficient slices ({found})"
    return NodeFit(replace(found, reason=text, cards=()))


def assess_slices(
    target: PartitionableNode,
    wanted: Mapping[str, int],
    budget: Budget,
    refusal: Callable[[PartitionableNode, Mapping[str, int], Budget], NodeFit] = rejection_of_slices,
) -> NodeFit:
    """Answer for a node that is what the pod requires, without points; not proven where the budget ends before that.

    refusal: the answer for a node that cannot be cut so.
    """
    if target.fits(wanted):
        return NodeFit()
    if target.problem:
        return _rejected(f"what the node says of its slices cannot be read: {target.problem}")
    if target.found.has_pending_plan:
        return _rejected(f"waits for plan {target.found.partitioning.plan} of its slices", fits_repartitioned=True)
    try:
        if not can_be_partitioned_for(target, wanted, budget):
            return refusal(target, wanted, budget)
    except Exhausted:
        return NodeFit(Rejection(RejectionKind.NOT_PROVEN, NOT_PROVEN, proven=False))
    if target.found.refused:
        plan, why = target.found.refused
        return _rejected(f"{ANEW}, but plan {plan} of its slices was refused: {why}", fits_repartitioned=True)
    return _rejected(ANEW, fits_repartitioned=True)


def rank_partitionable_nodes(
    targets: Iterable[PartitionableNode],
    wanted: Mapping[str, int],
    pod: Pod,
    settings: SlicesSettings,
    budget: Callable[[], Budget] = full_budget,
) -> Iterator[PartitionableNode]:
    """Yield those that can be cut for the pod: by score, then by how many free slices are destroyed, then by name.

    budget: gives the steps for the next node. Those for which they do not suffice are left out.
    """
    scored = [
        (-score_for_slices(target, wanted, pod, settings), target.node.name, target)
        for target in targets
        if _is_known_to_offer(target, wanted, budget())
    ]
    scored.sort(key=lambda row: row[:2])
    for _, alike in groupby(scored, key=lambda row: row[0]):
        destroying = []
        for _, name, target in alike:
            destroyed = _destroyed(target, wanted, budget())
            if not destroyed:
                yield target  # at once: none after it is better, and a thousand nodes may have the same score
            else:
                destroying.append((destroyed, name, target))
        yield from (target for *_, target in sorted(destroying, key=lambda row: row[:2]))


def _is_known_to_offer(target: PartitionableNode, wanted: Mapping[str, int], budget: Budget) -> bool:
    with suppress(Exhausted):
        return can_be_partitioned_for(target, wanted, budget)
    return False


def _destroyed(target: PartitionableNode, wanted: Mapping[str, int], budget: Budget) -> int:
    """Return how many free slices go when the node is cut for this pod alone; many, where the budget ends before."""
    found = plan_node(target, [wanted], budget)
    if isinstance(found, Rejection):
        return 0 if found.proven else sys.maxsize
    return len(target.made.difference(found, target.used))
