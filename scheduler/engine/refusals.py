"""Why a pod does not fit: a reason per card, and whether evicting pods could help."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from mgpu.model.cards import GPU, CardState, noun
from mgpu.model.gpu_requests import CardRefusal, ContainerRequest, GpuRequest, Rejection
from mgpu.model.quantities import format_bytes
from mgpu.model.slice_names import is_slice
from scheduler.engine.constraints import bars


def refusal(
    state: CardState, container: ContainerRequest, max_shares: int, bar: str | None = None, *, roughly: bool = False
) -> str | None:
    """Why a card cannot take this container alone; None: it can. bar: what is said of it by `wishing.bars`.

    roughly: without amounts, so that there are few reasons over thousands of nodes.
    """
    if bar:
        return bar
    if not state.card.healthy:
        return "unhealthy"
    if container.whole and not state.idle:
        return "in use" if is_slice(state.card.type) else "in use, a whole card is asked for"
    if max_shares and state.shares >= max_shares:
        return "no share left" if roughly else f"holds {state.shares} of {max_shares} shares"
    core, memory, _, ratio = container.takes(state.card)
    core, memory = max(0, core - state.core_free), max(0, memory - state.memory_free)
    # Who is short of memory in bytes too is told so, in the unit that is exact.
    ratio = 0 if memory else max(0, ratio - state.ratio_free)
    if not (core or memory or ratio):
        return None
    if state.card.type != GPU:
        return f"{core / 10:g} percent short"
    return _roughly(bool(core), bool(memory or ratio)) if roughly else _short(core, memory, ratio)


@lru_cache(maxsize=10_000)
def _short(core: int, memory: int, ratio: int) -> str:
    """Cached: a filter over thousands of nodes says much the same of tens of thousands of cards.

    No percent sign: kube-scheduler gives what it is told to Sprintf, and its Event says `50%!s(MISSING)hort`.
    """
    parts = [f"core {core / 10:g} percent short"] if core else []
    parts += [f"memory {format_bytes(memory)} short"] if memory else []
    return " and ".join(parts + ([f"memory ratio {ratio} percent short"] if ratio else []))


def _roughly(core: bool, memory: bool) -> str:
    return "core and memory short" if core and memory else "core short" if core else "memory short"


def impossible(request: GpuRequest, cards: Sequence[CardState]) -> Rejection | None:
    """What no state of the cards can change: there are none, or fewer than one container asks for."""
    if not cards:
        return Rejection("the node has no cards", hopeless=True)
    for container in request.containers:
        if container.cards > len(cards):
            asked = f"{container.cards} {noun(container.type)}s, the node has {len(cards)}"
            return Rejection(f"container {container.container!r} asks for {asked}", hopeless=True)
        if container.cards > 1 and request.constraints.same_card:
            requests = f"container {container.container!r} asks for {container.cards}"
            return Rejection(f"{request.constraints.same_card} shares one card, {requests}", hopeless=True)
    return None


def unplaceable(request: GpuRequest, cards: Sequence[CardState]) -> Rejection | None:
    """The refusals of the first container that cannot be placed even alone."""
    barred = bars(request, cards)
    for container in request.containers:
        rejection = alone(request, container, cards, barred)
        if rejection is not None:
            return replace(rejection, hopeless=_unplaceable_when_empty(request, cards, barred))
    return None


def alone(
    request: GpuRequest,
    container: ContainerRequest,
    cards: Sequence[CardState],
    barred: Sequence[str | None],
    *,
    roughly: bool = False,
) -> Rejection | None:
    """Why this container cannot be placed even alone, without a word on hope; None: it can be. barred: by `bars`."""
    reasons = [
        refusal(state, container, request.max_shares, bar, roughly=roughly)
        for state, bar in zip(cards, barred, strict=True)
    ]
    fitting = reasons.count(None)
    if fitting >= container.cards:
        return None
    refused = tuple(
        CardRefusal(state.card.index, reason, state.card.type)
        for state, reason in zip(cards, reasons, strict=True)
        if reason
    )
    reason = ""
    if container.cards > 1:
        needed = f"{container.cards} {noun(container.type)}s, {fitting or 'none'} can serve it"
        reason = f"container {container.container!r} needs {needed}"
    elif len(request.containers) > 1:
        reason = f"no {noun(container.type)} can serve container {container.container!r}"
    return Rejection(reason, refused)


def emptied(cards: Sequence[CardState]) -> list[CardState]:
    """The same cards with nothing on them; what is unhealthy stays so, and a group or a GPUID where it is."""
    return [CardState(state.card, groups=state.groups, gpuid=state.gpuid) for state in cards]


def _unplaceable_when_empty(request: GpuRequest, cards: Sequence[CardState], barred: Sequence[str | None]) -> bool:
    usable = [state for state, bar in zip(emptied(cards), barred, strict=True) if not bar]
    return any(_fewer_can(container, usable, request.max_shares) for container in request.containers)


def _fewer_can(container: ContainerRequest, cards: Sequence[CardState], max_shares: int) -> bool:
    """Whether fewer cards than it asks for can take the container alone."""
    able = (state for state in cards if refusal(state, container, max_shares) is None)
    return sum(1 for _ in islice(able, container.cards)) < container.cards


def not_together(request: GpuRequest, *, hopeless: bool) -> Rejection:
    count, group = len(request.containers), request.constraints.same_card
    together = f"on one card, as {group} has it" if group else "together"
    return Rejection(
        f"each of the {count} {_kind(request)} containers fits alone, but not all of them {together}", hopeless=hopeless
    )


def without_proof(request: GpuRequest) -> Rejection:
    """The search ended undecided: said as it is, and never taken for "does not fit" (`hopeless`)."""
    count = len(request.containers)
    text = (
        f"the search for cards for the {count} {_kind(request)} containers was ended: it takes too long, and whether "
        "they fit is not proven; fewer different containers, or more equal ones, are placed faster"
    )
    return Rejection(text, proven=False)


def _kind(request: GpuRequest) -> str:
    type = request.containers[0].type
    return "GPU" if type == GPU else type
