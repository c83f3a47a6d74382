"""Nodes whose mgpu agent cannot start containers now, as the agents' own Pods say.

The kubelet fails a pod for good (`UnexpectedAdmissionError`) if it admits it while the device plugin is away. So a node
is refused while Pods of the agent exist there and none of them is ready. The state follows from the watched Pods alone:
no clock is compared with another one, and a scheduler that restarts comes to the same answer as the one before it.

A node without any Pod of an agent is not refused: its agent may run outside of a Pod, be another project's, or be
NVIDIA's own plugin. Whether its resources can be allocated then stands in the Node's status, which every scheduler
reads.
"""

from collections.abc import Mapping

from mgpu.model.agent_pods import AgentPod, Raw, agent_pod, without_ready_agent
from scheduler.cluster.events import CardsFreed, Publisher


class Agents:
    """Follows the agents' Pods. Not thread-safe: its owner holds the lock.

    Args:
        namespace: the namespace of the installation; None where agents are not followed.
        events: publishes CardsFreed for each node whose agent is ready again. Its pods that were refused may come now.
    """

    def __init__(self, namespace: str | None, events: Publisher) -> None:
        self._namespace = namespace
        self._events = events
        self._pods: dict[str, AgentPod] = {}
        self._on_node: dict[str, dict[str, AgentPod]] = {}
        self._silent: dict[str, AgentPod] = {}

    @property
    def silent(self) -> Mapping[str, AgentPod]:
        """The nodes that are refused, each with the Pod of its agent. Live; empty in a healthy cluster."""
        return self._silent

    def pod_changed(self, raw: Raw) -> None:
        """Take in a Pod of the watch, of whatever kind."""
        if self._namespace is None:
            return
        uid, found = str(raw["metadata"]["uid"]), agent_pod(raw, self._namespace)
        before = self._pods.get(uid)
        if found == before:
            return
        self._remove(uid)
        if found is not None:
            self._pods[uid] = found
            self._on_node.setdefault(found.node, {})[uid] = found
        # Only now, with the Pod's new state in place: between the two the node would seem to have no agent.
        for node in {pod.node for pod in (before, found) if pod is not None}:
            self._judge(node)

    def pod_gone(self, uid: str) -> None:
        """Take in the end of a Pod, of whatever kind."""
        before = self._remove(uid)
        if before is not None:
            self._judge(before.node)

    def _remove(self, uid: str) -> AgentPod | None:
        before = self._pods.pop(uid, None)
        if before is not None:
            here = self._on_node[before.node]
            del here[uid]
            if not here:
                del self._on_node[before.node]
        return before

    def _judge(self, node: str) -> None:
        blamed = without_ready_agent(self._on_node.get(node, {}).values())
        if blamed is not None:
            self._silent[node] = blamed
        elif self._silent.pop(node, None) is not None:
            self._events.publish(CardsFreed(node))


def brief(pod: AgentPod) -> str:
    """Return the reason for a filter's answer: alike for all nodes in the same state, since kube-scheduler counts
    equal reasons and writes each different one into the pod's status.
    """
    return f"the node's mgpu agent is not ready ({pod.problem})"


def detailed(pod: AgentPod) -> str:
    """Return the reason for an answer about this node alone."""
    since = f" since {pod.since}" if pod.since else ""
    return f"the mgpu agent of node {pod.node} is not ready{since} (Pod {pod.name}: {pod.problem})"
