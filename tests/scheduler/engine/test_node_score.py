"""The score of a node: how full its cards are with the pod, 0..10."""

from dataclasses import replace

import pytest

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, whole_cards
from mgpu.model.pods import Stage
from scheduler.engine import node_score
from tests.builders import GIB, card, state

HALF = GpuRequest("mgpu", (ContainerRequest("c", 1, 500, 40 * GIB),))
ON_0 = Placement((("c", (0,)),))

CASES: dict[str, tuple[GpuRequest, list[CardState], int, tuple[int, int]]] = {
    "half a card of two": (HALF, [state(0), state(1)], 20, (2, 7)),
    "half a card of one": (HALF, [state(0)], 20, (5, 5)),
    "what others hold counts": (HALF, [state(0, 500, 40), state(1)], 20, (5, 5)),
    "full": (HALF, [state(0, 500, 40)], 20, (10, 0)),
    "over the card is full": (HALF, [state(0, 2000, 200)], 20, (10, 0)),
    "core only": (HALF, [state(0, 0, 40)], 100, (5, 5)),
    "memory only": (HALF, [state(0, 500, 0)], 0, (5, 5)),
    "unhealthy cards count": (HALF, [state(0), CardState(card(1, healthy=False))], 20, (2, 7)),
    "a card with a GPUID counts as full": (HALF, [state(0), replace(state(1, 200, 1), gpuid="x")], 20, (7, 2)),
    "a whole card": (GpuRequest("mgpu", (whole_cards("c", 1),)), [state(0), state(1)], 20, (5, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_node_score_is_rounded_down(name: str) -> None:
    request, cards, weight, (binpack, spread) = CASES[name]
    assert node_score(request, ON_0, cards, "binpack", weight) == binpack
    assert node_score(request, ON_0, cards, "spread", weight) == spread


def test_node_score_counts_init_containers_once() -> None:
    init = ContainerRequest("i", 1, 1000, 80 * GIB, stage=Stage.INIT)
    both = Placement((("i", (0,)), ("c", (0,))))
    assert node_score(GpuRequest("mgpu", (init, *HALF.containers)), both, [state(0), state(1)], "binpack", 20) == 5
