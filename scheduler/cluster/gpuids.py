"""Counts the GPUIDs that each namespace uses at once. The settings can limit their number.

MtgpuPods that name the same node and GPUID share a card. Each GPUID of a node takes a whole card from all other pods,
however small the requests of its MtgpuPods are. A namespace uses a GPUID while one of its MtgpuPods holds a share of
the card of the GPUID, even if an MtgpuPod of another namespace was the first to use it. If the GPUID counted only for
the first namespace, two namespaces could take cards for each other. `MtgpuPodHoldings`, `mtgpupods.card_assignment` and
`mgpu simulate` use the counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mgpu.dialects.mtgpu import NAME, MtgpuPod
from mgpu.model.ledger import Holding

Gpuid = tuple[str, str]
"""A node, and a GPUID of this node."""


@dataclass(frozen=True, slots=True)
class GpuidLimit:
    """The limit of GPUIDs for a namespace, as the decisions about one node need it.

    Attributes:
        maximum: The number of GPUIDs that a namespace may use at once.
        elsewhere: By namespace, the number of GPUIDs that it uses on other nodes.
    """

    maximum: int
    elsewhere: Mapping[str, int]


class UsedGpuids:
    """The GPUIDs that each namespace uses. Not thread-safe."""

    def __init__(self, holdings: Iterable[Holding] = ()) -> None:
        self._users: dict[str, Counter[Gpuid]] = {}  # By namespace, the number of its MtgpuPods with each GPUID.
        self._of: dict[str, tuple[str, Gpuid]] = {}  # By UID of an MtgpuPod, its namespace and its GPUID.
        for held in holdings:
            if held.dialect == NAME and not held.occupies:
                self.put(held.uid, held)

    def put(self, uid: str, held: Holding | None) -> str | None:
        """Replace what an MtgpuPod holds. `held` is None if the MtgpuPod holds nothing now.

        If the namespace of the former holding no longer uses the GPUID of that holding, return this namespace. In all
        other cases return None.
        """
        before = self._of.pop(uid, None)
        if held is not None:
            self._of[uid] = (held.namespace, _gpuid(held))
            self._users.setdefault(held.namespace, Counter())[_gpuid(held)] += 1
        if before is None:
            return None
        namespace, gpuid = before
        users = self._users[namespace]
        users[gpuid] -= 1
        if users[gpuid]:
            return None
        del users[gpuid]
        if not users:
            del self._users[namespace]
        return namespace

    def uses(self, pod: MtgpuPod) -> bool:
        """Return whether the namespace of the MtgpuPod uses its GPUID."""
        return (pod.node, pod.gpuid) in self._users.get(pod.namespace, {})

    def count(self, namespace: str) -> int:
        """Return how many GPUIDs the namespace uses."""
        return len(self._users.get(namespace, {}))

    def elsewhere(self, namespaces: Iterable[str], node: str) -> Mapping[str, int]:
        """Return how many GPUIDs each of these namespaces uses on other nodes."""
        return {name: sum(on != node for on, _ in self._users.get(name, ())) for name in sorted(set(namespaces))}


def _gpuid(held: Holding) -> Gpuid:
    """Return the GPUID of a holding. An MtgpuPod whose GPUID cannot be read counts as using a GPUID of its own."""
    return held.node, held.gpuid or f"of {held.uid}"
