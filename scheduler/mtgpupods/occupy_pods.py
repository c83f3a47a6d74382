"""Occupy pods: each keeps a card for a GPUID, from the kubelet and from everybody who counts `nvidia.com/gpu`.

Source: docs/design/mtgpu.md, "Controller".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects.mtgpu import OCCUPY_LABEL, OCCUPY_NAMESPACE, occupied, occupy_name
from mgpu.model.pods import Pod
from mgpu.settings import Settings


@dataclass(frozen=True, slots=True)
class Occupy:
    """A pod that has the name of a GPUID's occupy pod. ours: it is one; else somebody else has taken the name.

    card: its UUID, "" while that is not known. message: why it does not run, where its conditions say so.
    """

    uid: str
    ours: bool = True
    phase: str = "Pending"
    deleting: bool = False
    card: str = ""
    message: str = ""

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def alive(self) -> bool:
        return self.ours and not self.deleting and not self.ended

    @property
    def running(self) -> bool:
        return self.alive and self.phase == "Running"


@dataclass(frozen=True, slots=True, order=True)
class Create:
    """The occupy pod of this GPUID shall be made."""

    gpuid: str


@dataclass(frozen=True, slots=True, order=True)
class Delete:
    """This occupy pod shall go; force: without grace, since its node is gone."""

    gpuid: str
    uid: str
    force: bool = False


def read_occupy(raw: Mapping[str, Any], pod: Pod, card: str) -> Occupy:
    """A pod (`raw`, and as read) that has an occupy pod's name. card: the UUID of the one that it was given, or ""."""
    ours = occupied(pod) is not None
    return Occupy(pod.uid, ours, pod.phase, pod.deleting, card, _why(raw))


def _why(raw: Mapping[str, Any]) -> str:
    """What its conditions say of why it does not run."""
    status = raw.get("status") or {}
    for row in status.get("conditions") or ():
        if row.get("status") == "False" and row.get("message"):
            return str(row["message"])
    return str(status.get("message") or "")


def manifest(node: str, gpuid: str, settings: Settings) -> dict[str, Any]:
    """The occupy pod of a GPUID, for the API server.

    It is pinned by affinity and not by `nodeName`, so that the scheduler counts it and mgpu decides its card in its
    binding; it tolerates everything, since its card is in use whatever the node's taints.
    """
    mtgpu, one = settings.dialects.mtgpu, {"nvidia.com/gpu": "1"}
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}}
    container = {
        "name": "occupy",
        "image": mtgpu.occupy_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": dict(one), "limits": dict(one)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec: dict[str, Any] = {
        "affinity": affinity,
        "automountServiceAccountToken": False,
        "containers": [container],
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
    }
    if mtgpu.occupy_priority_class:
        spec["priorityClassName"] = mtgpu.occupy_priority_class
    meta = {
        "namespace": OCCUPY_NAMESPACE,
        "name": occupy_name(node, gpuid),
        "labels": {OCCUPY_LABEL: gpuid, "app.kubernetes.io/managed-by": "mgpu"},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
