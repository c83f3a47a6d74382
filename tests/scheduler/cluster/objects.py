"""What the tests of the cluster cache share: pods with allocation records, and what nodes report."""

import json
from typing import Any

from tests.scheduler.fake import FakeApi, Replica

Raw = dict[str, Any]
INDEX = "vke.volcengine.com/gpu-index-container-c"
ASSUMED = "vke.volcengine.com/assumed"
CHECKPOINTS = "node.koordinator.sh/devices-checkpoints"


def record(cards: str = "0") -> dict[str, str]:
    """Return the allocation record of a pod with the container `c`."""
    return {ASSUMED: "true", INDEX: cards}


def put(replica: Replica, *pods: Raw) -> None:
    """Add or modify pods, and deliver the events."""
    for raw in pods:
        replica.api.put("pods", raw)
    replica.deliver()


def core_free(replica: Replica, node: str = "n1") -> list[int]:
    return [state.core_free for state in replica.state.node_snapshot(node, "").cards]


def given_row(uid: str = "uid-old", *cards: str) -> Raw:
    """Return a row of a Device that says which cards the kubelet gave to a pod."""
    ids = list(cards or ("GPU-n1-0",))
    return {"podUID": uid, "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ids}


def report(api: FakeApi, *rows: Raw, node: str = "n1") -> None:
    """Make the Device of a node list these rows."""
    device = json.loads(json.dumps(api.devices[node]))
    device["metadata"]["annotations"] = {CHECKPOINTS: json.dumps(rows)}
    api.put("devices", device)
