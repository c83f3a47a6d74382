"""The Pods of the playground's agents, which are processes of this machine, as the mirror Pods of static pods.

Only their addresses are used: `mgpu inspect --usage` and the web page read the metrics of the agents there.
`playground.cluster` creates them.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

from mgpu.model.agent_pods import COMPONENT, COMPONENT_LABEL, METRICS_PORT, NAME, NAME_LABEL
from playground.kubelet.kubelet import MIRROR

Json = dict[str, Any]


def agent_pod(node: str, port: int) -> Json:
    """Return the Pod of a node's agent.

    Args:
        port: The port of the agent's metrics.
    """
    name = f"mgpu-deviceplugin-{node}"
    ports = [{"name": METRICS_PORT, "containerPort": port, "hostPort": port, "protocol": "TCP"}]
    return {
        "metadata": {
            "name": name,
            "labels": {NAME_LABEL: NAME, COMPONENT_LABEL: COMPONENT},
            "annotations": {MIRROR: hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()},
        },
        "spec": {
            "nodeName": node,
            "serviceAccountName": "mgpu-deviceplugin",
            "hostNetwork": True,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": COMPONENT, "image": "mgpu", "ports": ports}],
        },
    }


def running_at(address: str) -> Json:
    """Return the status of a Pod that is ready, with this address."""
    conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}]
    addresses = {"hostIP": address, "podIP": address, "podIPs": [{"ip": address}]}
    return {"phase": "Running", "conditions": conditions, **addresses}
