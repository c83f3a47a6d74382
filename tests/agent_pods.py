"""Pods of node agents as the kubelet reports them."""

from typing import Any

from tests import builders as b

Raw = dict[str, Any]
LABELS = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "deviceplugin"}
SINCE = "2026-01-01T00:00:00Z"


def agent(
    node: str = "n1",
    *,
    ready: bool = True,
    name: str = "agent",
    waiting: str | None = None,
    deleting: bool = False,
    namespace: str = "mgpu-system",
    labels: dict[str, str] | None = None,
    ip: str = "",
    port: int | None = None,
) -> Raw:
    """The Pod of a node agent as the kubelet reports it."""
    ports = {} if port is None else {"ports": [{"containerPort": 1}, {"name": "metrics", "containerPort": port}]}
    container = {"name": "deviceplugin", "image": "mgpu", **ports}
    raw = b.pod(f"{name}-{node}", container, namespace=namespace, node=node, phase="Running")
    if ip:
        raw["status"] |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    raw["metadata"]["labels"] = LABELS if labels is None else labels
    if deleting:
        raw["metadata"]["deletionTimestamp"] = SINCE
    raw["status"]["conditions"] = [
        {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": SINCE}
    ]
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    raw["status"]["containerStatuses"] = [{"name": "deviceplugin", "state": state}]
    return raw
