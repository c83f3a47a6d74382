"""Which node is best for a pod: a score per node, as kube-scheduler's extender wants it."""

from collections.abc import Sequence

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement, peak
from scheduler.engine.policies import NODE_POLICIES


def node_score(
    request: GpuRequest, placement: Placement, cards: Sequence[CardState], node_policy: str, weight_of_core: int
) -> int:
    """0..10 by how full all the node's cards are with the pod on them: core and memory, by weight of core in percent.

    A pod that asks for no GPU: by how full the devices are of the types that it asks for.
    Raises KeyError for a policy that is not in NODE_POLICIES; settings are checked before.
    """
    core_used = memory_used = core = memory = 0
    requests = request.containers or request.others
    types = {c.type for c in requests}
    for state in (s for s in cards if s.card.type in types):
        card = state.card
        on_it = [c for c in requests if c.type == card.type and card.index in placement.cards(c.container, c.type)]
        added = peak((c.stage, c.amount_on(card)) for c in on_it)
        core_used += state.core_taken + added.core
        memory_used += state.memory_taken + added.memory
        core += card.core
        memory += card.memory
    if not memory:
        return by_fullness(core_used, 0, core, 1, node_policy, 100)
    return by_fullness(core_used, memory_used, core, memory, node_policy, weight_of_core)


def by_fullness(core_used: int, memory_used: int, core: int, memory: int, node_policy: str, weight_of_core: int) -> int:
    """0..10 from what of a node's cards is used and what they are, added up."""
    used = weight_of_core * core_used * memory + (100 - weight_of_core) * memory_used * core
    of = 100 * core * memory
    return NODE_POLICIES[node_policy](min(used, of), of)
