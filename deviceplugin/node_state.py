"""The parts of the agent that observe its node: the cards, the pods, the kubelet and the API server.

`deviceplugin.agent` creates one `NodeState`, and connects the rest of the agent with its parts. The order of
construction follows the dependencies, so no part refers to one that is created later. The card watch and the cache of
pods publish their changes through `NodeState.changes`, and `deviceplugin.agent` subscribes the readers.
"""

from functools import partial
from pathlib import Path
from typing import Any

from deviceplugin.allocation.whole_cards import WholeCards
from deviceplugin.cards import CardSource
from deviceplugin.cards.card_watch import CardWatch
from deviceplugin.changes import Change, Changes
from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.dra.claim_users import ClaimUsers
from deviceplugin.dra.prepared_claims import make_prepared_claims
from deviceplugin.event_loop import Wakeup
from deviceplugin.inventory.node_objects import NodeObjects
from deviceplugin.inventory.offers import WHOLE_CARDS, names_of_memory, status_amounts
from deviceplugin.kubelet.checkpoint import FILE
from deviceplugin.kubelet.pod_resources import PodResources, pod_resources_socket
from deviceplugin.metrics import CardHoldings
from deviceplugin.node_devices import NodeDevices
from deviceplugin.node_events import NodeEvents
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.pods.capacity_check import Grants, holding, read_delivered
from deviceplugin.pods.container_runtime import ContainerRuntime
from deviceplugin.pods.freed_amounts import freed_amount
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import Receipts
from deviceplugin.pods.remnants import Remnants
from deviceplugin.pods.slice_usage import Environments
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.kube import Api
from mgpu.kube.events import Recorder
from mgpu.kube.reflector import Reflector
from mgpu.model.ledger import Holding
from mgpu.settings import Settings


class NodeState:
    """The parts of one agent that observe its node.

    The docstring of each part's class says from which threads it may be used.

    Attributes:
        checkpoint: The checkpoint file of the kubelet's device manager.
        changes: The events between the parts of the agent.
        cards_changed: A signal that wakes coroutines when cards or partitions change.
        pods_changed: A signal that wakes coroutines when pods, cards, partitions or remnants change.
        devices: The GPUs and the slices, combined from `cards` and `partitions`.
        whole_cards: The server of whole cards, and the cards that pods have from another plugin or without a record.
        claims: The ResourceClaims that hold cards; empty unless `dra.enabled` is true.
        claim_users: The pods that use claims; empty unless `dra.enabled` is true.
    """

    def __init__(
        self, settings: Settings, objects: NodeObjects, source: CardSource, api: Api, records: RecordVerifier
    ) -> None:
        own = settings.deviceplugin
        self.settings = settings
        self._of_memory = names_of_memory(settings)
        self.objects = objects
        self.plugin_folder = Path(own.kubelet_dir) / "device-plugins"
        self.checkpoint = self.plugin_folder / FILE
        self.cdi_files = CdiFiles(Path(own.cdi_dir))
        self.changes = Changes()
        self.cards_changed = Wakeup()
        self.pods_changed = Wakeup()
        self.events = NodeEvents(Recorder(api, "mgpu-deviceplugin", own.node), own.node)
        self.cards = CardWatch(source, partial(self.changes.publish, Change.CARDS), self.events.warn_node)
        self.partitions = NodePartitions(enabled=settings.dialects.slices.enabled)
        self.devices = NodeDevices(self.cards, self.partitions)
        self.pods = NodePods(settings, partial(self.changes.publish, Change.PODS), records)
        query = {"fieldSelector": f"spec.nodeName={own.node}"}
        self.claims = make_prepared_claims(own, self.pods_changed.wake, lambda: self.devices.gpus())
        self.claim_users = ClaimUsers(self.pods_changed.wake)
        self.pod_watch = Reflector(api, "/api/v1/pods", self._take_pod, self._drop_pod, query)
        self.pod_resources = PodResources(pod_resources_socket(own))
        self.runtime = ContainerRuntime(Path(own.cri_socket) if own.cri_socket else None)
        self.remnants = Remnants(Receipts(Path(own.cdi_dir)), self.pods, self.runtime, self.pods_changed)
        self.grants = Grants({})
        self.whole_cards = WholeCards(
            own.whole_cards,
            self.plugin_folder,
            self.pods,
            self.pod_resources,
            UnrecordedPods(self.runtime, self.pods, self.cards, self.grants, self.partitions),
            partial(objects.capacity, WHOLE_CARDS),
        )

    @property
    def node(self) -> str:
        return self.settings.deviceplugin.node

    def _take_pod(self, raw: dict[str, Any]) -> None:
        if self.settings.dra.enabled:
            self.claim_users.take(raw)
        self.pods.take(raw)

    def _drop_pod(self, raw: dict[str, Any]) -> None:
        self.claim_users.drop(raw)
        self.pods.drop(raw)

    # What the isolation back ends and the removal of old data ask about pods, they also ask about claims.

    def is_active(self, uid: str) -> bool:
        """Return whether this is a pod that has not ended, or a claim that holds cards."""
        return self.claims.is_active(uid) or self.pods.is_active(uid)

    def environments(self) -> Environments:
        """Return the environments in the CDI files of containers and of claims."""
        return {**self.cdi_files.environments(), **self.claims.environments()}

    def uids(self) -> frozenset[str]:
        """Return the UIDs of remnants and of claims."""
        return frozenset((*self.remnants.uids(), *self.claims.uids()))

    @property
    def removed(self) -> int:
        """A number that grows whenever a remnant has ended or a claim has been removed."""
        return self.remnants.removed + self.claims.removed

    def recover_grants(self) -> None:
        """Read from the CDI files, if the runtime has CDI, which cards agents have delivered to containers."""
        if self.settings.deviceplugin.cdi:
            self.grants.recover(read_delivered(self.cdi_files.environments()))

    def freed_amount(self, resource: str) -> int:
        """Return how much of a resource resized pods have freed. Thread-safe."""
        if resource not in self._of_memory:
            return 0
        return freed_amount(resource, self.pods.all(), self.devices.gpus())

    def offers_freed_amounts(self) -> bool:
        """Return whether the status of the Node has what resized pods have freed. Thread-safe.

        Device ids are not compared: the kubelet knows them as soon as they are offered, and reports them later.
        """
        amounts = status_amounts(self.devices.whole() or (), self.settings)
        return all(
            (self.objects.capacity(name) or 0) >= amounts[name] + freed
            for name in sorted(self._of_memory & amounts.keys())
            if (freed := self.freed_amount(name))
        )

    def card_holdings(self) -> CardHoldings:
        """Return the cards, and what pods and claims hold of them. Thread-safe."""
        of_pods = self.pod_holdings()
        return CardHoldings(self.devices.gpus(), self.devices.devices(), (*of_pods, *self.claims.holdings()))

    def pod_holdings(self) -> tuple[Holding, ...]:
        """Return what pods hold without claims, and remnants. Thread-safe."""
        devices = self.devices.devices()
        # Unrecorded pods, pods with cards from another plugin, and remnants.
        unrecorded = (*self.whole_cards.holdings(), *self.remnants.holdings())
        unrecorded_uids = {held.uid for held in unrecorded}
        recorded = [
            holding(gpu_pod, devices)
            for gpu_pod in self.pods.all()
            if gpu_pod.shares is not None and not gpu_pod.pod.ended and gpu_pod.pod.uid not in unrecorded_uids
        ]
        return (*recorded, *unrecorded)
