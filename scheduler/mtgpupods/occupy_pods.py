"""Occupy pods, which hold the cards of GPUIDs so that the kubelet and kube-scheduler count them as used. Pure.

The containers of MtgpuPods request no device-plugin resource. Instead, the occupy pod of their GPUID requests
`nvidia.com/gpu: 1` (docs/design/mtgpu.md, "Controller"). The node plan decides which occupy pods exist, the writer
creates and deletes them, and `mgpu simulate` uses the same manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects.mtgpu import OCCUPY_LABEL, OCCUPY_NAMESPACE, occupy_name, occupy_target
from mgpu.model.pods import Pod
from mgpu.settings import Settings


@dataclass(frozen=True, slots=True)
class OccupyPod:
    """A pod that has the name of a GPUID's occupy pod.

    Attributes:
        ours: whether it is an occupy pod, and not a foreign pod of that name.
        card: UUID of its card; None while that is not known.
        message: the reason in its conditions why it does not run, or None.
    """

    uid: str
    ours: bool = True
    phase: str = "Pending"
    deleting: bool = False
    card: str | None = None
    message: str | None = None

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
class CreateOccupyPod:
    """A step of the node plan."""

    gpuid: str


@dataclass(frozen=True, slots=True, order=True)
class DeleteOccupyPod:
    """A step of the node plan.

    Attributes:
        force: delete without grace period, because the node that could end the pod is gone.
    """

    gpuid: str
    uid: str
    force: bool = False


def read_occupy_pod(raw: Mapping[str, Any], pod: Pod, card: str | None) -> OccupyPod:
    """Read a pod that has the name of an occupy pod.

    Args:
        pod: the same pod, as `read_pod` returns it.
        card: UUID of its card, if that is known.
    """
    return OccupyPod(pod.uid, occupy_target(pod) is not None, pod.phase, pod.deleting, card, _message(raw))


def _message(raw: Mapping[str, Any]) -> str | None:
    status = raw.get("status") or {}
    for row in status.get("conditions") or ():
        if row.get("status") == "False" and row.get("message"):
            return str(row["message"])
    return str(status["message"]) if status.get("message") else None


def manifest(node: str, gpuid: str, settings: Settings) -> dict[str, Any]:
    """Return the manifest of the occupy pod of a GPUID."""
    mtgpu = settings.dialects.mtgpu
    one_card = {"nvidia.com/gpu": "1"}
    container = {
        "name": "occupy",
        "image": mtgpu.occupy_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": dict(one_card), "limits": dict(one_card)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    # Affinity and not `nodeName`: kube-scheduler then counts the pod, and mgpu decides its card in its binding.
    this_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [this_node]}}}
    spec: dict[str, Any] = {
        "affinity": affinity,
        "automountServiceAccountToken": False,
        "containers": [container],
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 0,
        # The card stays in use when the node is tainted, because MtgpuPods that tolerate the taint run on.
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
