"""The Pods of the node agents: which node each one serves, and whether it can start containers there.

The scheduler uses it to keep pods off nodes whose agent is not ready, and `mgpu doctor` reports it. The source is the
`Ready` condition of the Pod, which the kubelet sets to false about a second after the container has ended or when the
readiness probe fails. A heartbeat (a Lease) would be slower by seconds, and 5,000 nodes would write 500 a second.
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
    """An agent's Pod on its node.

    Attributes:
        problem: why it cannot start containers now; None if it can.
        since: the time of that change as the kubelet wrote it; None if unknown.
    """

    node: str
    name: str
    problem: str | None
    since: str | None = None


def agent_pod(raw: Raw, namespace: str) -> AgentPod | None:
    """Read the Pod of a node agent from the API's JSON; None for every other Pod, and for one without a node.

    Only Pods in the installation's own `namespace` count: a label alone can be set by any tenant.
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
    """Return the agent Pod that explains why no container can start on a node, or None where an agent is ready.

    During a rolling update a node has two agents; one ready agent is enough. Among several that are not ready, one that
    stays is chosen before one that is being deleted, then the last by name.

    Args:
        agents: the agents' Pods on one node.
    """
    if not agents or any(pod.problem is None for pod in agents):
        return None
    return max(agents, key=lambda pod: (pod.problem != _TERMINATING, pod.name))


def nodes_without_agent(pods: Iterable[Raw], namespace: str) -> dict[str, AgentPod]:
    """Return the nodes whose agents are all not ready, each with the Pod that explains it."""
    on_node: dict[str, list[AgentPod]] = {}
    for raw in pods:
        if found := agent_pod(raw, namespace):
            on_node.setdefault(found.node, []).append(found)
    blamed = {node: find_unready_agent(on_node[node]) for node in sorted(on_node)}
    return {node: pod for node, pod in blamed.items() if pod is not None}


def is_ready(raw: Raw) -> bool:
    """Return whether the kubelet reports the Pod as ready."""
    return _condition(raw).get("status") == "True"


def not_ready_cause(raw: Raw) -> str:
    """Return the reason for which a container of the Pod waits or has ended, else the Pod's phase."""
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
