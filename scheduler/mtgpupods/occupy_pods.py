"""Defines occupy pods, which hold the cards of GPUIDs so that the kubelet and kube-scheduler count them as used.

The containers of MtgpuPods request no device-plugin resource. Instead, the occupy pod of their GPUID requests
`nvidia.com/gpu: 1` (docs/design/mtgpu.md, "Controller"). `node_plan` decides which occupy pods exist, and
`mtgpupod_writer` creates and deletes them. The functions are pure.
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
        ours: Whether it is an occupy pod of mgpu, and not a foreign pod of that name.
        card: The UUID of its card; None while the card is not known.
        message: The message of its first false condition with a message, or else the message of its status. It may say
            why the pod does not run. None if there is no message.
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
    """A step of the node plan that creates the occupy pod of a GPUID."""

    gpuid: str


@dataclass(frozen=True, slots=True, order=True)
class DeleteOccupyPod:
    """A step of the node plan that deletes the occupy pod of a GPUID.

    Attributes:
        force: Whether to delete it without a grace period, because the node that could end the pod is gone.
    """

    gpuid: str
    uid: str
    force: bool = False


def read_occupy_pod(raw: Mapping[str, Any], pod: Pod, card: str | None) -> OccupyPod:
    """Read a pod that has the name of an occupy pod.

    Args:
        pod: The same pod as `raw`, as `read_pod` returns it.
        card: The UUID of its card, or None while the card is not known.
    """
    return OccupyPod(pod.uid, occupy_target(pod) is not None, pod.phase, pod.deleting, card, _message(raw))


def _message(raw: Mapping[str, Any]) -> str | None:
    status = raw.get("status") or {}
    for row in status.get("conditions") or ():
        if row.get("status") == "False" and row.get("message"):
            return str(row["message"])
    return str(status["message"]) if status.get("message") else None


def manifest(node: str, gpuid: str, settings: Settings) -> dict[str, Any]:
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
    # The manifest has an affinity instead of `nodeName`, so that a scheduler binds the pod and mgpu decides its card in
    # the binding.
    this_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [this_node]}}}
    spec: dict[str, Any] = {
        "affinity": affinity,
        "automountServiceAccountToken": False,
        "containers": [container],
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 0,
        # When the node gets a taint, the Pods of MtgpuPods that tolerate it continue to run. So the occupy pod must
        # tolerate every taint, to hold the card for them.
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
