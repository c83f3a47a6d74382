import io

import pytest
from rich.console import Console

from bench.comparison import Change, changes, changes_table, unmatched
from bench.history import Measured, Run
from bench.rows import Row


def row(what: str, value: float, reference: float | None = None, *, more_is_better: bool = False) -> Row:
    return Row(what=what, value=value, unit="ms", reference=reference, more_is_better=more_is_better)


def run(*rows: Row) -> Run:
    return Run("c", False, "2026-11-23", "2 × CPU", "3.11.7", False, (Measured("filter", rows),))


def change(old: tuple[float, ...], new: tuple[float, ...], *, more_is_better: bool = False) -> Change:
    old_rows, new_rows = (tuple(row("p50", one, more_is_better=more_is_better) for one in side) for side in (old, new))
    return Change("filter", old_rows, new_rows)


def test_rows_are_paired_by_turn() -> None:
    old = [run(row("p50", 10), row("p99", 50)), run(row("p50", 20), row("p99", 60))]
    new = [run(row("p99", 25), row("p50", 5)), run(row("p99", 30), row("p50", 5))]
    p50, p99 = changes(old, new)
    assert (p50.old[0].what, p50.ratios) == ("p50", (0.5, 0.25))
    assert (p99.old[0].what, p99.ratios) == ("p99", (0.5, 0.5))


def test_rows_that_one_commit_lacks_are_not_compared_but_named() -> None:
    old, new = run(row("p50", 10), row("former", 1)), run(row("p50", 10), row("added", 1))
    assert [one.old[0].what for one in changes([old], [new])] == ["p50"]
    assert unmatched(old, new) == ["filter: added", "filter: former"]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [((10, 12, 11), (5, 6, 9), "better"), ((5, 6, 9), (10, 12, 11), "worse"), ((10, 12, 11), (5, 6, 10), "")],
)
def test_a_verdict_needs_figures_that_do_not_overlap(
    old: tuple[float, ...], new: tuple[float, ...], verdict: str
) -> None:
    assert change(old, new).verdict == verdict


def test_a_rate_is_better_if_it_is_higher() -> None:
    assert change((10, 11), (20, 21), more_is_better=True).verdict == "better"
    assert change((20, 21), (10, 11), more_is_better=True).verdict == "worse"


def test_figures_that_the_reference_explains_have_no_verdict() -> None:
    old = (row("p50", 10, reference=5), row("p50", 11, reference=5))
    slow_machine = (row("p50", 20, reference=10), row("p50", 22, reference=11))
    slower = (row("p50", 20, reference=5), row("p50", 22, reference=5))
    assert Change("filter", old, slow_machine).verdict == ""
    assert Change("filter", old, slower).verdict == "worse"


def test_a_figure_of_zero_has_no_ratio() -> None:
    assert change((0, 1), (1, 1)).ratios == ()


def test_the_table_shows_medians_the_ratio_and_its_spread() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(changes_table([change((10, 12, 11), (5, 6, 5.5)), change((0,), (0,))], "main", "mine"))
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert lines == [
        "what main mine new / old of each turn",
        "filter",
        "p50 11 ms 5.5 ms × 0.50 0.50 to 0.50 better",
        "p50 0 ms 0 ms",
    ]
