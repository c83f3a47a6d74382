"""Decides whether a pod finds its slices on a partitionable node, and ranks the nodes that can be partitioned for it.

The filter, preemption and `mgpu simulate` call `assess_slices`. The partition controller and `mgpu simulate` call
`rank_partitionable_nodes`, and the partition controller then calls `plan_node_for_gang`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.pods import Pod
from mgpu.model.slice_names import Slice
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.effort import Budget, Exhausted, full_budget
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.partitioning.partition_plan import NOT_PROVEN
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, can_be_partitioned_for, plan_node
from scheduler.engine.partitioning.slice_scores import score_for_slices

_REPARTITIONED = "the node's cards are to be repartitioned for the pod"


def _rejected(text: str, *, fits_repartitioned: bool = False) -> NodeFit:
    return NodeFit(Rejection(RejectionKind.SLICES, text), fits_repartitioned=fits_repartitioned)


def rejection_of_slices(target: PartitionableNode, request: Mapping[str, int], budget: Budget) -> NodeFit:
    """Return why the node's cards cannot be partitioned for the pod.

    If a plan is found after all, the answer says that the pod fits once the cards are partitioned again.
    """
    planned = plan_node(target, [request], budget)
    if not isinstance(planned, Rejection):
        return _rejected(_REPARTITIONED, fits_repartitioned=True)
    text = planned.reason if planned.reason else f"insufficient slices ({planned})"
    return NodeFit(replace(planned, reason=text, cards=()))


def assess_slices(
    target: PartitionableNode,
    request: Mapping[str, int],
    budget: Budget,
    reject: Callable[[PartitionableNode, Mapping[str, int], Budget], NodeFit] = rejection_of_slices,
) -> NodeFit:
    """Return whether the pod fits on a node that meets the pod's other requirements. The answer has no score.

    The answer is unproven if the budget ends before it is known whether the pod fits.

    Args:
        request: The number of slices by name.
        reject: The function that returns the answer for a node that cannot be partitioned for the pod.
    """
    if target.fits(request):
        return NodeFit()
    if target.problem:
        return _rejected(f"the node's report of its slices cannot be read: {target.problem}")
    if target.observed.has_pending_plan:
        plan = target.observed.partitioning.plan
        return _rejected(f"the node waits for partition plan {plan}", fits_repartitioned=True)
    try:
        if not can_be_partitioned_for(target, request, budget):
            return reject(target, request, budget)
    except Exhausted:
        return NodeFit(Rejection(RejectionKind.NOT_PROVEN, NOT_PROVEN, proven=False))
    if target.observed.refused:
        plan, reason = target.observed.refused
        text = f"{_REPARTITIONED}, but partition plan {plan} was refused: {reason}"
        return _rejected(text, fits_repartitioned=True)
    return _rejected(_REPARTITIONED, fits_repartitioned=True)


def rank_partitionable_nodes(
    targets: Iterable[PartitionableNode],
    request: Mapping[str, int],
    pod: Pod,
    settings: SlicesSettings,
    next_budget: Callable[[], Budget] = full_budget,
) -> Iterator[PartitionableNode]:
    """Yield the nodes that can be partitioned for the pod, the best first.

    The best node has the highest score, then the fewest slices that its plan would destroy, then the first name.

    Args:
        request: The number of slices by name.
        next_budget: The function that returns the budget for the next search. Each node needs one or two. A node is
            left out if its first budget does not suffice.
    """
    scored = [
        (-score_for_slices(target, request, pod, settings), target.node.name, target)
        for target in targets
        if _is_known_to_offer(target, request, next_budget())
    ]
    scored.sort(key=lambda row: row[:2])
    for _, equal in groupby(scored, key=lambda row: row[0]):
        destroying = []
        for _, name, target in equal:
            destroyed = _count_destroyed(target, request, next_budget())
            if not destroyed:
                # Yielded at once, because no later node is better and a thousand nodes may have the same score.
                yield target
            else:
                destroying.append((destroyed, name, target))
        yield from (target for *_, target in sorted(destroying, key=lambda row: row[:2]))


def plan_node_for_gang(
    target: PartitionableNode,
    requests: Sequence[Mapping[str, int]],
    members: int,
    next_budget: Callable[[], Budget] = full_budget,
) -> tuple[Slice, ...] | Rejection:
    """Return all slices that the node should have, or why the first pod cannot be served.

    If the node can have the slices of all members, it gets them. Otherwise no slices are planned for other pods, since
    these slices could take the room of members.

    Args:
        requests: The number of slices by name that each pod requests, the most important pod first.
        members: How many of the pods, from the first on, are in one gang. Without a gang it is 0 or 1.
        next_budget: The function that returns the budget for the next search, of at most two.
    """
    if members > 1:
        together = sum(map(Counter, requests[:members]), Counter[str]())
        planned = plan_node(target, [together, *requests[members:]], next_budget())
        if not isinstance(planned, Rejection):
            return planned
        requests = requests[:members]
    return plan_node(target, requests, next_budget())


def _is_known_to_offer(target: PartitionableNode, request: Mapping[str, int], budget: Budget) -> bool:
    with suppress(Exhausted):
        return can_be_partitioned_for(target, request, budget)
    return False


def _count_destroyed(target: PartitionableNode, request: Mapping[str, int], budget: Budget) -> int:
    """Return how many free slices a plan for this pod alone destroys; `sys.maxsize` if the budget ends first."""
    planned = plan_node(target, [request], budget)
    if isinstance(planned, Rejection):
        return 0 if planned.proven else sys.maxsize
    return len(target.existing.difference(planned, target.used))
