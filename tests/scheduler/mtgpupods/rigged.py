"""What tests of the controller ask of a rig, and what they do to it."""

from collections.abc import Callable
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError
from tests import builders as b
from tests.mtgpu_cluster import Raw
from tests.mtgpu_rig import PODS, Rig


def bound(rig: Rig, name: str) -> tuple[str, str, str]:
    """Of its condition Bound the status and reason, and its card."""
    status = rig.item(name).get("status") or {}
    row = condition(rig, name, "Bound")
    return row.get("status", ""), row.get("reason", ""), status.get("BoundDeviceID", "")


def condition(rig: Rig, name: str, type: str) -> dict[str, Any]:
    rows = (rig.item(name).get("status") or {}).get("conditions") or ()
    return next((row for row in rows if row["type"] == type), {})


def own(rig: Rig, name: str) -> Raw:
    found = rig.pod(name)
    assert found is not None
    return found


def names(rig: Rig, resource: str = PODS) -> list[str]:
    return [raw["metadata"]["name"] for raw in rig.cluster.all(resource)]


def refusing(verb: str, part: str, error: ApiError) -> Callable[[str, str], None]:
    def refuse(asked: str, path: str) -> None:
        if asked == verb and part in path:
            raise error

    return refuse


def pooled(name: str, core: int = 80, node: str = "n1") -> Raw:
    raw = b.share(name, core)
    return {**raw, "metadata": {**raw["metadata"], "labels": {"test/node": node}}}


def lacks_all(rig: Rig, name: str) -> bool:
    return rig.pod(name) is None and not [raw for raw in rig.cluster.all(PODS) if mtgpu.OCCUPY_LABEL in str(raw)]
