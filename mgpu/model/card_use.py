"""What is held of a node's cards, cut into slices or not, and by which dialect's pods."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.ledger import Holding
from mgpu.model.slice_names import is_slice, place_of


class CardUse(NamedTuple):
    """core: milli. memory: bytes. idle: nobody holds anything of it. shared: pods can be given parts of what is free,
    so it is neither cut nor a card of MtgpuPods.
    """

    card: Card
    core: int
    memory: int
    idle: bool
    shared: bool


def card_uses(gpus: Sequence[Card], states: Iterable[CardState]) -> tuple[CardUse, ...]:
    """Of each GPU of a node. states: of the devices that pods can be given there: whole cards, and slices of others.

    A card that is cut is used as much as its slices are.
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


def held_of(holding: Holding, devices: Sequence[Card]) -> tuple[int, int]:
    """The core (milli) and memory (bytes) that a pod holds of all these together, at its peak on each."""
    uses = [holding.uses(card) for card in _possible(holding, devices)]
    return sum(use.core for use in uses), sum(use.memory for use in uses)


def _possible(holding: Holding, devices: Sequence[Card]) -> Iterator[Card]:
    """Those that it can be on: nearly all records name cards by index, and asking every card is slow."""
    if all(isinstance(share.card, int) for share in holding.shares):
        named = {(share.type, share.card) for share in holding.shares}
        return (card for card in devices if (card.type, card.index) in named)
    return iter(devices)
