"""The score of a node for a pod that asks for slices, from the configured weights.

Settings may weigh extended resources by name beside cpu, memory and the memory of the cards; what the pods of each node
ask for of those is followed here too. Source: docs/design/slices.md, "Scheduling".
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod

from mgpu.model.gpu_requests import Amount, peak
from mgpu.model.pods import Node, Pod
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, whole_number
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.node_fit import HIGHEST
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, memory_of


def requested_resources(pod: Pod, names: Collection[str]) -> dict[str, int]:
    """What a pod asks for of these resources at its busiest moment; {} of none. Extended resources are whole numbers;
    the API server lets nothing else through, and here it counts as nothing.
    """
    found = {}
    for name in names:
        try:
            amounts = [(c.stage, Amount(whole_number(at[0]))) for c in pod.containers if (at := c.requested(name))]
        except QuantityError:
            continue
        if amounts:
            found[name] = peak(amounts).core
    return found


class NamedResourceUsage:
    """Not thread-safe. Takes no room where `names` is empty. From the pods alone, in whatever order they come."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._of_pod: dict[str, tuple[str, Mapping[str, int]]] = {}
        self._on_node: dict[str, Counter[str]] = {}

    def follow(self, pod: Pod) -> None:
        if not self._names:
            return
        self.drop(pod.uid)
        asked = requested_resources(pod, self._names) if pod.node and not pod.ended else {}
        if any(asked.values()):
            self._of_pod[pod.uid] = (pod.node, asked)
            self._on_node.setdefault(pod.node, Counter()).update(asked)

    def drop(self, uid: str) -> None:
        node, asked = self._of_pod.pop(uid, ("", {}))
        if asked:
            self._on_node[node].subtract(asked)
            if not any(self._on_node[node].values()):
                del self._on_node[node]  # no node of this name may ever come again

    def on(self, node: str) -> Mapping[str, int]:
        """What the pods that are bound to a node ask for."""
        return self._on_node.get(node, {})


OWN = ("cpu", "memory", "gpu")
"""The resources that every node has; others are those that settings name."""


def score_for_slices(target: PartitionableNode, wanted: Mapping[str, int], pod: Pod, settings: SlicesSettings) -> int:
    """0..10 with the pod on the node. wanted: its slices."""
    node, named = target.node, named_resources(settings)
    capacity = {
        **_capacity(node, named),
        "cpu": node.allocatable.cpu,
        "memory": node.allocatable.memory,
        "gpu": sum(card.memory for card in target.gpus),
    }
    taken = [
        target.named,
        {
            "cpu": node.allocatable.cpu - target.room.cpu,
            "memory": node.allocatable.memory - target.room.memory,
            "gpu": target.memory,
        },
        requested_resources(pod, named),
        {"cpu": pod.cpu_memory.cpu, "memory": pod.cpu_memory.memory, "gpu": memory_of(target, wanted)},
    ]
    full = {name: sum(part.get(name, 0) for part in taken) for name in capacity}
    return node_score(full, {name: of for name, of in capacity.items() if of != MAX_QUANTITY}, settings)


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
