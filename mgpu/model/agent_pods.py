"""The Pods that the node agents run in: which node each one serves, and whether it can start containers there.

The kubelet keeps the `Ready` condition of a Pod: it turns false about a second after the container has ended, and when
the readiness probe fails. So the state of an agent reaches everybody who watches Pods, and is written only when it
changes. A heartbeat (a Lease) would take seconds longer to tell the same, and 5,000 nodes would write 500 of them a
second.
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
        problem: why it cannot start containers now; None where it can.
        since: the time at which it became so, as the kubelet wrote it; None where it wrote none.
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


def without_ready_agent(agents: Collection[AgentPod]) -> AgentPod | None:
    """Of the agents' Pods on one node, return the one to blame for that no container can start there; None: one can.

    During a rolling update two agents stand side by side, of which one that is ready is enough. Among several that are
    not, the one that stays comes before one that is being deleted; ties go by name.
    """
    if not agents or any(pod.problem is None for pod in agents):
        return None
    return max(agents, key=lambda pod: (pod.problem != _TERMINATING, pod.name))


def nodes_without_agent(pods: Iterable[Raw], namespace: str) -> dict[str, AgentPod]:
    """Return the nodes that have Pods of the agent, none of them ready, each with the Pod to blame."""
    on_node: dict[str, list[AgentPod]] = {}
    for raw in pods:
        if found := agent_pod(raw, namespace):
            on_node.setdefault(found.node, []).append(found)
    blamed = {node: without_ready_agent(on_node[node]) for node in sorted(on_node)}
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
