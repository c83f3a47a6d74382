"""The MtgpuPods of the cluster, as the controller of MtgpuPods reads and admits them.

`ClusterCache.mtgpupods` is the only instance. It is a facade of two parts of the cluster cache, the objects and the
holdings of MtgpuPods, and acquires the lock of the cluster cache for each call.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mgpu.model.ledger import Holding
from scheduler.cluster.gpuids import GpuidLimit
from scheduler.cluster.mtgpupod_holdings import MtgpuNode, MtgpuPodHoldings
from scheduler.cluster.mtgpupod_objects import MtgpuObjects, MtgpuPodObjects, Raw
from scheduler.cluster.pods import Pods


@dataclass(frozen=True, slots=True)
class MtgpuSnapshot:
    """The data from which the controller plans one node, all read at the same moment.

    If the parts were read one after the other, a Pod that the informer delivers in between would look like a Pod that
    somebody else has created.

    Attributes:
        node: The cards of the node and their holdings.
        objects: The MtgpuPods and the occupy pods of the node.
        gpuids_elsewhere: For each namespace with MtgpuPods on this node, the number of GPUIDs that it uses on other
            nodes.
    """

    node: MtgpuNode
    objects: MtgpuObjects
    gpuids_elsewhere: Mapping[str, int]


class MtgpuPodCache:
    """The objects, holdings and admissions of all MtgpuPods. Thread-safe."""

    def __init__(self, lock: threading.RLock, pods: Pods, objects: MtgpuPodObjects, holdings: MtgpuPodHoldings) -> None:
        self._lock = lock
        self._pods = pods
        self._objects = objects
        self._holdings = holdings

    def mtgpupod_changed(self, raw: Raw) -> None:
        with self._lock:
            self._holdings.mtgpupod_changed(raw)
            self._objects.mtgpupod_changed(raw)

    def mtgpupod_gone(self, raw: Raw) -> None:
        with self._lock:
            self._holdings.mtgpupod_gone(raw)
            self._objects.mtgpupod_gone(raw)

    def objects(self) -> Iterator[Raw]:
        """Return the stored parts of all MtgpuPods (`stored_objects.stored_mtgpupod`) in no particular order."""
        with self._lock:
            return self._objects.items()

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have MtgpuPods or occupy pods, sorted."""
        with self._lock:
            return self._objects.nodes()

    def snapshot(self, node: str) -> MtgpuSnapshot:
        """Return the cards, holdings and objects of a node."""
        with self._lock:
            objects = self._objects.on(node, self._pods.uid_of)
            gpuids = self._holdings.gpuids_elsewhere({namespace for namespace, _ in objects.items}, node)
            return MtgpuSnapshot(self._holdings.on(node), objects, gpuids)

    def remnant_seconds(self, namespaces: Iterable[str], node: str) -> Mapping[str, float]:
        """Return for how many seconds remnants still block each of these namespaces. Unblocked ones are left out.

        If the remnants of a returned namespace end earlier, MtgpuPodsAffected is published for the node.
        """
        with self._lock:
            return self._holdings.remnant_seconds(namespaces, node)

    def admit(
        self,
        node: str,
        holdings: Iterable[Holding],
        version: int,
        limit: GpuidLimit | None = None,
        limited: Iterable[str] = (),
    ) -> bool:
        """Admit exactly these MtgpuPods to the cards of the node, as `MtgpuPodHoldings.admit` does."""
        with self._lock:
            return self._holdings.admit(node, holdings, version, limit, limited)

    def drop_admissions(self) -> None:
        """Withdraw all admissions.

        Call this when the replica begins to lead: since it led last, another leader may have decided otherwise.
        """
        with self._lock:
            self._holdings.drop_admissions()
