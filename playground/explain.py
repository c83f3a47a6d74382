"""What happened to a pod, in words: pure."""

from collections.abc import Mapping, Sequence

from mgpu import dialects
from mgpu.model.asks import Ask, ContainerAsk, by_index
from mgpu.model.cards import GPU, Card, CardState, noun
from mgpu.model.errors import BadObject, Problem
from mgpu.model.ledger import Share
from mgpu.model.pods import Stage
from mgpu.model.quantities import format_bytes, format_core
from mgpu.model.slices import is_slice
from mgpu.settings import Settings

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def asked(ask: Ask) -> str:
    """`train: 60% and 16.0 GiB of one card; evaluate: …`."""
    return "; ".join(f"{_role(c)}{c.container}: {_amount(c)}" for c in (*ask.containers, *ask.others))


def given(shares: Sequence[Share], cards: Sequence[CardState]) -> str:
    """`train on card 0 (40% free before)`, with `cards` as they were before."""
    free = {state.card.index: state for state in cards}
    return "; ".join(
        f"{container} on card{'s' if len(found) > 1 else ''} {', '.join(_before(free[i]) for i in found)}"
        for container, found in _by_container(shares, [state.card for state in cards]).items()
    )


def choice(ask: Ask, settings: Settings) -> str:
    """How the cards are chosen among those that fit."""
    if all(c.whole for c in ask.containers):
        return "whole cards must be idle"
    policy = dialects.card_policy(ask, settings)
    return {
        "binpack": "binpack: as full as possible, so that other cards stay free",
        "spread": "spread: as even as possible",
        "bestfit": "best fit: the least free memory that is enough",
        "minor": "the first cards that have room, by minor",
    }.get(policy, policy)


def visible(shares: Sequence[Share], cards: Sequence[Card]) -> dict[str, str]:
    """Container → what its NVIDIA_VISIBLE_DEVICES must be: the UUIDs of exactly the cards of its record, by index.

    Raises BadObject where the record names a card that is not there.
    """
    known = by_index(cards)
    return {c: ",".join(known[i].uuid for i in found) for c, found in _by_container(shares, cards).items()}


def differences(wanted: Mapping[str, str], seen: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Where a container's environment (`seen`) is not what it must be (`wanted`), one sentence each."""
    problems = []
    for container, value in wanted.items():
        here = seen[container].get(VISIBLE) if container in seen else None
        if here != value:
            problems.append(f"container {container} must see {VISIBLE}={value}, and sees {here}")
    return problems


def refusals(reasons: Mapping[str, str]) -> str:
    """`node-1: 4 cards: 4 memory …; node-2: …`."""
    return "; ".join(f"{node}: {reason}" for node, reason in sorted(reasons.items()))


def _by_container(shares: Sequence[Share], cards: Sequence[Card]) -> dict[str, list[int]]:
    """Container → indexes of its GPUs."""
    found: dict[str, list[int]] = {}
    for share in (share for share in shares if share.type == GPU):
        card = next((card for card in cards if share.is_on(card)), None)
        if card is None:
            problem = f"names card {share.card}, which is not there"
            raise BadObject([Problem(f"record of {share.container}", problem)])
        found.setdefault(share.container, []).append(card.index)
    return {container: sorted(indexes) for container, indexes in found.items()}


def _role(container: ContainerAsk) -> str:
    return {Stage.INIT: "init ", Stage.SIDECAR: "sidecar "}.get(container.stage, "")


def _amount(container: ContainerAsk) -> str:
    kind = noun(container.type) if container.type == GPU or is_slice(container.type) else container.type
    cards = f"one {kind}" if container.cards == 1 else f"{container.cards} {kind}s"
    if is_slice(container.type):
        return cards
    if container.whole:
        return f"{cards}, whole"
    memory = [format_bytes(container.memory)] if container.memory else []
    memory += [f"{container.ratio}% of the memory"] if container.ratio else []
    amounts = [format_core(container.core)] * bool(container.core) + memory
    of = "of" if container.cards == 1 else "of each of"
    return f"{' and '.join(amounts)} {of} {cards}"


def _before(state: CardState) -> str:
    if state.idle:
        return f"{state.card.index} (idle before)"
    return f"{state.card.index} ({format_core(state.core_free)} and {format_bytes(state.memory_free)} free before)"
