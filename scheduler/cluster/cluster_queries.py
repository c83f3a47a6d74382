"""Answers questions about the cached cluster: its pods, its nodes and what pods hold.

`ClusterCache` is a `ClusterQueries` and adds the changes of the data. The filter, the decider, the controllers, the web
page and the metrics ask these questions, and so do the commands with a cache that was filled from lists. What must hold
is in `scheduler.cluster.cache`: no method here changes nodes, pods or holdings, each one holds the lock of the cache,
and each result is a copy or immutable.
"""

import threading
import time
from collections.abc import Iterable, Sequence

from mgpu.dialects import mtgpu
from mgpu.model.agent_pods import AgentPod
from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding
from mgpu.model.pods import Node, Pod
from mgpu.model.slice_names import MIG_CLAIMS
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.node_agents import NodeAgents, brief_problem, detailed_problem
from scheduler.cluster.node_snapshots import NodeContents, NodeSnapshot, NodeSnapshots
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.nominations import Nominations
from scheduler.cluster.pods import Pods
from scheduler.cluster.reservations import Reservation, Reservations
from scheduler.engine import nvidia_plugin
from scheduler.engine.arrays.node_table import NodeTable

NODES_PER_LOCK = 25
"""The most nodes that are computed again while a lock is held, which takes less than 10 ms."""
_PAUSE_SECONDS = 0.0005


def pause() -> None:
    """Let threads that wait for a lock have it, after it was released and before it is acquired again.

    Locks of Python are not fair: without a pause, the thread that has released one acquires it again at once.
    """
    time.sleep(_PAUSE_SECONDS)


class ClusterQueries:
    """The questions that any thread may ask about the cached cluster. The constructor gets the parts of the cache."""

    def __init__(
        self,
        lock: threading.RLock,
        nodes: Nodes,
        pods: Pods,
        agents: NodeAgents,
        reservations: Reservations,
        holdings: Holdings,
        nominations: Nominations,
        snapshots: NodeSnapshots,
    ) -> None:
        self._lock = lock
        self._nodes = nodes
        self._pods = pods
        self._agents = agents
        self._reservations = reservations
        self._holdings = holdings
        self._ledger = holdings.ledger
        self._nominations = nominations
        self._snapshots = snapshots

    # Pods.

    def uid_of(self, namespace: str, name: str) -> str | None:
        """Return the UID of the pod with this name, or None if no such pod is cached. The pod need not request GPUs."""
        with self._lock:
            return self._pods.uid_of(namespace, name)

    def gpu_pod(self, uid: str) -> GpuPod | None:
        """Return the GPU pod with this UID, or None if no GPU pod with this UID is cached."""
        with self._lock:
            return self._pods.get(uid)

    def gpu_pods(self) -> tuple[GpuPod, ...]:
        """Return all GPU pods in no particular order."""
        with self._lock:
            return self._pods.all()

    def reservation(self, uid: str) -> Reservation | None:
        """Return the reservation of this pod, or None if it has none."""
        with self._lock:
            return self._reservations.get(uid)

    def undecided_pods(self) -> tuple[str, ...]:
        """Return the UIDs of the pods that need a late binding decision, sorted by namespace and name of the pod."""
        with self._lock:
            return self._holdings.undecided()

    def is_undecided(self, uid: str) -> bool:
        """Return whether the pod needs a late binding decision."""
        with self._lock:
            return self._holdings.is_undecided(uid)

    def remnant_problem(self, pod: Pod) -> str | None:
        """Return the reason why this pod gets no cards because of remnants of its namespace, or None.

        The result is None for an occupy pod. It occupies its card for MtgpuPods of other namespaces, whose remnants the
        controller has checked. If the remnants of its own namespace, kube-system, mattered, one of them would hold up
        the MtgpuPods of all namespaces.
        """
        if mtgpu.occupy_target(pod) is not None:
            return None
        with self._lock:
            return self._holdings.remnants.problem(pod.namespace)

    # Nodes.

    def nodes(self, names: Iterable[str]) -> list[Node | None]:
        """Return the node for each name, or None where no node has the name."""
        with self._lock:
            return list(map(self._nodes.get, names))

    def node_count(self) -> int:
        """Return the number of nodes with cards, and of nodes that had cards."""
        with self._lock:
            return len(self._ledger.nodes())

    def nodes_with_cards(self) -> tuple[str, ...]:
        """Return the names of the nodes that have cards, sorted."""
        with self._lock:
            return tuple(sorted(name for name, cards in self._ledger.nodes().items() if cards))

    def nodes_for_claims(self) -> tuple[str, ...]:
        """Return the names of the nodes whose cards or MIG instances claims may get, sorted."""
        return tuple(sorted({*self.nodes_with_cards(), *self.nodes_for_instances()}))

    def nodes_for_instances(self) -> tuple[str, ...]:
        """Return the names of the nodes on which claims get MIG instances, sorted."""
        with self._lock:
            slices = self._nodes.slices
            return tuple(name for name in slices.names() if slices.of(name).mode == MIG_CLAIMS)

    def gpus(self, name: str) -> tuple[Card, ...]:
        """Return all GPUs of a node, partitioned or not; () if there is no node of this name."""
        with self._lock:
            node = self._nodes.get(name)
            return self._nodes.gpus(node) if node is not None else ()

    def agent_problems(self, names: Sequence[str]) -> dict[str, str]:
        """Return a brief reason for each of these nodes whose mgpu agent cannot start containers now."""
        with self._lock:
            silent = self._agents.silent
            return {name: brief_problem(silent[name]) for name in names if name in silent} if silent else {}

    def agent_problem(self, node: str) -> str | None:
        """Return the reason why the node's mgpu agent cannot start containers now.

        Returns None if it can, or if the node has no mgpu agent.
        """
        with self._lock:
            pod = self._agents.silent.get(node)
            return None if pod is None else detailed_problem(pod)

    def nodes_without_agent(self) -> int:
        """Return how many nodes are rejected because their mgpu agent is not ready."""
        with self._lock:
            return sum(node in self._nodes for node in self._agents.silent)

    def agents_not_ready(self) -> dict[str, AgentPod]:
        """Return the nodes whose mgpu agent is not ready, sorted, each with the Pod of its agent."""
        with self._lock:
            return dict(sorted(self._agents.not_ready.items()))

    def agents_on(self, node: str) -> tuple[AgentPod, ...]:
        """Return the Pods of the mgpu agents on a node, sorted by name."""
        with self._lock:
            return self._agents.on(node)

    def unreadable_objects(self) -> dict[str, str]:
        """Return why Devices and ConfigMaps cannot be read, by kind and name (`Device n1`)."""
        with self._lock:
            return self._nodes.problems()

    def node_snapshot(self, node: str, uid: str, gpuid: str = "") -> NodeSnapshot:
        """Return a snapshot of the node for a pod.

        Args:
            uid: The UID of the pod, whose own holding is left out; "" for a snapshot with the holdings of all pods.
            gpuid: The GPUID for which the pod occupies a card of this node; "" for any other pod.
        """
        with self._lock:
            return self._snapshots.of(node, uid, gpuid)

    def node_snapshot_with_pods(self, node: str, uid: str) -> tuple[NodeSnapshot, tuple[tuple[Holding, GpuPod], ...]]:
        """Return a snapshot of the node for a pod, and the holdings of other GPU pods there, each with its pod."""
        with self._lock:
            held = (h for h in self._ledger.holdings(node) if h.uid != uid)
            pods = tuple((h, pod) for h in held if (pod := self._pods.get(h.uid)) is not None)
            return self._snapshots.of(node, uid), pods

    def node_contents(self, node: str) -> NodeContents | None:
        """Return the contents of a node for the page and the metrics, or None if there is no such node."""
        with self._lock:
            return self._snapshots.contents(node)

    def cards_and_holdings(self, node: str) -> tuple[tuple[CardState, ...], tuple[Holding, ...]] | None:
        """Return the GPUs of a node and all holdings on it, or None if there is no such node."""
        with self._lock:
            return (self._ledger.cards(node), self._ledger.holdings(node)) if node in self._nodes else None

    def cards(self, node: str) -> tuple[Card, ...]:
        """Return the devices of a node that pods can hold; () if there is no such node."""
        with self._lock:
            return self._ledger.nodes().get(node, ())

    @property
    def version(self) -> int:
        """A number that changes whenever any node, its cards or its holdings change."""
        with self._lock:
            return self._snapshots.last_version

    def node_versions(self) -> dict[str, int]:
        """Return, for each node, a number that changes with its contents. The result may include deleted nodes."""
        with self._lock:
            return self._snapshots.versions()

    def take_changed_nodes(self, most: int) -> list[tuple[str, NodeSnapshot]]:
        """Return nodes whose cards or free resources have changed since they were last returned, each with a snapshot.

        The list is empty unless the settings choose a `nodePolicy` that learns.

        Args:
            most: The number of nodes to return if more have changed. Further calls return the others.
        """
        with self._lock:
            return self._snapshots.take_changed(most)

    def holdings(self, node: str | None = None) -> tuple[Holding, ...]:
        """Return the holdings on a node, or all holdings if `node` is None."""
        with self._lock:
            return self._ledger.holdings(node)

    def group_cards(self, request: GpuRequest, uid: str) -> tuple[GroupCard, ...]:
        """Return the cards that the request's same-card group holds, without those of the pod with this UID."""
        with self._lock:
            return self._ledger.group_cards(request.constraints.same_card, uid)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        """Return the nodes where a pod of one of the request's groups holds cards, or to which one is nominated."""
        groups = request.constraints.groups
        if not groups:
            return frozenset()
        with self._lock:
            held = (held.node for group in groups for held in self._ledger.members(group))
            return frozenset(held) | self._nominations.group_nodes(groups)

    def node_table(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> NodeTable:
        """Return a snapshot of these nodes as arrays, for one pod."""
        self.refresh()
        with self._lock:
            return self._snapshots.table(names, pod, request)

    def refresh(self) -> None:
        """Update the arrays that `node_table` reads, which takes up to 100 µs for each node that has changed."""
        is_complete = False
        while not is_complete:
            with self._lock:
                is_complete = self._snapshots.refresh(NODES_PER_LOCK)
            if not is_complete:
                pause()

    def chosen_by_nvidia(self, names: Sequence[str], pod: Pod, request: GpuRequest) -> dict[str, Rejection | None]:
        """Return those of the nodes whose whole cards NVIDIA's plugin serves, each with the rejection of the pod there.

        The value is None for a node on which the pod may be placed.
        """
        candidates: list[tuple[Node, tuple[CardState, ...], tuple[int, ...]]] = []
        with self._lock:
            for name in names:
                node = self._nodes.get(name)
                if node is not None and nvidia_plugin.is_on_node(node):
                    given = self._snapshots.indexes_used_by_mgpu(name, pod.uid, occupied_gpuid(pod, name))
                    candidates.append((node, self._ledger.cards(name), given))
        return {node.name: nvidia_plugin.rejection(request, node, cards, given) for node, cards, given in candidates}
