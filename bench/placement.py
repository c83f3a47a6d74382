"""Measures `place()` on the corpus, and compares its results with those of exhaustive search.

`make bench` and `python -m bench.placement` run it. It prints the CPU time of the shortest of three runs of each case,
because that run is the one that other work of the machine affects least. Other benchmarks use `machine`.
"""

import platform
from collections.abc import Iterator
from math import comb, prod
from time import process_time
from typing import NamedTuple

from bench.corpus import Case, cases
from mgpu.model.gpu_requests import Placement
from scheduler.engine import Policy, place, policy_named
from tests.scheduler.engine.oracle import exhaustive

SHAPES = ((1, 8, 2000), (4, 8, 400), (8, 16, 200))
"""The numbers of containers, cards and cases."""

POLICIES = ("binpack", "spread")
WEIGHT_OF_CORE = 20
MOST_WAYS = 10_000


class Row(NamedTuple):
    """The measurement of one shape and policy. Times are CPU milliseconds of one call of `place()`.

    Attributes:
        unproven: The number of placements whose search ended before they were proven to be the best.
    """

    containers: int
    cards: int
    policy: str
    cases: int
    median: float
    p99: float
    worst: float
    rejected: int
    unproven: int


def run() -> list[Row]:
    return [_row(shape, policy) for shape in SHAPES for policy in POLICIES]


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


def main() -> None:
    print(f"place() on {machine()}; CPU milliseconds, best of 3, containers × cards")
    print(f"{'':>6} {'policy':8} {'cases':>6} {'median':>8} {'p99':>8} {'worst':>8}")
    for row in run():
        shape = f"{row.containers}×{row.cards}"
        times = f"{row.median:8.3f} {row.p99:8.3f} {row.worst:8.3f}"
        print(f"{shape:>6} {row.policy:8} {row.cases:6} {times}  {row.rejected} rejected, {row.unproven} unproven")
    compared, differing = prove()
    print(f"{compared - len(differing)} of {compared} results equal those of exhaustive search (1×8 and 4×8)")
    print("\n".join(differing), end="")


def machine() -> str:
    """Return the processor, the operating system and the version of Python, for the head of a table."""
    return f"{_processor()}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{len(names)} × {names[0]}" if names else platform.processor() or platform.machine()


def _row(shape: tuple[int, int, int], name: str) -> Row:
    containers, cards, count = shape
    policy = policy_named(name, WEIGHT_OF_CORE)
    timed = [_timed(case, policy) for case in cases(containers, cards, count)]
    times = sorted(seconds * 1000 for seconds, _ in timed)
    placements = [found for _, found in timed if isinstance(found, Placement)]
    unproven = sum(not found.proven for found in placements)
    rejected = count - len(placements)
    return Row(
        containers, cards, name, count, times[count // 2], times[count * 99 // 100], times[-1], rejected, unproven
    )


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


if __name__ == "__main__":
    main()
