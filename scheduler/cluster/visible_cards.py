"""How pods find the cards of all nodes: with what is kept for others, and for occupy pods only those of their GPUID."""

from collections.abc import Iterable, Mapping, Sequence

from mgpu.dialects import mtgpu
from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Ledger
from mgpu.model.pods import Node, Pod
from scheduler.cluster.arrays import Matrix
from scheduler.cluster.gpu_pods import occupies
from scheduler.cluster.nominations import LOWEST, Nominations
from scheduler.engine.arrays.node_table import Table


class Shown:
    """Not thread-safe. nodes, ledger, nominations: its owner's, and only read."""

    def __init__(self, nodes: Mapping[str, Node], ledger: Ledger, nominations: Nominations) -> None:
        self._nodes, self._ledger, self._nominations = nodes, ledger, nominations
        self._versions: dict[str, int] = {}
        self._last_version = 0
        self._dirty: set[str] = set()
        self._matrix = Matrix()

    def touch(self, node: str) -> None:
        """The node, its cards or what is held of them has changed."""
        self._last_version += 1  # of all nodes: one that comes again has no version that it had before
        self._versions[node] = self._last_version
        self._dirty.add(node)

    def mark(self, nodes: Iterable[str]) -> None:
        """What is kept on these has changed."""
        self._dirty.update(nodes)

    def version(self, node: str) -> int:
        return self._versions.get(node, 0)

    def versions(self) -> dict[str, int]:
        """Of all nodes; some of them may be gone."""
        return dict(self._versions)

    def cards(self, node: str, uid: str, gpuid: str) -> tuple[CardState, ...]:
        """As the pod of this uid finds them, which occupies a card for this GPUID, but for what is kept for others."""
        return self._ledger.for_gpuid(node, gpuid, uid) if gpuid else self._ledger.cards(node, uid)

    def table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> Table:
        """Return a snapshot of the nodes of these names as this pod finds them."""
        self.refresh()
        own, occupied = self._ledger.holding(pod.uid), mtgpu.occupied(pod)
        different = self._nominations.differing(pod.uid, pod.priority)
        different |= ({own.node} if own else set()) | ({occupied[0]} if occupied else set())
        instead = {name: self._unkept(name, pod.uid, pod.priority, occupies(pod, name)) for name in different}
        return self._matrix.table(names, request, instead)

    def refresh(self) -> None:
        """Bring the matrix up to date: what has changed since the last call costs some 20 µs a node."""
        for name in self._dirty:
            if name in self._nodes:
                self._matrix.put(self._nodes[name], self._unkept(name))
            else:
                self._matrix.drop(name)
                self._versions.pop(name, None)
        self._dirty.clear()

    def _unkept(self, node: str, uid: str = "", priority: int = LOWEST, gpuid: str = "") -> tuple[CardState, ...]:
        return self._nominations.beside(node, self.cards(node, uid, gpuid), uid, priority)
