"""The score of a node for a pod that asks for slices, from the configured weights. Pure.

Source: docs/design/slices.md, "Scheduling".
"""

from collections.abc import Iterable, Mapping
from math import prod

from mgpu.model.pods import Node, Pod
from mgpu.model.quantities import MAX, QuantityError, whole_number
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.partitioning.named_resources import asked_by
from scheduler.engine.partitioning.partitionable_node import Site, memory_of

HIGHEST = 10
OWN = ("cpu", "memory", "gpu")
"""The resources that every node has; others are those that settings name."""


def site_score(site: Site, wanted: Mapping[str, int], pod: Pod, settings: SlicesSettings) -> int:
    """0..10 with the pod on the node. wanted: its slices."""
    node, named = site.node, named_resources(settings)
    capacity = {
        **_capacity(node, named),
        "cpu": node.room.cpu,
        "memory": node.room.memory,
        "gpu": sum(card.memory for card in site.gpus),
    }
    taken = [
        site.named,
        {"cpu": node.room.cpu - site.room.cpu, "memory": node.room.memory - site.room.memory, "gpu": site.memory},
        asked_by(pod, named),
        {"cpu": pod.needs.cpu, "memory": pod.needs.memory, "gpu": memory_of(site, wanted)},
    ]
    full = {name: sum(part.get(name, 0) for part in taken) for name in capacity}
    return node_score(full, {name: of for name, of in capacity.items() if of != MAX}, settings)


def node_score(full: Mapping[str, int], capacity: Mapping[str, int], settings: SlicesSettings) -> int:
    """Σ s·w / Σ w × scheduleWeight over the resources of the node, at most 10, rounded down; exact, in integers.

    full: by resource, what is in use once the pod is there. capacity: of which; those without any do not count.
    """
    counted = [(weight, name) for name, weight in settings.weights.items() if capacity.get(name, 0) > 0]
    if not counted:
        return 0
    total, all_of = 0, prod(capacity[name] for _, name in counted)
    for weight, name in counted:
        of = capacity[name]
        part = min(full.get(name, 0), of)
        total += weight * (part if settings.schedule_policy == "binpack" else of - part) * (all_of // of)
    return min(HIGHEST, settings.schedule_weight * total // (sum(weight for weight, _ in counted) * all_of))


def _capacity(node: Node, names: Iterable[str]) -> dict[str, int]:
    found = {}
    for name in names:
        try:
            found[name] = whole_number(node.capacity.get(name, "0"))
        except QuantityError:
            continue  # the API server lets none through; it counts as none
    return found


def named_resources(settings: SlicesSettings) -> frozenset[str]:
    """Those that settings weigh beside cpu, memory and the cards' memory."""
    return frozenset(settings.weights).difference(OWN)
