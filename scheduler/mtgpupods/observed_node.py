"""Defines the input of the node plan: the observed state of the MtgpuPods of one node.

`observation.observe` creates it from the ClusterCache, and `mgpu simulate` from its input. The node plan must not
depend on anything else. If it needs more data, add a field to `ObservedNode`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mgpu.dialects.mtgpu import MtgpuPod, visible_card
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from scheduler.cluster.gpuids import GpuidLimit
from scheduler.mtgpupods.occupy_pods import OccupyPod

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnreadableMtgpuPod:
    """An invalid MtgpuPod.

    Attributes:
        key: The namespace and the name, as `namespace/name`.
        problems: The fields that break a rule, and the rules.
    """

    uid: str
    key: str
    problems: str
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """The Pod that the controller created for an MtgpuPod.

    Attributes:
        card: The UUID of the card that the environment of its containers names, or None.
    """

    uid: str
    phase: str = "Pending"
    deleting: bool = False
    card: str | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """The MtgpuPods of a node and everything that a plan for them depends on, at one moment.

    Attributes:
        pods: The valid MtgpuPods of the node.
        cards: The GPUs of the node that are not partitioned.
        held: The holdings of all pods on the node, in any vocabulary.
        exists: Whether there is a Node of this name. MtgpuPods may outlive their Node.
        unschedulable: Whether the node is cordoned.
        nvidia_plugin: Whether the NVIDIA device plugin, and not mgpu, chooses the cards of occupy pods.
        untolerated: By the UID of the MtgpuPod, a taint of the node that the MtgpuPod does not tolerate.
        unreadable: The invalid MtgpuPods. The cards that they hold are among the holdings.
        owned_pods: The Pods that were created for MtgpuPods, by the UID of the MtgpuPod.
        name_conflicts: The UIDs of the MtgpuPods whose name is taken by a Pod that was not created for them.
        occupy_pods: By GPUID, the pod that has the name of the GPUID's occupy pod.
        reservations: By UID, the holdings of MtgpuPods that were assigned a card earlier and are not bound yet.
        gpuid_limit: The limit of GPUIDs for each namespace; None means without limit.
        held_up: The namespaces whose MtgpuPods get no card and no Pod while remnants of these namespaces run.
        remnant_gpuids: By UID, the GPUID of each remnant of an MtgpuPod.
    """

    name: str
    pods: tuple[MtgpuPod, ...] = ()
    cards: tuple[Card, ...] = ()
    held: tuple[Holding, ...] = ()
    exists: bool = True
    unschedulable: bool = False
    nvidia_plugin: bool = False
    untolerated: Mapping[str, str] = field(default_factory=dict)
    unreadable: tuple[UnreadableMtgpuPod, ...] = ()
    owned_pods: Mapping[str, OwnedPod] = field(default_factory=dict)
    name_conflicts: frozenset[str] = frozenset()
    occupy_pods: Mapping[str, OccupyPod] = field(default_factory=dict)
    reservations: Mapping[str, Holding] = field(default_factory=dict)
    gpuid_limit: GpuidLimit | None = None
    held_up: frozenset[str] = frozenset()
    remnant_gpuids: Mapping[str, str] = field(default_factory=dict)

    def card_of(self, pod: MtgpuPod) -> str | None:
        """Return the UUID of the card that the MtgpuPod has, or None.

        If its status contains no card, for example after a restore from a backup, the environment of its Pod counts.
        """
        owned = self.owned_pods.get(pod.uid)
        return pod.card_uuid or (owned.card if owned else None) or None

    def holds(self, pod: MtgpuPod) -> bool:
        """Return whether the MtgpuPod holds a card: it has one, and either it or its Pod has not ended."""
        owned = self.owned_pods.get(pod.uid)
        is_running = owned is not None and not owned.ended
        return self.card_of(pod) is not None and (is_running or not pod.ended)

    def card(self, uuid: str | None) -> Card | None:
        return next((card for card in self.cards if card.uuid == uuid), None)


def is_owned(pod: Raw, uid: str, pod_uid: str) -> bool:
    """Return whether this Pod, which has the name of an MtgpuPod, was created for it.

    Its owner reference or the status of the MtgpuPod shows that. The reference alone does not suffice, because `kubectl
    delete --cascade=orphan` removes it.

    Args:
        uid: The UID of the MtgpuPod.
        pod_uid: The UID of the Pod in the status of the MtgpuPod, or "" if the status contains none.
    """
    meta = pod["metadata"]
    owners = meta.get("ownerReferences") or ()
    has_owner = any(owner.get("uid") == uid and owner.get("controller") for owner in owners)
    return (bool(uid) and has_owner) or (bool(pod_uid) and meta.get("uid") == pod_uid)


def read_owned_pod(raw: Raw) -> OwnedPod:
    meta = raw["metadata"]
    phase = (raw.get("status") or {}).get("phase") or "Pending"
    return OwnedPod(meta.get("uid") or "", phase, bool(meta.get("deletionTimestamp")), visible_card(raw))


def is_interrupted(raw: Raw) -> bool:
    """Return whether this Pod ended because it is being deleted, and not because its work is done.

    Since Kubernetes 1.27 the kubelet writes a final phase before the deletion of a Pod completes. The pod garbage
    collector does the same before it deletes the Pods of a node that is gone, and adds a condition.
    """
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return bool(raw["metadata"].get("deletionTimestamp")) or any(
        (row.get("type"), row.get("status"), row.get("reason")) == ("DisruptionTarget", "True", "DeletionByPodGC")
        for row in conditions
    )
