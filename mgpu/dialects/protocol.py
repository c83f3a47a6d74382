"""How a dialect names what a node offers."""

from dataclasses import dataclass

from mgpu.model.cards import GPU

SHARE = "mgpu.io/share"
"""What a container asks for that has no other resource served as ids, so that the kubelet has something to allocate."""

SHARES_PER_CARD = 16


@dataclass(frozen=True, slots=True)
class NodeResource:
    """An extended resource: (card index, amount) for every card, unhealthy ones too.

    as_ids: served by the device plugin, one device id per unit; else a number in node status, summed over healthy
    cards (docs/design/kubernetes.md, "Device manager": what has too many units cannot be ids). type: of the cards.
    """

    name: str
    amounts: tuple[tuple[int, int], ...]
    as_ids: bool
    type: str = GPU
