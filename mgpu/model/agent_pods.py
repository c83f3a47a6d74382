"""Determines from the Pods of the node agents which nodes have no ready agent.

The scheduler keeps GPU pods off such nodes, and `mgpu inspect` and `mgpu doctor` report them. An agent is ready if its
Pod has the condition `Ready` and is not being deleted. The kubelet sets the condition to false about a second after the
container has ended, or when the readiness probe fails. A Lease for each agent would detect the failure seconds later,
and would cost 500 writes a second in a cluster of 5,000 nodes.
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
        since: the `lastTransitionTime` of the condition `Ready`; None if it is missing.
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
    """Return the agent Pod that explains why a node has no ready agent; None if an agent is ready or `agents` is empty.

    During a rolling update a node can have two agents, and one ready agent is enough. If none is ready, the function
    prefers a Pod that is not being deleted, and then the last one by name.

    Args:
        agents: the agent Pods on one node.
    """
    if not agents or any(pod.problem is None for pod in agents):
        return None
    return max(agents, key=lambda pod: (pod.problem != _TERMINATING, pod.name))


def nodes_without_agent(pods: Iterable[Raw], namespace: str) -> dict[str, AgentPod]:
    """Return the nodes that have agent Pods but no ready agent, each with its Pod from `find_unready_agent`."""
    on_node: dict[str, list[AgentPod]] = {}
    for raw in pods:
        if found := agent_pod(raw, namespace):
            on_node.setdefault(found.node, []).append(found)
    return {node: pod for node in sorted(on_node) if (pod := find_unready_agent(on_node[node])) is not None}


def is_ready(raw: Raw) -> bool:
    """Return whether the Pod has the condition `Ready`, even if it is being deleted."""
    return _condition(raw).get("status") == "True"


def not_ready_cause(raw: Raw) -> str:
    """Return a reason such as `CrashLoopBackOff` from the container statuses, or else the phase of the Pod."""
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
