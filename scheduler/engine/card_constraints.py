"""Applies a pod's constraints to the cards of a node, and checks whether an earlier placement still fits.

The engine, the decisions and the cluster cache call this module. A card that `exclusions` excludes must never be given
to the pod, whatever is free on it. `cluster.eligibility` finds the same exclusions, except those by same-card groups,
for all nodes at once with NumPy arrays, so change both together.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import CardState, states_of_type
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind, peak
from mgpu.model.groups import GroupCard, format_group_cards
from mgpu.model.ledger import Share
from scheduler.engine.node_fit import HIGHEST

Score = TypeVar("Score", int, npt.NDArray[np.int64])

_FRESH = HIGHEST // 2
"""The lowest score of a node on which the pod shares no card with its spread group. Other nodes score less."""


class Exclusion(NamedTuple):
    """Why a card is excluded for a pod regardless of what is free on it."""

    reason: str
    kind: RejectionKind = RejectionKind.CONSTRAINT


IN_USE_BY_MTGPUPODS = Exclusion("in use by MtgpuPods", RejectionKind.MTGPUPODS)
"""The exclusion of a card with a GPUID. The text leaves the GPUID out, so that many nodes have the same reason."""


def exclusions(request: GpuRequest, cards: Sequence[CardState]) -> list[Exclusion | None]:
    """Return for each card why it is excluded for this pod, or None if it is not.

    A card is excluded if MtgpuPods use it (it has a GPUID), if the pod's constraints do not allow it, or if the pod's
    same-card group is on another card of the node. Preemption does not free cards with a GPUID, because the MtgpuPod
    controller would create the pods of the GPUID there again.
    """
    in_use = [IN_USE_BY_MTGPUPODS if state.gpuid else None for state in cards]
    constraints = request.constraints
    if not constraints.limits_cards and constraints.same_card is None:
        return in_use
    group = constraints.same_card
    here = group is not None and any(group in state.groups for state in cards)
    other = Exclusion(f"{group} is on another card")

    def by_constraints(state: CardState) -> Exclusion | None:
        reason = constraints.reason_against(state.card)
        if reason is not None:
            return Exclusion(reason)
        return other if here and group not in state.groups else None

    return [found or by_constraints(state) for found, state in zip(in_use, cards, strict=True)]


def cards_of_spread_group(request: GpuRequest, cards: Sequence[CardState]) -> list[bool]:
    """Return for each card whether a pod of the request's spread group holds a share of it."""
    return [request.constraints.spread in state.groups for state in cards]


def same_card_group_rejection(
    request: GpuRequest, cards: Sequence[CardState], group_cards: Sequence[GroupCard]
) -> Rejection | None:
    """Return the rejection of a node if the request's same-card group is only on other nodes, or None.

    Evicting pods from the node cannot help. mgpu does not put a group on several cards. If a group is on several cards
    for another reason, its pods may take any of these cards.

    Args:
        cards: The cards of the node.
        group_cards: The cards of the group, on any node. If there are none, the pod may take any card.
    """
    group = request.constraints.same_card
    if group is None or not group_cards or any(group in state.groups for state in cards):
        return None
    return Rejection(RejectionKind.CONSTRAINT, f"{group} is on {format_group_cards(group_cards)}", hopeless=True)


def spread_group_score(score: int, request: GpuRequest, placement: Placement, cards: Sequence[CardState]) -> int:
    """Return the score of a node, adjusted to the spread group of the request. Without a group it is unchanged.

    The score is mapped to the upper half of all scores if the pod would share no card with the group, and to the lower
    half if the pod would share one.
    """
    if request.constraints.spread is None:
        return score
    if shares_card_with_group(request, placement, cards):
        return score_beside_group(score)
    return score_on_fresh_cards(score)


def shares_card_with_group(request: GpuRequest, placement: Placement, cards: Sequence[CardState]) -> bool:
    """Return whether the placement takes a card that a pod of the request's spread group is on."""
    group = request.constraints.spread
    taken = {index for _, chosen in placement.containers for index in chosen}
    return group is not None and any(group in state.groups for state in cards if state.card.index in taken)


def score_on_fresh_cards(score: Score) -> Score:
    return _FRESH + score * (HIGHEST - _FRESH) // HIGHEST


def score_beside_group(score: Score) -> Score:
    return score * (_FRESH - 1) // HIGHEST


def still_fits(request: GpuRequest, shares: Sequence[Share], cards: Sequence[CardState]) -> bool:
    """Return whether the shares of an earlier placement still fit.

    They fit if the cards exist, are healthy, are not excluded, and have enough free capacity. A share of a whole card
    fits only on an idle card.

    Args:
        cards: The node's devices of all types, without what the pod itself holds. A slice may be in use although no
            holding contains it, because the node reports which slices it has given to pods.
    """
    gpus = states_of_type(cards)
    usable: dict[tuple[str, object], CardState] = {(s.card.type, s.card.index): s for s in cards if s.card.healthy}
    for gpu, exclusion in zip(gpus, exclusions(request, gpus), strict=True):
        if exclusion:
            usable.pop((gpu.card.type, gpu.card.index), None)
    for device in dict.fromkeys((share.type, share.card) for share in shares):
        state = usable.get(device)
        if state is None:
            return False
        on_device = [share for share in shares if (share.type, share.card) == device]
        used = peak((share.stage, share.amount(state.card)) for share in on_device)
        full = request.max_shares and state.shares + used.shares > request.max_shares
        short = used.core > state.core_free or used.memory > state.memory_free or used.ratio > state.ratio_free
        if full or short or (not state.idle and any(share.whole for share in on_device)):
            return False
    return True
