"""How much of the resources that settings weigh beside cpu and memory the pods of each node ask for."""

from collections import Counter
from collections.abc import Collection, Mapping

from mgpu.model.gpu_requests import Amount, peak
from mgpu.model.pods import Pod
from mgpu.model.quantities import QuantityError, whole_number


def asked_by(pod: Pod, names: Collection[str]) -> dict[str, int]:
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


class NamedUsage:
    """Not thread-safe. Takes no room where `names` is empty. From the pods alone, in whatever order they come."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._of_pod: dict[str, tuple[str, Mapping[str, int]]] = {}
        self._on_node: dict[str, Counter[str]] = {}

    def follow(self, pod: Pod) -> None:
        if not self._names:
            return
        self.drop(pod.uid)
        asked = asked_by(pod, self._names) if pod.node and not pod.ended else {}
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
