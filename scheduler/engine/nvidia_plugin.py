"""Nodes where the NVIDIA device plugin serves `nvidia.com/gpu`, as a label of the Node says.

That plugin chooses among its free cards by itself. So mgpu does not decide the cards of such a pod, holds every card of
the node for it until the node reports which ones it got, and shares out none of these. For the same reason such a pod
is kept off nodes where a card carries shares of mgpu: the plugin could allocate that card.
"""

from collections.abc import Collection, Sequence

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.device_object import WHOLE_CARDS_LABEL
from mgpu.model.gpu_requests import GpuRequest, Rejection, RejectionKind
from mgpu.model.ledger import Holding, Ledger, Share, unknown_shares
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Node

NVIDIA = "nvidia"
"""The label's value, and the dialect of what is held for such pods."""


def is_on_node(node: Node | None) -> bool:
    return node is not None and node.labels.get(WHOLE_CARDS_LABEL) == NVIDIA


def holding_rules(node: Node | None) -> tuple[bool, str | None]:
    """Return what of a node decides how the holdings of its pods are kept."""
    return is_on_node(node), node.labels.get(LABEL) if node else None


def requests_nvidia_cards(request: GpuRequest | None) -> bool:
    """Return whether the NVIDIA device plugin, on nodes that have it, allocates cards to a pod with this request."""
    return request is not None and any(container.is_nvidia_gpu for container in request.containers)


def chooses_cards(node: Node | None, request: GpuRequest | None) -> bool:
    """Return whether the NVIDIA device plugin chooses the cards of a pod with this request on this node."""
    return is_on_node(node) and requests_nvidia_cards(request)


def held(request: GpuRequest | None, given: Sequence[Share]) -> tuple[Share, ...]:
    """What is held for a pod that was given cards so: its containers are served one by one, and the node may not have
    told of the last ones yet.
    """
    told = {share.container for share in given}
    return (*given, *(share for share in (unknown_shares(request) if request else ()) if share.container not in told))


def indexes_used_by_mgpu(ledger: Ledger, node: str, without: str = "", gpuid: str = "") -> tuple[int, ...]:
    """The indexes of the GPUs of a node that mgpu gave to pods other than `without`, and that NVIDIA's plugin could
    give out: not the card of MtgpuPods whose occupy pod was given it.

    gpuid: `without` is the occupy pod of this one. Where its MtgpuPods have a card already, it is to come back, and
    other MtgpuPods' cards do not keep it away: two that are missing would wait for each other for ever. Those that have
    been admitted to a card which nobody knows yet are on none.
    """
    held = [h for h in ledger.holdings(node) if h.dialect != NVIDIA and h.uid != without]
    kept = [h for h in ledger.holdings(node) if h.dialect == NVIDIA and h.occupies]
    cards = [card for card in ledger.nodes().get(node, ()) if card.type == GPU]
    users = [h for h in held if h.gpuid and not h.occupies]
    comes_back = any(h.gpuid == gpuid and h.is_known_on(card) for h in users for card in cards)

    def could_be_given(holding: Holding, card: Card) -> bool:
        if holding not in users:
            return holding.uses(card).shares > 0
        safe = comes_back or any(h.gpuid == holding.gpuid and h.is_known_on(card) for h in kept)
        return holding.is_known_on(card) and not safe

    return tuple(card.index for card in cards if any(could_be_given(h, card) for h in held))


class CardsUsedByMgpu:
    """The same of each node, kept while nothing changes there: a filter asks it of thousands. Not thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: dict[str, tuple[int, ...]] = {}

    def touch(self, node: str) -> None:
        """Something has changed there."""
        self._kept.pop(node, None)

    def on(self, node: str, without: str = "", gpuid: str = "") -> tuple[int, ...]:
        own = self._ledger.holding(without)
        if gpuid or (own is not None and own.node == node):
            return indexes_used_by_mgpu(self._ledger, node, without, gpuid)
        if node not in self._kept:
            self._kept[node] = indexes_used_by_mgpu(self._ledger, node)
        return self._kept[node]


def refusal(request: GpuRequest, node: Node, cards: Sequence[CardState], ours: Collection[int]) -> Rejection | None:
    """Return why a pod whose cards the NVIDIA device plugin chooses must not be placed here, or None.

    Whether enough are free is the kubelet's own count. ours: the indexes of the cards that mgpu has given to others.
    """
    unmet = request.unmet_requirement(node)
    if unmet is not None:
        return Rejection(RejectionKind.NODE_LABEL, unmet, hopeless=True)
    if request.others or not all(container.is_nvidia_gpu for container in request.containers):
        text = "NVIDIA's plugin serves nvidia.com/gpu on this node, and the pod asks for more of mgpu than that"
        return Rejection(RejectionKind.NVIDIA_PLUGIN, text, hopeless=True)
    constraints = request.constraints
    if constraints.same_card or (
        constraints.limits_cards and any(constraints.reason_against(state.card) for state in cards)
    ):
        text = "NVIDIA's plugin chooses the cards on this node, and the pod wishes for certain ones"
        return Rejection(RejectionKind.NVIDIA_PLUGIN, text, hopeless=True)
    if ours:
        listed = f"card{'s' if len(ours) > 1 else ''} {', '.join(map(str, sorted(ours)))}"
        text = f"NVIDIA's plugin on this node could give out {listed}, where pods of mgpu are"
        return Rejection(RejectionKind.NVIDIA_PLUGIN, text)
    return None
