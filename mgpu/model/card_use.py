"""Computes how much of each card of a node is used, whether the card is partitioned or not.

The ledger has no state for a partitioned card, but one for each of its slices. The metrics of the scheduler and of the
agents report whole cards, so they use this module.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.ledger import Holding
from mgpu.model.slice_names import is_slice, place_of


class CardUse(NamedTuple):
    """How much of one card is used.

    Attributes:
        core: the used core, in thousandths of a card.
        memory: the used memory, in bytes.
        idle: whether no pod holds any part of the card.
        shared: whether pods can get parts of the card, because it is neither partitioned nor used by MtgpuPods.
    """

    card: Card
    core: int
    memory: int
    idle: bool
    shared: bool


def card_uses(gpus: Sequence[Card], states: Iterable[CardState]) -> tuple[CardUse, ...]:
    """Return the use of each GPU of a node. For a partitioned card it is the sum over its slices.

    Args:
        states: the states of unpartitioned cards and of slices.
    """
    whole: dict[int, CardState] = {}
    sliced: dict[int, list[CardState]] = {}
    for state in states:
        if state.card.type == GPU:
            whole[state.card.index] = state
        elif is_slice(state.card.type):
            sliced.setdefault(place_of(state.card.index)[0], []).append(state)
    return tuple(_use(card, whole.get(card.index), sliced.get(card.index, ())) for card in gpus)


def _use(card: Card, state: CardState | None, slices: Sequence[CardState]) -> CardUse:
    held = [state] if state else list(slices)
    core, memory = sum(s.core_used for s in held), sum(s.memory_used for s in held)
    return CardUse(card, core, memory, all(s.idle for s in held), state is not None and not state.gpuid)


def held_amounts(holding: Holding, devices: Sequence[Card]) -> tuple[int, int]:
    """Return the core (in thousandths of a card) and the memory (in bytes) that a pod holds of these devices in total.

    Of each device, the pod holds the most that it needs at any time (`mgpu.model.gpu_requests.peak`).
    """
    uses = [holding.uses(card) for card in _candidates(holding, devices)]
    return sum(use.core for use in uses), sum(use.memory for use in uses)


def _candidates(holding: Holding, devices: Sequence[Card]) -> Iterator[Card]:
    """Return the devices that the holding may contain.

    Nearly all allocation records name cards by index. Such devices are looked up in a set, which is faster than
    `Share.is_on` for each share and device.
    """
    if all(isinstance(share.card, int) for share in holding.shares):
        named = {(share.type, share.card) for share in holding.shares}
        return (card for card in devices if (card.type, card.index) in named)
    return iter(devices)
