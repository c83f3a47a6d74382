"""`place()` on the corpus, and its results compared with those of exhaustive search.

The CPU time is that of the shortest of three runs of each case, because that run is the one that other work of the
machine affects least.
"""

from collections.abc import Iterator
from math import comb, prod
from time import process_time

from bench.corpus import Case, cases
from bench.rows import Options, Row
from mgpu.model.gpu_requests import Placement
from scheduler.engine import Policy, place, policy_named
from tests.scheduler.engine.oracle import exhaustive

SHAPES = ((1, 8, 1000), (4, 8, 200), (8, 16, 100))
"""The numbers of containers, cards and cases."""

POLICIES = ("binpack", "spread")
WEIGHT_OF_CORE = 20
MOST_WAYS = 10_000


def rows(options: Options) -> Iterator[Row]:
    for containers, cards, count in SHAPES:
        for policy in POLICIES:
            yield from _shape(containers, cards, options.repeats(count), policy)
    compared, differing = prove(options.repeats(30))
    yield Row(
        what="results that equal those of exhaustive search (1 × 8 and 4 × 8)",
        value=100 * (compared - len(differing)) / compared,
        unit="%",
        more_is_better=True,
        remark="; ".join(differing),
    )


def prove(count: int = 60) -> tuple[int, list[str]]:
    """Compare `place()` with exhaustive search. Return the number of comparisons, and a text for each difference."""
    compared, differing = 0, []
    for case in _small(count):
        for name in POLICIES:
            found = place(case.request, case.cards, policy_named(name, WEIGHT_OF_CORE))
            ours = tuple(at for _, at in found.containers) if isinstance(found, Placement) else None
            best = exhaustive(case.request, case.cards, name, WEIGHT_OF_CORE)
            compared += 1
            if ours != best:
                differing.append(f"{name}: {ours} instead of {best} for {case}")
    return compared, differing


def _shape(containers: int, cards: int, count: int, name: str) -> Iterator[Row]:
    policy = policy_named(name, WEIGHT_OF_CORE)
    timed = [_timed(case, policy) for case in cases(containers, cards, count)]
    times = sorted(seconds * 1000 for seconds, _ in timed)
    placements = [found for _, found in timed if isinstance(found, Placement)]
    unproven = sum(not found.proven for found in placements)
    said = f"worst {times[-1]:.2f}; of {count} cases {count - len(placements)} rejected, {unproven} not proven best"
    what = f"{containers} containers × {cards} cards, {name}"
    yield Row(what=f"{what}, p50", value=times[count // 2], unit="ms CPU")
    yield Row(what=f"{what}, p99", value=times[count * 99 // 100], unit="ms CPU", remark=said)


def _timed(case: Case, policy: Policy) -> tuple[float, object]:
    best, found = float("inf"), None
    for _ in range(3):
        began = process_time()
        found = place(case.request, case.cards, policy)
        best = min(best, process_time() - began)
    return best, found


def _small(count: int) -> Iterator[Case]:
    """Yield, for each of the two smallest shapes, up to `count` cases with at most `MOST_WAYS` possible placements."""
    for containers, cards, _ in SHAPES[:2]:
        kept = 0
        for case in cases(containers, cards, 10 * count):
            if kept < count and prod(comb(cards, c.cards) for c in case.request.containers) <= MOST_WAYS:
                kept += 1
                yield case
