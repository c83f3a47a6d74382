"""What is seen of the MtgpuPods of one node."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from scheduler.cluster.gpuids import Bound
from scheduler.mtgpupods.occupy_pods import Occupy
from scheduler.mtgpupods.owned_pods import Made


@dataclass(frozen=True, slots=True)
class Broken:
    """An MtgpuPod that cannot be read. problems: why. What it is known to hold is among the holdings."""

    uid: str
    key: str
    problems: str
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything about the MtgpuPods of one node at one moment.

    present: there is such a Node. stock: NVIDIA's plugin chooses the card of an occupy pod
    (scheduler/engine/nvidia_plugin.py).
    pods: its MtgpuPods. cards: its GPUs that pods can be given. held: what anybody holds of them now.
    untolerated: by uid, the taint of the node that would end an MtgpuPod's Pod, for those that have one.
    made: by the MtgpuPod's uid, its own Pod. conflicts: those whose name a Pod has that is not theirs.
    occupies: by GPUID, what has the name of its occupy pod. admitted: what those hold that have a reservation, and no
    BoundDeviceID yet. bound: of the GPUIDs that a namespace may use; None: it may use any number. held_up: the
    namespaces whose pods were deleted by force and still run. remnants: by uid, the GPUIDs of deleted
    Pods that still run.
    """

    node: str
    pods: tuple[MtgpuPod, ...] = ()
    cards: tuple[Card, ...] = ()
    held: tuple[Holding, ...] = ()
    present: bool = True
    unschedulable: bool = False
    stock: bool = False
    untolerated: Mapping[str, str] = field(default_factory=dict)
    broken: tuple[Broken, ...] = ()
    made: Mapping[str, Made] = field(default_factory=dict)
    conflicts: frozenset[str] = frozenset()
    occupies: Mapping[str, Occupy] = field(default_factory=dict)
    admitted: Mapping[str, Holding] = field(default_factory=dict)
    bound: Bound | None = None
    held_up: frozenset[str] = frozenset()
    remnants: Mapping[str, str] = field(default_factory=dict)

    def card_of(self, pod: MtgpuPod) -> str:
        """The UUID of the card that it was given, "" before. What its Pod has counts where its status was lost."""
        made = self.made.get(pod.uid)
        return pod.bound or (made.card if made else "")

    def holds(self, pod: MtgpuPod) -> bool:
        """Whether it keeps its card: from BoundDeviceID on, until it has ended and its Pod too."""
        made = self.made.get(pod.uid)
        return bool(self.card_of(pod)) and (not pod.ended or (made is not None and not made.ended))

    def card(self, uuid: str) -> Card | None:
        return next((card for card in self.cards if card.uuid == uuid), None)
