"""How many GPUIDs a namespace uses at once, which the settings may bound. Pure.

Each GPUID of a node takes a whole card from everybody else, however small the share is that its MtgpuPods request. A
namespace uses a GPUID while one of its MtgpuPods holds a share of that card, also where another namespace was first on
it: two namespaces could open cards for each other otherwise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mgpu.dialects.mtgpu import NAME, MtgpuPod
from mgpu.model.ledger import Holding

Gpuid = tuple[str, str]
"""A node and a GPUID, which is of its node."""


@dataclass(frozen=True, slots=True)
class Bound:
    """most: the number of GPUIDs that a namespace may use at once. elsewhere: by namespace, how many of them it uses on
    other nodes than the one that is looked at.
    """

    most: int
    elsewhere: Mapping[str, int]


class Used:
    """The GPUIDs that each namespace uses. Not thread-safe."""

    def __init__(self, holdings: Iterable[Holding] = ()) -> None:
        self._users: dict[str, dict[Gpuid, set[str]]] = {}
        self._of: dict[str, tuple[str, Gpuid]] = {}
        for held in holdings:
            if held.dialect == NAME and not held.occupies:
                self.put(held.uid, held)

    def put(self, uid: str, held: Holding | None) -> str | None:
        """Take in what an MtgpuPod holds now; return the namespace that no longer uses a GPUID, if there is one."""
        before, now = self._of.pop(uid, None), None if held is None else (held.namespace, _gpuid(held))
        if held is not None and now is not None:
            self._of[uid] = now
            self._users.setdefault(held.namespace, {}).setdefault(now[1], set()).add(uid)
        if before is None or before == now:
            return None
        namespace, gpuid = before
        users = self._users[namespace][gpuid]
        users.discard(uid)
        if users:
            return None
        del self._users[namespace][gpuid]
        if not self._users[namespace]:
            del self._users[namespace]
        return namespace

    def uses(self, pod: MtgpuPod) -> bool:
        """Return whether the namespace of the MtgpuPod uses its GPUID."""
        return (pod.node, pod.gpuid) in self._users.get(pod.namespace, {})

    def count(self, namespace: str) -> int:
        return len(self._users.get(namespace, {}))

    def elsewhere(self, namespaces: Iterable[str], node: str) -> Mapping[str, int]:
        """Return how many GPUIDs each of these namespaces uses on other nodes."""
        return {name: sum(on != node for on, _ in self._users.get(name, ())) for name in sorted(set(namespaces))}


def _gpuid(held: Holding) -> Gpuid:
    """One that cannot be read any more holds its card all the same, under a GPUID that nobody knows."""
    return held.node, held.gpuid or f"of {held.uid}"
