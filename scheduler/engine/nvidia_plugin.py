"""Defines how mgpu treats nodes on which the NVIDIA device plugin serves `nvidia.com/gpu`.

Such a Node has the label `mgpu.io/whole-cards=nvidia`. On it the plugin, and not mgpu, chooses the cards of pods that
request `nvidia.com/gpu`. In the ledger such a pod holds every card of the node until the node reports which cards the
pod got. Such a pod must not be placed on a node on which mgpu has given cards to other pods, because the plugin could
allocate the same cards. The decisions, the cluster cache, the MtgpuPod controller and `mgpu simulate` call this module.
"""

from collections.abc import Collection, Sequence

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.device_object import WHOLE_CARDS_LABEL
from mgpu.model.gpu_requests import GpuRequest, Rejection, RejectionKind
from mgpu.model.ledger import Holding, Ledger, Share, unknown_shares
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Node
from mgpu.model.resource_claims import DRA

NVIDIA = "nvidia"
"""The value of the label, and the dialect of the holdings of such pods."""


def is_on_node(node: Node | None) -> bool:
    """Return whether the NVIDIA device plugin serves whole cards on this node."""
    return node is not None and node.labels.get(WHOLE_CARDS_LABEL) == NVIDIA


def holding_rules(node: Node | None) -> tuple[bool, str | None]:
    """Return the properties of the node on which the holdings of its pods depend, so that changes can be detected."""
    return is_on_node(node), node.labels.get(LABEL) if node else None


def requests_nvidia_cards(request: GpuRequest | None) -> bool:
    """Return whether the NVIDIA device plugin would allocate cards to a pod with this request on a node that has it."""
    return request is not None and any(container.is_nvidia_gpu for container in request.containers)


def chooses_cards(node: Node | None, request: GpuRequest | None) -> bool:
    """Return whether the NVIDIA device plugin chooses the cards of a pod with this request on this node."""
    return is_on_node(node) and requests_nvidia_cards(request)


def needs_claim(node: Node | None, request: GpuRequest | None) -> bool:
    """Return whether kube-scheduler must create a ResourceClaim for a pod with this request before it binds it here.

    On a Node with the label `mgpu.io/whole-cards=dra` no device plugin serves `nvidia.com/gpu`.
    """
    return node is not None and node.labels.get(WHOLE_CARDS_LABEL) == DRA and requests_nvidia_cards(request)


def held_shares(request: GpuRequest | None, reported: Sequence[Share]) -> tuple[Share, ...]:
    """Return the shares that a pod holds.

    Containers get their cards one after the other. A container whose cards are not reported yet holds unknown cards.

    Args:
        reported: The shares that the node has reported for the pod.
    """
    containers = {share.container for share in reported}
    unknown = unknown_shares(request) if request else ()
    return (*reported, *(share for share in unknown if share.container not in containers))


def indexes_used_by_mgpu(ledger: Ledger, node: str, without: str = "", gpuid: str = "") -> tuple[int, ...]:
    """Return the indexes of the node's GPUs that mgpu has given to pods and that the plugin could allocate too.

    A card of MtgpuPods does not count if it was allocated to their occupy pod, because the plugin cannot allocate it
    again. MtgpuPods whose card is not known yet add no card.

    Args:
        without: The UID of a pod that does not count.
        gpuid: The GPUID of the occupy pod `without`, or "" if `without` is not an occupy pod. If the MtgpuPods of this
            GPUID have a card already, the cards of other MtgpuPods do not count. If they counted, two missing occupy
            pods would wait for each other forever.
    """
    holdings = [h for h in ledger.holdings(node) if h.dialect != NVIDIA and h.uid != without]
    occupiers = [h for h in ledger.holdings(node) if h.dialect == NVIDIA and h.occupies]
    cards = [card for card in ledger.nodes().get(node, ()) if card.type == GPU]
    users = [h for h in holdings if h.gpuid and not h.occupies]
    has_card = any(h.gpuid == gpuid and h.is_known_on(card) for h in users for card in cards)

    def could_be_allocated(holding: Holding, card: Card) -> bool:
        if holding not in users:
            return holding.uses(card).shares > 0
        is_safe = has_card or any(h.gpuid == holding.gpuid and h.is_known_on(card) for h in occupiers)
        return holding.is_known_on(card) and not is_safe

    return tuple(card.index for card in cards if any(could_be_allocated(h, card) for h in holdings))


class CardsUsedByMgpu:
    """Caches `indexes_used_by_mgpu` of each node, because a filter needs it for thousands of nodes. Not thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cached: dict[str, tuple[int, ...]] = {}

    def touch(self, node: str) -> None:
        self._cached.pop(node, None)

    def on(self, node: str, without: str = "", gpuid: str = "") -> tuple[int, ...]:
        own = self._ledger.holding(without)
        if gpuid or (own is not None and own.node == node):
            return indexes_used_by_mgpu(self._ledger, node, without, gpuid)
        if node not in self._cached:
            self._cached[node] = indexes_used_by_mgpu(self._ledger, node)
        return self._cached[node]


def rejection(request: GpuRequest, node: Node, cards: Sequence[CardState], ours: Collection[int]) -> Rejection | None:
    """Return why a pod whose cards the NVIDIA device plugin chooses must not be placed on this node, or None.

    Whether enough cards are free is not checked here, because the kubelet checks it.

    Args:
        ours: The result of `indexes_used_by_mgpu`.
    """
    unmet = request.unmet_requirement(node)
    if unmet is not None:
        return Rejection(RejectionKind.NODE_LABEL, unmet, hopeless=True)
    if request.others or not all(container.is_nvidia_gpu for container in request.containers):
        text = (
            "the NVIDIA device plugin serves nvidia.com/gpu on this node, and the pod also requests resources of mgpu"
        )
        return Rejection(RejectionKind.NVIDIA_PLUGIN, text, hopeless=True)
    constraints = request.constraints
    if constraints.same_card or (
        constraints.limits_cards and any(constraints.reason_against(state.card) for state in cards)
    ):
        text = "the NVIDIA device plugin chooses the cards on this node, and the pod has constraints on its cards"
        return Rejection(RejectionKind.NVIDIA_PLUGIN, text, hopeless=True)
    if ours:
        listed = f"card{'s' if len(ours) > 1 else ''} {', '.join(map(str, sorted(ours)))}"
        text = f"the NVIDIA device plugin on this node could allocate {listed}, which mgpu has given to other pods"
        return Rejection(RejectionKind.NVIDIA_PLUGIN, text)
    return None
