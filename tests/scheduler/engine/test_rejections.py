"""What a rejection says, and whether it says that evicting pods cannot help."""

from dataclasses import replace

import pytest

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Rejection, RejectionKind, whole_cards
from scheduler.engine import place, policy_named
from tests.builders import GIB, card, state


def request(*containers: ContainerRequest, max_shares: int = 16) -> GpuRequest:
    return GpuRequest("mgpu", containers, max_shares)


def share(name: str = "c", cards: int = 1, core: int = 300, gib: int = 10) -> ContainerRequest:
    return ContainerRequest(name, cards, core, gib * GIB)


BIG = share(gib=90)

CASES = {
    "a reason per card, added up": (
        request(share(gib=10)),
        [state(0, 500, 74), state(1, 500, 74), CardState(card(2, healthy=False))],
        "3 cards: 2 memory 4.0 GiB short, 1 unhealthy",
        RejectionKind.MEMORY,
        False,
    ),
    "both amounts of a card": (
        request(share()),
        [state(0, 900, 78)],
        "1 card: 1 core 20 percent short and memory 8.0 GiB short",
        RejectionKind.CORE_AND_MEMORY,
        False,
    ),
    "memory in percent, where the bytes would do": (
        request(ContainerRequest("c", ratio=20)),
        [replace(state(0), ratio_used=85)],
        "1 card: 1 memory ratio 5 percent short",
        RejectionKind.MEMORY,
        False,
    ),
    "both are told in bytes": (
        request(ContainerRequest("c", core=200, ratio=50)),
        [replace(state(0, 900, 44), ratio_used=55)],
        "1 card: 1 core 10 percent short and memory 4.0 GiB short",
        RejectionKind.CORE_AND_MEMORY,
        False,
    ),
    "no card": (request(share()), [], "the node has no cards", RejectionKind.NO_DEVICE, True),
    "more cards than there are": (
        request(share("a"), share("b", 3)),
        [state(0), state(1)],
        "container 'b' requests 3 cards, but the node has 2",
        RejectionKind.NO_DEVICE,
        True,
    ),
    "too few cards can serve": (
        request(share(cards=2)),
        [state(0), state(1, 900), state(2, 900)],
        "container 'c' needs 2 cards, but only 1 can take it (2 cards: 2 core 20 percent short)",
        RejectionKind.CORE,
        False,
    ),
    "whole cards in use": (
        request(whole_cards("c", 2)),
        [state(0, 10), state(1, 10)],
        "container 'c' needs 2 cards, but none can take it (2 cards: 2 in use, but a whole card is requested)",
        RejectionKind.IN_USE,
        False,
    ),
    "as many shares as allowed": (
        request(share(), max_shares=2),
        [state(0, 10, shares=2)],
        "1 card: 1 holds 2 of 2 shares",
        RejectionKind.SHARES,
        False,
    ),
    "the first container that fits nowhere": (
        request(share("a"), BIG),
        [state(0, 0, 0), state(1, 100, 20)],
        "no card can take container 'c' (2 cards: 1 memory 10.0 GiB short, 1 memory 30.0 GiB short)",
        RejectionKind.MEMORY,
        True,
    ),
    "alone, but not together": (
        request(share("a", core=600), share("b", core=600)),
        [state(0), state(1, 800)],
        "each of the 2 GPU containers fits alone, but not all of them together",
        RejectionKind.NOT_TOGETHER,
        False,
    ),
    "not together even on empty cards": (
        request(share("a", core=600), share("b", core=600)),
        [state(0, 100)],
        "each of the 2 GPU containers fits alone, but not all of them together",
        RejectionKind.NOT_TOGETHER,
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_place_that_does_not_fit_returns_reason_and_kind(name: str) -> None:
    wanted, cards, reason, kind, hopeless = CASES[name]
    found = place(wanted, cards, policy_named("binpack", 20))
    assert isinstance(found, Rejection)
    assert (str(found), found.kind, found.hopeless) == (reason, kind, hopeless)


def test_unhealthy_cards_make_rejection_hopeless() -> None:
    sick = replace(state(0, 900), card=card(0, healthy=False))
    found = place(request(share()), [sick], policy_named("spread", 20))
    assert isinstance(found, Rejection)
    assert found.hopeless


@pytest.mark.parametrize(("count", "why"), [(40, "in amount"), (33, "in number: 4 to a card, 32 in all")])
def test_too_many_small_containers_are_rejected_at_once(count: int, why: str) -> None:
    """By trying it would take for ever; they would fit the cards if those were empty."""
    wanted = request(*(ContainerRequest(f"c{i}", 1, 10, 9 * GIB + i * GIB // 50) for i in range(count)), max_shares=0)
    found = place(wanted, [state(i, 0, 40) for i in range(8)], policy_named("binpack", 20))
    assert isinstance(found, Rejection), why
    assert not found.hopeless
