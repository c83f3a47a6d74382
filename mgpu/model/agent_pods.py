"""Finds the nodes without a ready agent in the Pods of the node agents.

The scheduler (`scheduler.cluster`) keeps pods off such nodes, and `mgpu inspect` and `mgpu doctor` report them. An
agent is ready if its Pod has the condition `Ready`. The kubelet sets this condition to false about a second after the
container has ended, or when the readiness probe fails. A Lease for each agent would detect the failure seconds later,
and would cost 500 writes a second on 5,000 nodes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COMPONENT_LABEL = "app.kubernetes.io/component"
COMPONENT = "deviceplugin"
_NAME_LABEL = "app.kubernetes.io/name"
_NAME = "mgpu"
_TERMINATING = "Terminating"

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentPod:
    """The Pod of an agent.

    Attributes:
        problem: the reason why the agent is not ready; None if it is ready.
        since: the time of the last change between ready and not ready, as the kubelet wrote it; None if unknown.
    """

    node: str
    name: str
    problem: str | None
    since: str | None = None


def agent_pod(raw: Raw, namespace: str) -> AgentPod | None:
    """Return the agent Pod in `raw` (decoded JSON), or None for any other Pod and for a Pod without a node.

    Only Pods in the installation's own `namespace` count, since any tenant can set the labels.
    """
    meta = raw["metadata"]
    if meta.get("namespace") != namespace:
        return None
    labels = meta.get("labels") or {}
    node = (raw.get("spec") or {}).get("nodeName")
    if (labels.get(_NAME_LABEL), labels.get(COMPONENT_LABEL)) != (_NAME, COMPONENT) or not node:
        return None
    row = _condition(raw)
    since = row.get("lastTransitionTime")
    return AgentPod(str(node), str(meta["name"]), _problem(raw, row), str(since) if since else None)


def find_unready_agent(agents: Collection[AgentPod]) -> AgentPod | None:
    """Return an agent Pod that explains why a node has no ready agent, or None if an agent is ready.

    During a rolling update a node has two agents, of which one has to be ready. A Pod that is not being deleted is
    preferred, then the last by name.

    Args:
        agents: the agent Pods on one node.
    """
    if not agents or any(pod.problem is None for pod in agents):
        return None
    return max(agents, key=lambda pod: (pod.problem != _TERMINATING, pod.name))


def nodes_without_agent(pods: Iterable[Raw], namespace: str) -> dict[str, AgentPod]:
    """Return the nodes without a ready agent, each with the Pod that explains it."""
    on_node: dict[str, list[AgentPod]] = {}
    for raw in pods:
        if found := agent_pod(raw, namespace):
            on_node.setdefault(found.node, []).append(found)
    return {node: pod for node in sorted(on_node) if (pod := find_unready_agent(on_node[node])) is not None}


def is_ready(raw: Raw) -> bool:
    """Return whether the kubelet reports the Pod as ready."""
    return _condition(raw).get("status") == "True"


def not_ready_cause(raw: Raw) -> str:
    """Return the reason why a container of the Pod is waiting or has terminated, or else the phase of the Pod."""
    status = raw.get("status") or {}
    for row in status.get("containerStatuses") or ():
        state = row.get("state") or {}
        for kind in ("waiting", "terminated"):
            reason = (state.get(kind) or {}).get("reason")
            if reason:
                return str(reason)
    return str(status.get("phase") or "unknown")


def _problem(raw: Raw, ready: Raw) -> str | None:
    if raw["metadata"].get("deletionTimestamp"):
        return _TERMINATING
    return None if ready.get("status") == "True" else not_ready_cause(raw)


def _condition(raw: Raw) -> Raw:
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return next((row for row in conditions if row.get("type") == "Ready"), {})
