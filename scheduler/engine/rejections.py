"""Why a pod does not fit: a reason per card, and whether evicting pods could help."""

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


def refusal(
    state: CardState,
    container: ContainerRequest,
    max_shares: int,
    exclusion: Exclusion | None = None,
    *,
    roughly: bool = False,
) -> CardRefusal | None:
    """Return why a card cannot serve this container even without the pod's other containers; None where it can.

    exclusion: why the card is excluded for the pod (`exclusions`). roughly: leave amounts out, so that thousands of
    nodes have few different reasons.
    """
    found = _refused(state, container, max_shares, exclusion, roughly=roughly)
    return None if found is None else CardRefusal(state.card.index, *found, state.card.type)


def _refused(
    state: CardState, container: ContainerRequest, max_shares: int, exclusion: Exclusion | None, *, roughly: bool
) -> tuple[RejectionKind, str] | None:
    if exclusion:
        return exclusion.kind, exclusion.reason
    if not state.card.healthy:
        return RejectionKind.UNHEALTHY, "unhealthy"
    if container.whole and not state.idle:
        text = "in use" if is_slice(state.card.type) else "in use, a whole card is asked for"
        return RejectionKind.IN_USE, text
    if max_shares and state.shares >= max_shares:
        return RejectionKind.SHARES, "no share left" if roughly else f"holds {state.shares} of {max_shares} shares"
    core, memory, _, ratio = container.amount_on(state.card)
    core, memory = max(0, core - state.core_free), max(0, memory - state.memory_free)
    # Who is short of memory in bytes too is told so, in the unit that is exact.
    ratio = 0 if memory else max(0, ratio - state.ratio_free)
    if not (core or memory or ratio):
        return None
    if state.card.type != GPU:
        return RejectionKind.OTHER_DEVICE, f"{core / 10:g} percent short"
    kind = _kind_of_shortage(bool(core), bool(memory or ratio))
    return kind, _ROUGHLY[kind] if roughly else _short(core, memory, ratio)


@lru_cache(maxsize=10_000)
def _short(core: int, memory: int, ratio: int) -> str:
    """Cached: a filter over thousands of nodes says much the same of tens of thousands of cards.

    No percent sign: kube-scheduler gives what it is told to Sprintf, and its Event says `50%!s(MISSING)hort`.
    """
    parts = [f"core {core / 10:g} percent short"] if core else []
    parts += [f"memory {format_bytes(memory)} short"] if memory else []
    return " and ".join(parts + ([f"memory ratio {ratio} percent short"] if ratio else []))


_ROUGHLY = {
    RejectionKind.CORE_AND_MEMORY: "core and memory short",
    RejectionKind.CORE: "core short",
    RejectionKind.MEMORY: "memory short",
}


def _kind_of_shortage(core: bool, memory: bool) -> RejectionKind:
    if core and memory:
        return RejectionKind.CORE_AND_MEMORY
    return RejectionKind.CORE if core else RejectionKind.MEMORY


def impossible(request: GpuRequest, cards: Sequence[CardState]) -> Rejection | None:
    """What no state of the cards can change: there are none, or fewer than one container asks for."""
    if not cards:
        return Rejection(RejectionKind.NO_DEVICE, "the node has no cards", hopeless=True)
    for container in request.containers:
        if container.cards > len(cards):
            asked = f"{container.cards} {noun(container.type)}s, the node has {len(cards)}"
            text = f"container {container.container!r} asks for {asked}"
            return Rejection(RejectionKind.NO_DEVICE, text, hopeless=True)
        if container.cards > 1 and request.constraints.same_card:
            requests = f"container {container.container!r} asks for {container.cards}"
            text = f"{request.constraints.same_card} shares one card, {requests}"
            return Rejection(RejectionKind.CONSTRAINT, text, hopeless=True)
    return None


def unplaceable(request: GpuRequest, cards: Sequence[CardState]) -> Rejection | None:
    """The refusals of the first container that cannot be placed even alone."""
    excluded = exclusions(request, cards)
    for container in request.containers:
        rejection = alone(request, container, cards, excluded)
        if rejection is not None:
            return replace(rejection, hopeless=_unplaceable_when_empty(request, cards, excluded))
    return None


def alone(
    request: GpuRequest,
    container: ContainerRequest,
    cards: Sequence[CardState],
    excluded: Sequence[Exclusion | None],
    *,
    roughly: bool = False,
) -> Rejection | None:
    """Return why this container cannot be placed even alone, or None where it can. Whether evictions help is not set.

    excluded: as `exclusions` returns them.
    """
    refusals = [
        refusal(state, container, request.max_shares, exclusion, roughly=roughly)
        for state, exclusion in zip(cards, excluded, strict=True)
    ]
    refused = [found for found in refusals if found]
    fitting = len(cards) - len(refused)
    if fitting >= container.cards:
        return None
    reason = ""
    if container.cards > 1:
        needed = f"{container.cards} {noun(container.type)}s, {fitting or 'none'} can serve it"
        reason = f"container {container.container!r} needs {needed}"
    elif len(request.containers) > 1:
        reason = f"no {noun(container.type)} can serve container {container.container!r}"
    return cards_rejection(refused, reason)


def emptied(cards: Sequence[CardState]) -> list[CardState]:
    """The same cards with nothing on them; what is unhealthy stays so, and a group or a GPUID where it is."""
    return [CardState(state.card, groups=state.groups, gpuid=state.gpuid) for state in cards]


def _unplaceable_when_empty(
    request: GpuRequest, cards: Sequence[CardState], excluded: Sequence[Exclusion | None]
) -> bool:
    usable = [state for state, exclusion in zip(emptied(cards), excluded, strict=True) if not exclusion]
    return any(_fewer_can(container, usable, request.max_shares) for container in request.containers)


def _fewer_can(container: ContainerRequest, cards: Sequence[CardState], max_shares: int) -> bool:
    """Whether fewer cards than it asks for can take the container alone."""
    able = (state for state in cards if refusal(state, container, max_shares) is None)
    return sum(1 for _ in islice(able, container.cards)) < container.cards


def not_together(request: GpuRequest, *, hopeless: bool) -> Rejection:
    count, group = len(request.containers), request.constraints.same_card
    together = f"on one card, as {group} has it" if group else "together"
    text = f"each of the {count} {_type(request)} containers fits alone, but not all of them {together}"
    return Rejection(RejectionKind.NOT_TOGETHER, text, hopeless=hopeless)


def without_proof(request: GpuRequest) -> Rejection:
    """The search ended undecided: said as it is, and never taken for "does not fit" (`hopeless`)."""
    count = len(request.containers)
    text = (
        f"the search for cards for the {count} {_type(request)} containers was ended: it takes too long, and whether "
        "they fit is not proven; fewer different containers, or more equal ones, are placed faster"
    )
    return Rejection(RejectionKind.NOT_PROVEN, text, proven=False)


def _type(request: GpuRequest) -> str:
    type = request.containers[0].type
    return "GPU" if type == GPU else type
