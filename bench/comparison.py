"""Measures two commits in turns: `bench/compare OLD NEW [SECTION…]`.

Each commit is checked out in a folder of its own, and runs there as a process of its own with the sections of its own
`bench/`. The runs take turns, because the speed of a machine that is shared with others changes by the minute.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from bench.history import ROOT, Run, from_json, machine
from bench.rows import Row
from bench.tables import amount, console, times

TURNS = 3
_LOCK = Path("requirements/dev.txt")


@dataclass(frozen=True, slots=True)
class Change:
    """One row in all turns. `old[i]` and `new[i]` were measured one after the other."""

    section: str
    old: tuple[Row, ...]
    new: tuple[Row, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """New divided by old in each turn, or nothing if a figure is 0."""
        pairs = zip(self.old, self.new, strict=True)
        return tuple(new.value / old.value for old, new in pairs) if all(row.value for row in self.old) else ()

    @property
    def verdict(self) -> str:
        """Whether the new commit is better or worse, or nothing if the figures of the two commits overlap.

        If there is a reference, the ratios to it must not overlap either. A machine that is slow for a while changes
        the figures, but not these ratios.
        """
        higher = _higher([row.value for row in self.old], [row.value for row in self.new])
        ratios = [[row.ratio for row in rows if row.ratio is not None] for rows in (self.old, self.new)]
        if higher is None or (all(ratios) and _higher(*ratios) != higher):
            return ""
        return "better" if higher == self.new[0].more_is_better else "worse"


def _higher(old: Sequence[float], new: Sequence[float]) -> bool | None:
    """Return whether all new figures are higher than all old ones, or None if the two overlap."""
    if min(old) <= max(new) and min(new) <= max(old):
        return None
    return min(new) > max(old)


def changes(old: Sequence[Run], new: Sequence[Run]) -> list[Change]:
    """Return a change for each row that all runs have, in the order of the first run. `old` and `new` are in turns."""
    runs = [_by_row(run) for run in (*old, *new)]
    count = len(old)
    return [
        Change(key[0], tuple(run[key] for run in runs[:count]), tuple(run[key] for run in runs[count:]))
        for key in runs[0]
        if all(key in run for run in runs)
    ]


def unmatched(old: Run, new: Run) -> list[str]:
    """Return the rows that only one of the runs has."""
    return [f"{section}: {what}" for section, what in sorted(_by_row(old).keys() ^ _by_row(new).keys())]


def changes_table(found: Sequence[Change], old: str, new: str) -> Table:
    table = Table(box=None, padding=(0, 1), collapse_padding=True)
    table.add_column("what")
    for name in (old, new, "new / old", "of each turn", ""):
        table.add_column(name, justify="right", no_wrap=True)
    section = ""
    for one in found:
        if one.section != section:
            section = one.section
            table.add_row(Text(section, "bold"))
        row, ratios = one.new[0], one.ratios
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        table.add_row(
            f"  {row.what}",
            amount(_median(one.old), row.unit),
            amount(_median(one.new), row.unit),
            times(statistics.median(ratios) if ratios else None),
            spread,
            Text(one.verdict, "green" if one.verdict == "better" else "red"),
        )
    return table


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row.value for row in rows)


def _by_row(run: Run) -> dict[tuple[str, str], Row]:
    return {(one.section, row.what): row for one in run.sections for row in one.rows}


@click.command()
@click.argument("old")
@click.argument("new")
@click.argument("sections", nargs=-1)
@click.option("--turns", type=click.IntRange(min=1), default=TURNS, show_default=True, help="Runs of each commit.")
@click.option("--bench", metavar="REF", help="Run the sections of this commit on both, instead of those of their own.")
@click.option("--nodes", multiple=True, type=int, help="Number of nodes to measure with; repeatable.")
@click.option("--quick", is_flag=True, help="Measure a fifth as often in each turn.")
def main(
    old: str, new: str, sections: tuple[str, ...], turns: int, bench: str | None, nodes: tuple[int, ...], *, quick: bool
) -> None:
    """Compare two commits. `.` is this checkout with what is not committed."""
    options = [*sections, *(f"--nodes={count}" for count in nodes), *(["--quick"] if quick else [])]
    found: tuple[list[Run], list[Run]] = ([], [])
    with (
        tempfile.TemporaryDirectory(prefix="mgpu-compare-") as folder,
        _checkout(old, Path(folder) / "old", bench) as first,
        _checkout(new, Path(folder) / "new", bench) as second,
    ):
        for turn in range(turns):
            # Each commit is the first of every second turn, so that a machine that becomes slower or faster during a
            # turn favours neither.
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                click.echo(f"turn {turn + 1} of {turns}: {(old, new)[side]} …", err=True)
                found[side].append(_run((first, second)[side], options))
    terminal = console()
    terminal.print(f"{turns} turns on {machine()}; medians", style="bold")
    terminal.print(changes_table(changes(*found), old, new))
    for what in unmatched(found[0][0], found[1][0]):
        terminal.print(f"only in one of the commits: {what}")


@contextmanager
def _checkout(ref: str, folder: Path, bench: str | None) -> Iterator[Path]:
    """Yield a folder with the commit, and with the `bench/` of another commit if there is one."""
    if ref == ".":
        yield ROOT
        return
    _git("worktree", "add", "--quiet", "--detach", str(folder), ref)
    try:
        if bench:
            # Resolved here, because `HEAD` of that folder is another commit.
            commit = _git("rev-parse", "--verify", f"{bench}^{{commit}}")
            _git("-C", str(folder), "rm", "-r", "--quiet", "bench")
            _git("-C", str(folder), "checkout", "--quiet", commit, "--", "bench")
        if not (folder / "bench" / "history.py").exists():
            raise click.ClickException(f"the benchmark of {ref} prints no rows; use --bench REF with a newer commit")
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _run(folder: Path, options: Sequence[str]) -> Run:
    command = [str(_interpreter(folder)), "-m", "bench", "--json", *options]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise click.ClickException(f"the benchmark in {folder} failed")
    return from_json(done.stdout.splitlines()[-1])


def _interpreter(folder: Path) -> Path:
    """Return the Python of this checkout if the commit locks the same libraries, else that of an environment for it."""
    if (folder / _LOCK).read_bytes() == (ROOT / _LOCK).read_bytes():
        return Path(sys.executable)
    subprocess.run(["make", "-C", str(folder), "install"], stdout=sys.stderr, check=True)
    return folder / ".venv/bin/python"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
