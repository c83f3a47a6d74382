"""The placement corpus: requests for shares and for whole cards, on partly used cards of different sizes.

The cases are the same on every machine, so that figures can be compared: they are made with `Random.random()` only,
because Python guarantees the sequence of no other method. `tests/scheduler/engine/test_corpus.py` compares them with
`DIGESTS`. `bench.placement` and `bench.hard` use them too.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, whole_cards
from mgpu.model.pods import Stage

MIB = 1 << 20
SIZES_GIB = (16, 24, 24, 40, 48, 80, 80)
CORES = (50, 100, 100, 150, 200, 250, 300, 330, 500, 700)
CARDS_EACH = (1, 1, 1, 1, 2, 2, 3, 4)
MAX_SHARES = 16

DIGESTS = {(1, 8): "bba7b0616d6021cd", (4, 8): "c203217ac26c4255", (8, 16): "1c4329b30390eed4"}
"""By the numbers of containers and cards, the digest of the first 100 cases with the default seed."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Case:
    request: GpuRequest
    cards: tuple[CardState, ...]


def cases(containers: int, cards: int, count: int, seed: int = 2026) -> Iterator[Case]:
    """Yield cases, from empty to almost full nodes. In about a third of them all cards have the same size."""
    draw = _Draw(seed * 10_000 + containers * 100 + cards)
    for _ in range(count):
        fullness = draw.below(90)
        sizes = SIZES_GIB if draw.below(3) else (draw.of(SIZES_GIB),)
        states = tuple(_state(draw, index, draw.of(sizes), fullness) for index in range(cards))
        yield Case(_request(draw, containers, cards), states)


def digest(some: Iterable[Case]) -> str:
    """Return a short hash of the amounts in the cases. It does not depend on names."""
    text = hashlib.sha256()
    for case in some:
        for s in case.cards:
            text.update(repr((s.card.memory, s.card.healthy, s.core_used, s.memory_used, s.shares)).encode())
        for c in case.request.containers:
            text.update(repr((c.cards, c.core, c.memory, c.whole, str(c.stage))).encode())
    return text.hexdigest()[:16]


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, end: int) -> int:
        return int(self._random.random() * end)

    def of(self, choices: Sequence[_T]) -> _T:
        return choices[self.below(len(choices))]


def _state(draw: _Draw, index: int, gib: int, fullness: int) -> CardState:
    """Return a card with up to four shares of other pods.

    Args:
        gib: The memory of the card in GiB.
        fullness: The chance in percent that the number of shares is drawn, from 0 to 4; otherwise there are none. The
            size of the shares grows with it.
    """
    card = Card(index, f"GPU-{index}", f"{gib}g", gib * 1024 * MIB, healthy=draw.below(25) > 0)
    shares = draw.below(5) if draw.below(100) < fullness else 0
    core = sum(10 * (1 + draw.below(1 + fullness // 3)) for _ in range(shares))
    mib = sum(256 + draw.below(gib * 1024 * fullness // 400) for _ in range(shares))
    return CardState(card, min(core, card.core), min(mib * MIB, card.memory), shares)


def _request(draw: _Draw, containers: int, cards: int) -> GpuRequest:
    requests: list[ContainerRequest] = []
    early = sum(draw.below(8) == 0 for _ in range(containers - 1))
    for i in range(containers):
        stage = Stage.APP if i >= early else draw.of((Stage.INIT, Stage.SIDECAR))
        count = min(draw.of(CARDS_EACH), cards)
        if requests and draw.below(4) == 0:
            last = requests[-1]
            requests.append(
                ContainerRequest(f"c{i}", last.cards, last.core, last.memory, whole=last.whole, stage=stage)
            )
        elif draw.below(15) == 0:
            requests.append(whole_cards(f"c{i}", count, stage))
        else:
            memory = (256 + draw.below(11_000)) * MIB
            requests.append(ContainerRequest(f"c{i}", count, draw.of(CORES), memory, stage=stage))
    return GpuRequest("mgpu", tuple(requests), MAX_SHARES)
