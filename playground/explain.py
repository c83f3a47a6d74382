"""What happened to a pod, in words: pure."""

from collections.abc import Mapping, Sequence

from mgpu.model.asks import by_index
from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.errors import BadObject, Problem
from mgpu.model.ledger import Share
from mgpu.model.quantities import format_bytes, format_core

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def given(shares: Sequence[Share], cards: Sequence[CardState]) -> str:
    """`train on card 0 (40% free before)`, with `cards` as they were before."""
    free = {state.card.index: state for state in cards}
    return "; ".join(
        f"{container} on card{'s' if len(found) > 1 else ''} {', '.join(_before(free[i]) for i in found)}"
        for container, found in _by_container(shares, [state.card for state in cards]).items()
    )


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


def _before(state: CardState) -> str:
    if state.idle:
        return f"{state.card.index} (idle before)"
    return f"{state.card.index} ({format_core(state.core_free)} and {format_bytes(state.memory_free)} free before)"
