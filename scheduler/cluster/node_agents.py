"""The nodes whose mgpu agent cannot start containers now, according to the agents' own Pods.

The filter, the decider and preemption reject these nodes, because the kubelet fails a pod for good
(`UnexpectedAdmissionError`) if the pod arrives while no device plugin runs.

A node is rejected if it has Pods of the agent and none of them is ready. This rule needs only the watched Pods and no
clock, so a restarted scheduler comes to the same result. A node without any Pod of the agent is not rejected: its agent
may run outside of a Pod, or the node may have the device plugin of NVIDIA or of another project. The status of such a
Node says whether its resources can be allocated, and every scheduler reads the status. The cluster cache uses
`NodeAgents` with its lock held.
"""

from collections.abc import Mapping

from mgpu.model.agent_pods import AgentPod, Raw, agent_pod, find_unready_agent
from scheduler.cluster.events import CardsFreed, Publisher


class NodeAgents:
    """Part of the ClusterCache, which holds its lock around every call.

    It publishes CardsFreed for each node that is no longer rejected, because pods may fit there now.

    Args:
        namespace: The namespace of the installation.
        rejects: Whether nodes without a ready agent are rejected.
    """

    def __init__(self, namespace: str, events: Publisher, *, rejects: bool) -> None:
        self._namespace = namespace
        self._events = events
        self._rejects = rejects
        self._pods: dict[str, AgentPod] = {}
        self._on_node: dict[str, dict[str, AgentPod]] = {}
        self._silent: dict[str, AgentPod] = {}

    @property
    def silent(self) -> Mapping[str, AgentPod]:
        """The rejected nodes by name, each with a Pod of its agent. In a healthy cluster there are none."""
        return self._silent if self._rejects else {}

    @property
    def not_ready(self) -> Mapping[str, AgentPod]:
        """The nodes without a ready agent, whether they are rejected or not."""
        return self._silent

    def on(self, node: str) -> tuple[AgentPod, ...]:
        """Return the Pods of the agents on a node, sorted by name."""
        return tuple(sorted(self._on_node.get(node, {}).values(), key=lambda pod: pod.name))

    def pod_changed(self, raw: Raw) -> None:
        """Store a Pod that was added or modified, if it is a Pod of an agent."""
        uid = str(raw["metadata"]["uid"])
        now = agent_pod(raw, self._namespace)
        before = self._pods.get(uid)
        if now == before:
            return
        self._remove(uid)
        if now is not None:
            self._pods[uid] = now
            self._on_node.setdefault(now.node, {})[uid] = now
        # The nodes are updated after both changes, because between them the node would seem to have no agent.
        for node in {pod.node for pod in (before, now) if pod is not None}:
            self._update_node(node)

    def pod_gone(self, uid: str) -> None:
        """Remove a Pod of any kind that was deleted."""
        before = self._remove(uid)
        if before is not None:
            self._update_node(before.node)

    def _remove(self, uid: str) -> AgentPod | None:
        before = self._pods.pop(uid, None)
        if before is not None:
            pods = self._on_node[before.node]
            del pods[uid]
            if not pods:
                del self._on_node[before.node]
        return before

    def _update_node(self, node: str) -> None:
        silent = find_unready_agent(self._on_node.get(node, {}).values())
        if silent is not None:
            self._silent[node] = silent
        elif self._silent.pop(node, None) is not None and self._rejects:
            self._events.publish(CardsFreed(node))


def brief_problem(pod: AgentPod) -> str:
    """Return the reason for an answer about many nodes. It does not name the node.

    It must be equal for all nodes in the same state, because kube-scheduler counts equal reasons and writes each
    different reason into the pod's status.
    """
    return f"the node's mgpu agent is not ready ({pod.problem})"


def detailed_problem(pod: AgentPod) -> str:
    """Return the reason, with node and Pod, for an answer about this node alone."""
    since = f" since {pod.since}" if pod.since else ""
    return f"the mgpu agent of node {pod.node} is not ready{since} (Pod {pod.name}: {pod.problem})"
