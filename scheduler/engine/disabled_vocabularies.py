"""Pods in a vocabulary that is disabled here, on nodes where nobody else serves it either.

kube-scheduler does not count what the extender is asked about (`ignoredByScheduler`), and the kubelet drops requests
for what its node does not have (docs/design/kubernetes.md, "Device manager"): such a pod would run, without cards
of its own, and a CUDA image sees all of the node's.
"""

from mgpu import dialects
from mgpu.dialects.registry import vocabulary_of
from mgpu.model.pods import Node, Pod
from mgpu.model.quantities import same_quantity
from mgpu.settings import Settings


def unserved(pod: Pod, settings: Settings) -> dict[str, str]:
    """What the pod asks for in vocabularies that are disabled: resource → vocabulary."""
    enabled = {dialect.NAME for dialect in dialects.enabled(settings)}
    asked = {
        name for container, name in pod.resources() if not same_quantity((container.requested(name) or "0")[0], "0")
    }
    found = {name: vocabulary_of(name) for name in sorted(asked)}
    return {name: of for name, of in found.items() if of and of not in enabled}


def refusal(resources: dict[str, str], node: Node | None) -> str:
    """Why the pod must not go to this node; "": it may, as far as is known here."""
    if node is None:
        return ""
    missing = next((name for name in resources if same_quantity(node.capacity.get(name, "0"), "0")), "")
    why = f"no {missing}, which mgpu does not serve: dialects.{resources.get(missing)}.enabled is false"
    return why if missing else ""
