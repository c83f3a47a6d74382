"""What the kubelet checks itself before it admits a pod, whoever bound it: pure."""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from mgpu.model.requests import Requests, add, allocatable, requests_of
from playground import fit

Raw = Mapping[str, Any]


def unfit(pod: Raw, node: Raw, others: Iterable[Raw], held: Mapping[str, int]) -> tuple[str, str] | None:
    """(reason, message) of the refusal; None: admitted. others: the pods that are active on the node.

    A resource that the node does not have at all is dropped from the pod's requests, and what the device manager
    gave out (`held`) is never too much (kubelet lifecycle/predicate.go, devicemanager sanitizeNodeAllocatable).
    """
    there = allocatable(node)
    own = {name: amount for name, amount in requests_of(pod).items() if "/" not in name or name in there}
    used: Requests = reduce(add, map(requests_of, others), Requests())
    tolerant = {**pod, "spec": {**pod["spec"], "tolerations": [{"operator": "Exists"}]}}
    for reason in fit.fits(tolerant, node, used, counted=lambda _: False):
        return "NodeAffinity", f"Predicate NodeAffinity failed: {reason}"
    for name, wanted in sorted(own.items()):
        total = max(there.get(name, 0), held.get(name, 0))
        if wanted and used.get(name, 0) + wanted > total:
            numbers = f"requested: {wanted}, used: {used.get(name, 0)}, capacity: {total}"
            return f"OutOf{name}", f"Node didn't have enough resource: {name}, {numbers}"
    return None
