"""One call of `place()` with pods that are made to keep the engine busy.

Of each case, the policy that takes longest is shown. Steps are those of `scheduler/engine/effort.py`. The names of the
cases begin with containers × cards. `tests/scheduler/engine/test_effort.py` uses the cases too.
"""

import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from time import process_time
from typing import NamedTuple

from bench.corpus import Case, cases
from bench.rows import Options, Row
from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Rejection, whole_cards
from mgpu.model.pods import Stage
from mgpu.model.slice_names import MPS
from scheduler.engine import FULL, SHORT, Effort, Limits, place, policy_named
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.partitioning.mps_shares import MpsCard
from scheduler.engine.partitioning.partition_plan import PartitionableCards, can_offer

MIB = 1 << 20
POLICIES = ("binpack", "spread", "minor")


class Hard(NamedTuple):
    """The measurement of one case. `seconds` is CPU time."""

    title: str
    policy: str
    seconds: float
    steps: int
    peak: int
    found: Placement | Rejection


def different(containers: int, cards: int, cards_each: int = 1) -> Case:
    """Return small, different containers on idle cards. Too many sets of them fit on a card to count them all."""
    requests = (ContainerRequest(f"c{i}", cards_each, 10 + i % 7, (200 + i) * MIB) for i in range(containers))
    return Case(GpuRequest("mgpu", tuple(requests), 16), tuple(_card(i, 80 << 10) for i in range(cards)))


def exclusive(containers: int, cards: int) -> Case:
    """Return containers of which at most two fit on a card together. It takes much work to find the pairs."""
    requests = (ContainerRequest(f"c{i}", 1, 335 + i, (2000 + i) * MIB) for i in range(containers))
    return Case(GpuRequest("mgpu", tuple(requests)), tuple(_card(i, (26 << 10) + i) for i in range(cards)))


def full(containers: int, cards: int, fullness: float, seed: int = 2) -> Case:
    """Return random containers that nearly fill cards of different sizes.

    Args:
        fullness: The fraction of the core and of the memory of all cards that the containers request together.
    """
    random = Random(seed)
    sizes = [int(1000 + 8000 * random.random()) for _ in range(containers)]
    cores = [10 + 190 * random.random() for _ in range(containers)]
    each, factor = int(sum(sizes) / cards / fullness), 1000 * cards * fullness / sum(cores)
    pairs = enumerate(zip(sizes, cores, strict=True))
    requests = (ContainerRequest(f"c{i}", 1, int(core * factor), size * MIB) for i, (size, core) in pairs)
    return Case(GpuRequest("mgpu", tuple(requests)), tuple(_card(i, each + 7 * i) for i in range(cards)))


def partition(containers: int, cards: int) -> Case:
    """Return containers that request exactly the memory of all cards, but do not fit.

    All requests but one are multiples of 3 MiB, and the memory of a card is not.
    """
    sizes = [3 * (1000 + 17 * i) for i in range(containers)]
    while sum(sizes) % cards or sum(sizes) // cards % 3 == 0:
        sizes[-1] += 1
    requests = (ContainerRequest(f"c{i}", 1, 1, size * MIB) for i, size in enumerate(sizes))
    return Case(GpuRequest("mgpu", tuple(requests)), tuple(_card(i, sum(sizes) // cards) for i in range(cards)))


def staged(containers: int, cards: int) -> Case:
    """Return init containers and sidecars in turn, then app containers. They request different numbers of cards."""
    stages = (Stage.INIT, Stage.SIDECAR) * (containers // 3) + (Stage.APP,) * (containers - containers // 3 * 2)
    requests = [
        ContainerRequest(f"c{i}", 1 + i % cards, 50 + i, (500 + i) * MIB, stage=stage) for i, stage in enumerate(stages)
    ]
    requests[-1] = whole_cards(requests[-1].container, 1)
    return Case(GpuRequest("mgpu", tuple(requests)), tuple(_card(i, 80 << 10) for i in range(cards)))


def wide(containers: int, cards: int) -> Case:
    """Return containers that request half of the cards each, so that each has thousands of choices."""
    requests = (ContainerRequest(f"c{i}", cards // 2, 100 + i, (4000 + 10 * i) * MIB) for i in range(containers))
    return Case(GpuRequest("mgpu", tuple(requests), 16), tuple(_card(i, 80 << 10, i * 30) for i in range(cards)))


CASES: Mapping[str, Callable[[], Case]] = {
    "30 × 8, different": lambda: different(30, 8),
    "200 × 16, different": lambda: different(200, 16),
    "200 × 64, different": lambda: different(200, 64),
    "14 × 16, different": lambda: different(14, 16),
    "14 × 64, different": lambda: different(14, 64, 8),
    "16 × 16, exclusive": lambda: exclusive(16, 16),
    "60 × 64, exclusive": lambda: exclusive(60, 64),
    "200 × 128, exclusive": lambda: exclusive(200, 128),
    "12 × 4, full": lambda: full(12, 4, 0.97),
    "30 × 8, full": lambda: full(30, 8, 0.985),
    "100 × 16, full": lambda: full(100, 16, 0.995),
    "200 × 16, full": lambda: full(200, 16, 0.999),
    "30 × 2, partition": lambda: partition(30, 2),
    "30 × 8, partition": lambda: partition(30, 8),
    "200 × 16, partition": lambda: partition(200, 16),
    "12 × 8, staged": lambda: staged(12, 8),
    "60 × 16, staged": lambda: staged(60, 16),
    "16 × 16, wide": lambda: wide(16, 16),
    "40 × 64, wide": lambda: wide(40, 64),
}

SLICES: Sequence[Mapping[str, int]] = (
    {"12gb": 7, "35gb": 6, "44gb": 7, "14gb": 2, "34gb": 4, "54gb": 4},
    {"12gb": 7, "35gb": 3, "44gb": 7, "14gb": 2, "34gb": 4, "54gb": 6},
    {"12gb": 5, "35gb": 5, "44gb": 7, "14gb": 2, "34gb": 2, "54gb": 6},
    {"24gb": 12, "39gb": 11, "31gb": 9, "64gb": 1, "17gb": 1, "11gb": 7, "14gb": 1, "50gb": 2, "68gb": 1},
)
"""Requests for slices of many sizes, which nearly fill eight cards."""


def corpus() -> Iterator[Case]:
    """Return cases with ordinary pods of eight containers, for comparison."""
    return cases(8, 16, 40)


def measure(case: Case, title: str, policy: str, limits: Limits) -> Hard:
    effort, began = Effort(), process_time()
    found = place(case.request, case.cards, policy_named(policy, 20), limits=limits, effort=effort)
    return Hard(title, policy, process_time() - began, effort.spent, 0, found)


def measure_memory(case: Case, policy: str, limits: Limits) -> int:
    tracemalloc.start()
    place(case.request, case.cards, policy_named(policy, 20), limits=limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def rows(options: Options) -> Iterator[Row]:
    for title, make in CASES.items():
        if not options.quick:
            yield _slowest(title, make(), FULL)
    short = max((_slowest(title, make(), SHORT) for title, make in CASES.items()), key=lambda row: row.value)
    yield replace(short, what="the slowest case with short searches", remark=f"{short.what}; {short.remark}")
    for need in SLICES:
        yield _slices(need)
    peak = max(measure_memory(make(), "binpack", FULL) for make in CASES.values())
    yield Row(what="peak of the memory that one call allocates", value=peak / MIB, unit="MiB")


def _slowest(title: str, case: Case, limits: Limits) -> Row:
    row = max((measure(case, title, policy, limits) for policy in POLICIES), key=lambda row: row.seconds)
    each = row.seconds * 1e9 / max(1, row.steps)
    if isinstance(row.found, Placement):
        end = "best placement" if row.found.proven else "placed, perhaps not the best"
    else:
        end = "does not fit" if row.found.proven else "search ended without a result"
    said = f"{row.policy}, {row.steps:,} steps of {each:.0f} ns, {end}"
    return Row(what=title, value=row.seconds * 1000, unit="ms CPU", remark=said)


def _slices(need: Mapping[str, int]) -> Row:
    """Return the result for the one of ten nodes on which the search takes longest."""
    found = []
    for seed in range(10):
        effort, began = Effort(), process_time()
        try:
            end = "fits" if can_offer(_sliced(seed), need, Budget(effort, FULL.search)) else "does not fit"
        except Exhausted:
            end = "search ended without a result"
        found.append((process_time() - began, effort.spent, end))
    seconds, steps, end = max(found)
    return Row(
        what=f"MPS slices: {_sizes(need)}", value=seconds * 1000, unit="ms CPU", remark=f"{steps:,} steps, {end}"
    )


def _sizes(need: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in need.items())


def _sliced(seed: int) -> PartitionableCards:
    """Return a node with eight cards of 141 GiB, on which some slices are in use."""
    random = Random(seed)
    places = [tuple((j, f"{random.randint(1, 40)}gb") for j in range(random.randint(0, 2))) for _ in range(8)]
    return PartitionableCards(MPS, tuple((i, MpsCard(141, used, ())) for i, used in enumerate(places)))


def _card(index: int, mib: int, core_used: int = 0) -> CardState:
    return CardState(Card(index, f"GPU-{index}", "", mib * MIB), core_used, 0, min(1, core_used))
