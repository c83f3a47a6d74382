"""Scores a node for a pod that requests slices, with the weights of the settings.

Besides CPU, memory and the memory of the cards, the settings can give weights to extended resources by name.
`NamedResourceUsage` tracks what the pods of each node request of these resources. Scores are computed exactly, in
integers. docs/design/slices.md, "Scheduling", describes the formula. Mainly the filter and `slice_choice` call
`score_for_slices`, and `scheduler.cluster.partitionable_nodes` has a `NamedResourceUsage`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod

from mgpu.model.gpu_requests import Amount, peak
from mgpu.model.pods import Node, Pod
from mgpu.model.quantities import MAX_QUANTITY, QuantityError, whole_number
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.node_fit import HIGHEST
from scheduler.engine.partitioning.partitionable_node import PartitionableNode, memory_of_slices


def requested_resources(pod: Pod, names: Collection[str]) -> dict[str, int]:
    """Return, by name, the most that a pod uses of these extended resources at the same time.

    The API server admits only whole numbers. A resource with any other amount is left out.
    """
    requested = {}
    for name in names:
        try:
            amounts = [
                (c.stage, Amount(whole_number(quantity[0]))) for c in pod.containers if (quantity := c.requested(name))
            ]
        except QuantityError:
            continue
        if amounts:
            requested[name] = peak(amounts).core
    return requested


class NamedResourceUsage:
    """The sums that the pods of each node request of the named resources. Not thread-safe.

    The sums must not depend on the order in which the pods are reported. Nothing is stored if no resource is named.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._of_pod: dict[str, tuple[str, Mapping[str, int]]] = {}
        self._on_node: dict[str, Counter[str]] = {}

    def follow(self, pod: Pod) -> None:
        """Add or update a pod. Only pods that are bound and have not ended count."""
        if not self._names:
            return
        self.drop(pod.uid)
        requested = requested_resources(pod, self._names) if pod.node and not pod.ended else {}
        if any(requested.values()):
            self._of_pod[pod.uid] = (pod.node, requested)
            self._on_node.setdefault(pod.node, Counter()).update(requested)

    def drop(self, uid: str) -> None:
        node, requested = self._of_pod.pop(uid, ("", {}))
        if requested:
            self._on_node[node].subtract(requested)
            if not any(self._on_node[node].values()):
                del self._on_node[node]  # the node may have been deleted

    def on(self, node: str) -> Mapping[str, int]:
        """Return, by resource, the sum that the pods on a node request."""
        return self._on_node.get(node, {})


_BUILT_IN = ("cpu", "memory", "gpu")
"""The names in the weights of the settings that are not extended resources."""


def named_resources(settings: SlicesSettings) -> frozenset[str]:
    """Return the extended resources to which the settings give a weight."""
    return frozenset(settings.weights).difference(_BUILT_IN)


def score_for_slices(target: PartitionableNode, request: Mapping[str, int], pod: Pod, settings: SlicesSettings) -> int:
    """Return the score, 0 to 10, that the node has once the pod has the requested slices there.

    `MAX_QUANTITY` stands for an amount that the node does not report. Such a resource does not count.
    """
    node, names = target.node, named_resources(settings)
    capacity = {
        **_extended_capacity(node, names),
        "cpu": node.allocatable.cpu,
        "memory": node.allocatable.memory,
        "gpu": sum(card.memory for card in target.gpus),
    }
    used = [
        target.named_resources,
        {
            "cpu": node.allocatable.cpu - target.free_resources.cpu,
            "memory": node.allocatable.memory - target.free_resources.memory,
            "gpu": target.memory_used,
        },
        requested_resources(pod, names),
        {"cpu": pod.cpu_memory.cpu, "memory": pod.cpu_memory.memory, "gpu": memory_of_slices(target, request)},
    ]
    total = {name: sum(part.get(name, 0) for part in used) for name in capacity}
    return weighted_score(
        total, {name: amount for name, amount in capacity.items() if amount != MAX_QUANTITY}, settings
    )


def weighted_score(used: Mapping[str, int], capacity: Mapping[str, int], settings: SlicesSettings) -> int:
    """Return `scheduleWeight` × Σ w·s / Σ w over the resources of the node, rounded down, at most 10.

    w is the weight of a resource. s is the fraction of the resource that is in use under `binpack`, and the fraction
    that is free under `spread`.

    Args:
        used: By resource, what is in use once the pod is on the node.
        capacity: By resource, what the node has. A resource without capacity does not count.
    """
    weights = [(weight, name) for name, weight in settings.weights.items() if capacity.get(name, 0) > 0]
    if not weights:
        return 0
    total, product = 0, prod(capacity[name] for _, name in weights)  # the common denominator of the fractions
    for weight, name in weights:
        in_use = min(used.get(name, 0), capacity[name])
        part = in_use if settings.schedule_policy == "binpack" else capacity[name] - in_use
        total += weight * part * (product // capacity[name])
    return min(HIGHEST, settings.schedule_weight * total // (sum(weight for weight, _ in weights) * product))


def _extended_capacity(node: Node, names: Iterable[str]) -> dict[str, int]:
    capacity = {}
    for name in names:
        try:
            capacity[name] = whole_number(node.capacity.get(name, "0"))
        except QuantityError:
            continue  # the API server admits only whole numbers; anything else counts as nothing
    return capacity
