"""Scores a node for a pod, 0 to 10, as the extender protocol of kube-scheduler requires.

`node_score` scores one placement on one node, and `arrays.array_scores` scores many nodes at once. Both must give the
same scores. So `array_scores` calls `score_by_fullness` where the rounding of floats could matter. `node_assessment`
calls `node_score`.
"""

from collections.abc import Sequence

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement, peak
from scheduler.engine.policies import NODE_POLICIES


def node_score(
    request: GpuRequest, placement: Placement, cards: Sequence[CardState], node_policy: str, weight_of_core: int
) -> int:
    """Score a node by how full all its cards are with the pod on them, in core and memory.

    For a pod that requests no GPU, the devices of the requested types count. Raises KeyError for a policy that is not
    in NODE_POLICIES; the settings accept no such policy.

    Args:
        weight_of_core: The weight of core in percent. The rest is the weight of memory.
    """
    core_used = memory_used = core = memory = 0
    requests = request.containers or request.others
    types = {c.type for c in requests}
    for state in (s for s in cards if s.card.type in types):
        card = state.card
        requests_of_card = [
            c for c in requests if c.type == card.type and card.index in placement.cards(c.container, c.type)
        ]
        added = peak((c.stage, c.amount_on(card)) for c in requests_of_card)
        core_used += state.core_taken + added.core
        memory_used += state.memory_taken + added.memory
        core += card.core
        memory += card.memory
    if not memory:
        return score_by_fullness(core_used, 0, core, 1, node_policy, 100)
    return score_by_fullness(core_used, memory_used, core, memory, node_policy, weight_of_core)


def score_by_fullness(
    core_used: int, memory_used: int, core: int, memory: int, node_policy: str, weight_of_core: int
) -> int:
    """Score a node exactly, in integers, given the sums of what is used of its cards and the sums of their sizes."""
    used = weight_of_core * core_used * memory + (100 - weight_of_core) * memory_used * core
    capacity = 100 * core * memory
    return NODE_POLICIES[node_policy](min(used, capacity), capacity)
