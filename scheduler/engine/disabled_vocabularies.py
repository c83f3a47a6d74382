"""Finds pods that request GPUs in a vocabulary that the settings disable.

`scheduler.decisions.filter` rejects such a pod on nodes that do not have the resource from another device plugin.
kube-scheduler does not count resources that its extender manages (`ignoredByScheduler`), and the kubelet drops requests
for resources that its node does not have (docs/design/kubernetes.md, "Device manager"). So on such a node the pod would
run without cards of its own, and a CUDA image would see all cards of the node.
"""

from mgpu import dialects
from mgpu.dialects.registry import vocabulary_of
from mgpu.model.pods import Node, Pod
from mgpu.model.quantities import same_quantity
from mgpu.settings import Settings


def disabled_resources(pod: Pod, settings: Settings) -> dict[str, str]:
    """Return the resources that the pod requests in disabled vocabularies, each with its vocabulary."""
    enabled = {dialect.NAME for dialect in dialects.enabled(settings)}
    requested = {
        name for container, name in pod.resources() if not same_quantity((container.requested(name) or "0")[0], "0")
    }
    vocabularies = {name: vocabulary_of(name) for name in sorted(requested)}
    return {name: vocabulary for name, vocabulary in vocabularies.items() if vocabulary and vocabulary not in enabled}


def missing_reason(resources: dict[str, str], node: Node | None) -> str | None:
    """Return why the pod must not run on this node, or None if it may run or if the node is not known.

    Args:
        resources: The result of `disabled_resources`.
    """
    if node is None:
        return None
    for name, vocabulary in resources.items():
        if same_quantity(node.capacity.get(name, "0"), "0"):
            return f"no {name}, which mgpu does not serve: dialects.{vocabulary}.enabled is false"
    return None
