"""Creates the rejections of a node: a reason for each card, and whether evicting pods could help.

`placement`, `arrays.array_rejections` and `scheduler.mtgpupods.card_assignment` call this module. `_reason` must check
in the same order as `arrays.array_rejections._brief_reasons`, so change both together.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from mgpu.model.cards import GPU, CardState, noun
from mgpu.model.gpu_requests import (
    CardRefusal,
    ContainerRequest,
    GpuRequest,
    Rejection,
    RejectionKind,
    cards_rejection,
)
from mgpu.model.quantities import format_bytes
from mgpu.model.slice_names import is_slice
from scheduler.engine.card_constraints import Exclusion, exclusions


def card_refusal(
    state: CardState,
    container: ContainerRequest,
    max_shares: int,
    exclusion: Exclusion | None = None,
    *,
    brief: bool = False,
) -> CardRefusal | None:
    """Return why a card cannot take this container even without the pod's other containers, or None if it can.

    Args:
        max_shares: The most shares of a card, or 0 for no limit.
        exclusion: The reason why the card is excluded for the pod (`card_constraints.exclusions`), or None.
        brief: Whether to leave amounts out, so that thousands of nodes have few different reasons.
    """
    reason = _reason(state, container, max_shares, exclusion, brief=brief)
    return None if reason is None else CardRefusal(state.card.index, *reason, state.card.type)


def _reason(
    state: CardState, container: ContainerRequest, max_shares: int, exclusion: Exclusion | None, *, brief: bool
) -> tuple[RejectionKind, str] | None:
    if exclusion:
        return exclusion.kind, exclusion.reason
    if not state.card.healthy:
        return RejectionKind.UNHEALTHY, "unhealthy"
    if container.whole and not state.idle:
        text = "in use" if is_slice(state.card.type) else "in use, but a whole card is requested"
        return RejectionKind.IN_USE, text
    if max_shares and state.shares >= max_shares:
        return RejectionKind.SHARES, "no share left" if brief else f"holds {state.shares} of {max_shares} shares"
    core, memory, _, ratio = container.amount_on(state.card)
    core, memory = max(0, core - state.core_free), max(0, memory - state.memory_free)
    # A card that lacks memory in bytes also lacks it in percent. Only the bytes are reported, because they are exact.
    ratio = 0 if memory else max(0, ratio - state.ratio_free)
    if not (core or memory or ratio):
        return None
    if state.card.type != GPU:
        return RejectionKind.OTHER_DEVICE, f"{core / 10:g} percent short"
    kind = _kind_of_shortage(bool(core), bool(memory or ratio))
    return kind, _BRIEF[kind] if brief else _short(core, memory, ratio)


@lru_cache(maxsize=10_000)
def _short(core: int, memory: int, ratio: int) -> str:
    """Return the text for what a card lacks. It is cached, because a filter needs it for tens of thousands of cards.

    The text has no percent sign, because kube-scheduler passes it to Sprintf as a format, and the Event would contain
    `50%!s(MISSING)hort`.
    """
    parts = [f"core {core / 10:g} percent short"] if core else []
    parts += [f"memory {format_bytes(memory)} short"] if memory else []
    return " and ".join(parts + ([f"memory ratio {ratio} percent short"] if ratio else []))


_BRIEF = {
    RejectionKind.CORE_AND_MEMORY: "core and memory short",
    RejectionKind.CORE: "core short",
    RejectionKind.MEMORY: "memory short",
}


def _kind_of_shortage(core: bool, memory: bool) -> RejectionKind:
    if core and memory:
        return RejectionKind.CORE_AND_MEMORY
    return RejectionKind.CORE if core else RejectionKind.MEMORY


def impossible_request(request: GpuRequest, cards: Sequence[CardState]) -> Rejection | None:
    """Return the rejection of a request for more cards than the node has or a same-card group allows, or None."""
    if not cards:
        return Rejection(RejectionKind.NO_DEVICE, "the node has no cards", hopeless=True)
    for container in request.containers:
        if container.cards > len(cards):
            cards_text = f"{container.cards} {noun(container.type)}s, but the node has {len(cards)}"
            text = f"container {container.container!r} requests {cards_text}"
            return Rejection(RejectionKind.NO_DEVICE, text, hopeless=True)
        if container.cards > 1 and request.constraints.same_card:
            requested = f"container {container.container!r} requests {container.cards} cards"
            text = f"{requested}, but the pods of {request.constraints.same_card} share one card"
            return Rejection(RejectionKind.CONSTRAINT, text, hopeless=True)
    return None


def unplaceable_container(request: GpuRequest, cards: Sequence[CardState]) -> Rejection | None:
    """Return the rejection of the first container that does not fit even alone, or None if each fits alone."""
    excluded = exclusions(request, cards)
    for container in request.containers:
        rejection = container_rejection(request, container, cards, excluded)
        if rejection is not None:
            return replace(rejection, hopeless=_unplaceable_when_empty(request, cards, excluded))
    return None


def container_rejection(
    request: GpuRequest,
    container: ContainerRequest,
    cards: Sequence[CardState],
    excluded: Sequence[Exclusion | None],
    *,
    brief: bool = False,
) -> Rejection | None:
    """Return why this container does not fit even alone, or None if it does. The rejection's `hopeless` is not set.

    Args:
        excluded: The result of `card_constraints.exclusions`.
        brief: Whether to leave amounts out, as for `card_refusal`.
    """
    refusals = [
        card_refusal(state, container, request.max_shares, exclusion, brief=brief)
        for state, exclusion in zip(cards, excluded, strict=True)
    ]
    refused = [refusal for refusal in refusals if refusal]
    fitting = len(cards) - len(refused)
    if fitting >= container.cards:
        return None
    reason = ""
    if container.cards > 1:
        able = f"only {fitting}" if fitting else "none"
        needed = f"{container.cards} {noun(container.type)}s, but {able} can take it"
        reason = f"container {container.container!r} needs {needed}"
    elif len(request.containers) > 1:
        reason = f"no {noun(container.type)} can take container {container.container!r}"
    return cards_rejection(refused, reason)


def empty_cards(cards: Sequence[CardState]) -> list[CardState]:
    """Return the cards as if nothing of them were in use. They keep their health, groups and GPUIDs."""
    return [CardState(state.card, groups=state.groups, gpuid=state.gpuid) for state in cards]


def _unplaceable_when_empty(
    request: GpuRequest, cards: Sequence[CardState], excluded: Sequence[Exclusion | None]
) -> bool:
    usable = [state for state, exclusion in zip(empty_cards(cards), excluded, strict=True) if not exclusion]
    return any(_fewer_can(container, usable, request.max_shares) for container in request.containers)


def _fewer_can(container: ContainerRequest, cards: Sequence[CardState], max_shares: int) -> bool:
    """Return whether fewer cards could take the container alone than it requests."""
    fitting = (state for state in cards if card_refusal(state, container, max_shares) is None)
    return sum(1 for _ in islice(fitting, container.cards)) < container.cards


def not_together_rejection(request: GpuRequest, *, hopeless: bool) -> Rejection:
    """Return the rejection of a pod whose containers do not fit together, although each of them fits alone."""
    count, group = len(request.containers), request.constraints.same_card
    together = f"on one card, as {group} requires" if group else "together"
    text = f"each of the {count} {_type(request)} containers fits alone, but not all of them {together}"
    return Rejection(RejectionKind.NOT_TOGETHER, text, hopeless=hopeless)


def unproven_rejection(request: GpuRequest) -> Rejection:
    """Return the rejection for a search that ended without a result. It does not mean that the pod does not fit."""
    count = len(request.containers)
    text = (
        f"the search for cards for the {count} {_type(request)} containers was ended because it takes too long, and "
        "whether they fit is not proven; fewer different containers, or more equal ones, are placed faster"
    )
    return Rejection(RejectionKind.NOT_PROVEN, text, proven=False)


def _type(request: GpuRequest) -> str:
    type = request.containers[0].type
    return "GPU" if type == GPU else type
