"""The Pod that runs for an MtgpuPod, as the controller finds it (docs/design/mtgpu.md, "Controller")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects.mtgpu import card_of


@dataclass(frozen=True, slots=True)
class Made:
    """An MtgpuPod's own Pod. card: the UUID in its environment."""

    uid: str
    phase: str = "Pending"
    deleting: bool = False
    card: str = ""

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def made_for(raw: Mapping[str, Any], uid: str, pod_uid: str) -> bool:
    """Whether a Pod of an MtgpuPod's name was made for it, also after `kubectl delete --cascade=orphan`, which takes
    its owner off. uid: the MtgpuPod's. pod_uid: of the Pod that its status names, or "".
    """
    meta = raw["metadata"]
    owned = any(owner.get("uid") == uid and owner.get("controller") for owner in meta.get("ownerReferences") or ())
    return (bool(uid) and owned) or (bool(pod_uid) and meta.get("uid") == pod_uid)


def read_made(raw: Mapping[str, Any]) -> Made:
    meta, status = raw["metadata"], raw.get("status") or {}
    phase, deleting = status.get("phase") or "Pending", bool(meta.get("deletionTimestamp"))
    return Made(meta.get("uid") or "", phase, deleting, card_of(raw))


def interrupted(raw: Mapping[str, Any]) -> bool:
    """Whether somebody deletes this Pod, so that it ends by that if it ends now: the kubelet gives a Pod its last phase
    before a deletion comes through (Kubernetes 1.27 on), pod-gc does before it deletes those of a node that is gone.
    """
    rows = (raw.get("status") or {}).get("conditions") or ()
    return bool(raw["metadata"].get("deletionTimestamp")) or any(
        (row.get("type"), row.get("status"), row.get("reason")) == ("DisruptionTarget", "True", "DeletionByPodGC")
        for row in rows
    )
