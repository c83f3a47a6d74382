"""Reads the Pods of the node agents, and determines which nodes have no ready agent.

The scheduler keeps GPU pods off such nodes, and `mgpu inspect` and `mgpu doctor` report them. The Pods also say where
the agents serve their metrics (`mgpu.presentation.measured_use`). An agent is ready if its
Pod has the condition `Ready` and is not being deleted. The kubelet sets the condition to false about a second after the
container has ended, or when the readiness probe fails. A Lease for each agent would detect the failure seconds later,
and would cost 500 writes a second in a cluster of 5,000 nodes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COMPONENT_LABEL = "app.kubernetes.io/component"
COMPONENT = "deviceplugin"
METRICS_PORT = "metrics"
"""The name of the agent's container port."""
NAME_LABEL = "app.kubernetes.io/name"
NAME = "mgpu"
_TERMINATING = "Terminating"

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentPod:
    """The Pod of an agent.

    Attributes:
        problem: the reason why the agent is not ready; None if it is ready.
        since: the `lastTransitionTime` of the condition `Ready`; None if it is missing.
        ip: the IP address of the Pod; None before it has one.
        port: the port of `/metrics`; None if the Pod names none.
    """

    node: str
    name: str
    problem: str | None
    since: str | None = None
    ip: str | None = None
    port: int | None = None


def agent_pod(raw: Raw, namespace: str) -> AgentPod | None:
    """Return the agent Pod in `raw` (decoded JSON), or None for any other Pod and for a Pod without a node.

    Only Pods in the installation's own `namespace` count, since any tenant can set the labels.
    """
    meta = raw["metadata"]
    if meta.get("namespace") != namespace:
        return None
    labels = meta.get("labels") or {}
    node = (raw.get("spec") or {}).get("nodeName")
    if (labels.get(NAME_LABEL), labels.get(COMPONENT_LABEL)) != (NAME, COMPONENT) or not node:
        return None
    row = _condition(raw)
    since = row.get("lastTransitionTime")
    ip = (raw.get("status") or {}).get("podIP")
    return AgentPod(
        str(node),
        str(meta["name"]),
        _problem(raw, row),
        str(since) if since else None,
        str(ip) if ip else None,
        _metrics_port(raw),
    )


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


def find_ready_agent(agents: Iterable[AgentPod]) -> AgentPod | None:
    """Return the agent Pod to ask for the metrics of a node, the last one by name of those that are ready, or None."""
    return max((pod for pod in agents if pod.problem is None), key=lambda pod: pod.name, default=None)


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


def _metrics_port(raw: Raw) -> int | None:
    """Return the container port with the name `metrics` (manifests/base/deviceplugin.yaml)."""
    containers = (raw.get("spec") or {}).get("containers") or ()
    ports = (row for container in containers for row in container.get("ports") or ())
    return next((int(row["containerPort"]) for row in ports if row.get("name") == METRICS_PORT), None)


def _problem(raw: Raw, ready: Raw) -> str | None:
    if raw["metadata"].get("deletionTimestamp"):
        return _TERMINATING
    return None if ready.get("status") == "True" else not_ready_cause(raw)


def _condition(raw: Raw) -> Raw:
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return next((row for row in conditions if row.get("type") == "Ready"), {})
