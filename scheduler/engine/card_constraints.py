"""What a pod's constraints mean for the cards of a node, and whether a placement that was made earlier still holds."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import CardState, of_type
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind, peak
from mgpu.model.groups import Seat, where
from mgpu.model.ledger import Share
from scheduler.engine.node_fit import HIGHEST

Score = TypeVar("Score", int, npt.NDArray[np.int64])

_FRESH = HIGHEST // 2
"""The least score of a node that gives the pod cards without others of its spread group; below it are the others."""


class Exclusion(NamedTuple):
    """Why a card is excluded for a pod regardless of what is free on it."""

    reason: str
    kind: RejectionKind = RejectionKind.CONSTRAINT


IN_USE_BY_MTGPUPODS = Exclusion("in use by MtgpuPods", RejectionKind.MTGPUPODS)
"""Of a card with a GPUID. The text leaves the GPUID out: thousands of nodes must not give thousands of reasons."""


def exclusions(request: GpuRequest, cards: Sequence[CardState]) -> list[Exclusion | None]:
    """Return for each card why it is excluded for this pod, or None where it is not.

    A card is excluded where MtgpuPods use it (it has a GPUID), or where the pod's constraints do not allow it. No pod
    is evicted to free a card with a GPUID: the MtgpuPod controller would create the pods of the GPUID on it again.
    """
    in_use = [IN_USE_BY_MTGPUPODS if state.gpuid else None for state in cards]
    constraints = request.constraints
    if not constraints.limits_cards and constraints.same_card is None:
        return in_use
    group = constraints.same_card
    here = group is not None and any(group in state.groups for state in cards)
    other = Exclusion(f"{group} is on another card")

    def by_constraints(state: CardState) -> Exclusion | None:
        reason = constraints.bar(state.card)
        if reason is not None:
            return Exclusion(reason)
        return other if here and group not in state.groups else None

    return [found or by_constraints(state) for found, state in zip(in_use, cards, strict=True)]


def crowded(request: GpuRequest, cards: Sequence[CardState]) -> list[bool]:
    """Per card whether a pod of the ask's spread group holds a share of it."""
    return [request.constraints.spread in state.groups for state in cards]


def elsewhere(request: GpuRequest, cards: Sequence[CardState], seats: Sequence[Seat]) -> Rejection | None:
    """The ask's same-card group is on a card, `seats`, and on none of these; no eviction here changes that.

    A group that is on several cards, which nothing mgpu decides leads to, goes on where it is: its pods may take any
    of them, and no further one. Where it is not known which card of a node it holds, they wait.
    """
    group = request.constraints.same_card
    if group is None or not seats or any(group in state.groups for state in cards):
        return None
    return Rejection(RejectionKind.CONSTRAINT, f"{group} is on {where(seats)}", hopeless=True)


def fresh_first(score: int, request: GpuRequest, placement: Placement, cards: Sequence[CardState]) -> int:
    """A node's score, 0..10, so that nodes with cards without others of the spread group come before all without."""
    if request.constraints.spread is None:
        return score
    return behind(score) if beside_others(request, placement, cards) else fresh(score)


def beside_others(request: GpuRequest, placement: Placement, cards: Sequence[CardState]) -> bool:
    """Whether the placement takes a card that a pod of the ask's spread group is on."""
    group = request.constraints.spread
    taken = {index for _, chosen in placement.containers for index in chosen}
    return group is not None and any(group in state.groups for state in cards if state.card.index in taken)


def fresh(score: Score) -> Score:
    """`fresh_first` of a node that gives the pod cards without others of its spread group."""
    return _FRESH + score * (HIGHEST - _FRESH) // HIGHEST


def behind(score: Score) -> Score:
    """`fresh_first` of the other nodes."""
    return score * (_FRESH - 1) // HIGHEST


def stands(request: GpuRequest, shares: Sequence[Share], cards: Sequence[CardState]) -> bool:
    """Whether these shares of a pod with this ask are on cards that are there, healthy, not out for it, and have room.

    cards: the node's devices of all types, without what the pod itself holds. A slice may be in use by what its node,
    not mgpu, gave it to.
    """
    gpus = of_type(cards)
    out: set[tuple[str, object]] = {
        (s.card.type, s.card.index) for s, out in zip(gpus, exclusions(request, gpus), strict=True) if out
    }
    there: dict[tuple[str, object], CardState] = {(s.card.type, s.card.index): s for s in cards if s.card.healthy}
    for place in dict.fromkeys((share.type, share.card) for share in shares):
        state = None if place in out else there.get(place)
        if state is None:
            return False
        on_it = [share for share in shares if (share.type, share.card) == place]
        used = peak((share.stage, share.amount(state.card)) for share in on_it)
        full = request.max_shares and state.shares + used.shares > request.max_shares
        short = used.core > state.core_free or used.memory > state.memory_free or used.ratio > state.ratio_free
        if full or short or (not state.idle and any(share.whole for share in on_it)):
            return False
    return True
