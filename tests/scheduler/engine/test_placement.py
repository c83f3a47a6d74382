"""`place` case by case: the worked examples of the policies, several stages, whole cards, what one card may hold."""

import pytest

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Rejection, whole_cards
from mgpu.model.pods import Stage
from scheduler.engine import place, policy_named
from tests.builders import GIB, card, state

BINPACK, SPREAD = policy_named("binpack", 20), policy_named("spread", 20)


def request(*containers: ContainerRequest, max_shares: int = 16) -> GpuRequest:
    return GpuRequest("mgpu", containers, max_shares)


def share(
    name: str = "c", cards: int = 1, core: int = 300, gib: int = 10, stage: Stage = Stage.APP
) -> ContainerRequest:
    return ContainerRequest(name, cards, core, gib * GIB, stage=stage)


def placed(wanted: GpuRequest, cards: list[CardState], policy: str = "binpack") -> list[tuple[int, ...]]:
    found = place(wanted, cards, policy_named(policy, 20))
    assert isinstance(found, Placement), str(found)
    assert found.proven
    return [at for _, at in found.containers]


PART_USED = [state(0), state(1, 500, 20), state(2, 200, 60), state(3)]

CASES = {
    "binpack fills the fullest card that has room": (request(share()), PART_USED, "binpack", [(2,)]),
    "spread takes the emptiest, of equals the lowest": (request(share()), PART_USED, "spread", [(0,)]),
    "two shares are packed onto one card": (
        request(share("a"), share("b")),
        [state(0), state(1)],
        "binpack",
        [(0,), (0,)],
    ),
    "two shares are spread over two": (request(share("a"), share("b")), [state(0), state(1)], "spread", [(0,), (1,)]),
    "cards of one container are distinct": (request(share(cards=2)), [state(0), state(1)], "binpack", [(0, 1)]),
    "a whole card is an idle one": (request(whole_cards("w", 1)), PART_USED, "binpack", [(0,)]),
    "whole cards take what scores best": (
        request(whole_cards("w", 1), share("s", core=900)),
        [state(0), state(1, 100, 1), state(2)],
        "binpack",
        [(0,), (1,)],
    ),
    "a whole card is shared with nobody, however little they ask": (
        request(whole_cards("w", 1), ContainerRequest("s")),
        [state(0), state(1)],
        "binpack",
        [(0,), (1,)],
    ),
    "an init container may use the app's whole card": (
        request(share("i", stage=Stage.INIT), whole_cards("w", 1)),
        [state(0)],
        "binpack",
        [(0,), (0,)],
    ),
    "init containers run one by one": (
        request(share("i", core=900, stage=Stage.INIT), share("j", core=800, stage=Stage.INIT), share("a", core=900)),
        [state(0)],
        "spread",
        [(0,), (0,), (0,)],
    ),
    "init containers reuse the app's cards, whatever the policy": (
        request(share("i", stage=Stage.INIT), share("j", cards=2, stage=Stage.INIT), share("a", cards=2)),
        [state(0), state(1), state(2), state(3)],
        "spread",
        [(0,), (0, 1), (0, 1)],
    ),
    "an init container that needs more than is left of the app's card has one of its own": (
        request(share("i", core=300, gib=10, stage=Stage.INIT), share("a", core=600, gib=4)),
        [state(0, 400, 75), state(1, 700, 10)],
        "binpack",
        [(1,), (0,)],
    ),
    "a sidecar runs beside the init container after it": (
        request(share("s", core=600, stage=Stage.SIDECAR), share("i", core=600, stage=Stage.INIT)),
        [state(0), state(1)],
        "binpack",
        [(0,), (1,)],
    ),
    "minor order takes the lowest that fit": (request(share(cards=2)), PART_USED, "minor", [(0, 1)]),
    "minor order, container by container": (
        request(share("a", core=600), share("b", core=400)),
        [state(0, 500), state(1), state(2)],
        "minor",
        [(1,), (0,)],
    ),
    "minor order where indexes are in another": (
        request(share(cards=2)),
        [CardState(Card(i, f"GPU-{i}", "", 80 * GIB, minor=(i + 1) % 3)) for i in range(3)],
        "minor",
        [(0, 2)],
    ),
    "best fit takes the smallest room (the seed's example)": (
        request(share(core=0, gib=8)),
        [state(i, 0, 80 - free) for i, free in enumerate((12, 8, 4, 16))],
        "bestfit",
        [(1,)],
    ),
    "best fit counts bytes, not parts of the card": (
        request(share(core=0, gib=8)),
        [state(0, 0, 68), state(1, 0, 5, gib=16)],
        "bestfit",
        [(1,)],
    ),
    "best fit takes the lowest of equals": (
        request(share(core=0, gib=8)),
        [state(0), state(1, 0, 70), state(2, 0, 70)],
        "bestfit",
        [(1,)],
    ),
    "an overfull card has nothing free, which is enough for nothing": (
        request(share(core=0)),
        [state(0, core=1500, gib_used=1)],
        "binpack",
        [(0,)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_place_returns_the_best_cards(name: str) -> None:
    wanted, cards, policy, expected = CASES[name]
    assert placed(wanted, cards, policy) == expected


def test_cards_that_differ_by_one_byte_score_differently() -> None:
    """1 byte of 80 GiB is lost in a float's sum of squares; the fuller card is the second."""
    fuller = CardState(card(1), 100, 5 * GIB + 1, 1)
    assert placed(request(share()), [CardState(card(0), 100, 5 * GIB, 1), fuller, state(2)]) == [(1,)]


def test_card_takes_at_most_max_shares() -> None:
    cards = [state(0, 100, 30, shares=2), state(1)]
    assert placed(request(share("a", core=100), share("b", core=100), max_shares=3), cards) == [(0,), (1,)]


def test_weight_of_core_decides_between_core_and_memory() -> None:
    cards = [state(0, core=600, gib_used=1), state(1, core=1, gib_used=50)]
    wanted = request(share(core=100, gib=10))
    for weight, index in ((100, 0), (0, 1)):
        assert place(wanted, cards, policy_named("binpack", weight)) == Placement((("c", (index,)),))


def test_spread_places_equal_containers_on_different_cards() -> None:
    wanted = request(*(share(f"c{i}", cards=2, core=100, gib=2) for i in range(8)))
    assert placed(wanted, [state(i) for i in range(16)], "spread") == [(2 * i, 2 * i + 1) for i in range(8)]


def test_place_beyond_the_budget_is_not_proven() -> None:
    wanted = request(*(share(f"c{i}", core=10 + i, gib=1 + i) for i in range(20)))
    found = place(wanted, [state(i) for i in range(16)], BINPACK)
    assert isinstance(found, Placement)
    assert not found.proven
    assert [name for name, _ in found.containers] == [f"c{i}" for i in range(20)]


def test_place_of_undecidable_pod_is_rejected_without_proof() -> None:
    # Multiples of 3 GiB that add up to both cards exactly, while half of their sum is no multiple of 3 GiB.
    sizes = [3 * k for k in range(1, 31)]
    half = sum(sizes) * GIB // 2
    cards = [CardState(Card(i, f"GPU-{i}", "", half)) for i in range(2)]
    wanted = GpuRequest("mgpu", tuple(ContainerRequest(f"c{k}", core=1, memory=k * GIB) for k in sizes))
    found = place(wanted, cards, BINPACK)
    assert isinstance(found, Rejection)
    assert "not proven" in str(found)
    assert not found.hopeless
