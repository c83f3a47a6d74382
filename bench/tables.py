"""Renders a run of the benchmark as one table."""

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench.history import Run
from bench.rows import Row
from bench.sections import title

_PIPE_WIDTH = 160
"""The width of the table if the output is not a terminal, where `rich` would wrap after 80 characters."""


def console() -> Console:
    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)


def run_table(run: Run) -> Group:
    """Return the heading, and a table with a group of rows for each section. A peer has columns if it was measured."""
    with_peer = any(row.peer is not None for one in run.sections for row in one.rows)
    table = Table(box=None, padding=(0, 1), collapse_padding=True)
    table.add_column("what")
    for name in ("mgpu", "reference", "ratio", *(("peer", "ratio to peer") if with_peer else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("remark", style="dim")
    for one in run.sections:
        table.add_row()
        table.add_row(Text(f"{one.section}: {title(one.section)}", "bold"))
        if one.skipped:
            table.add_row(Text(f"  skipped: {one.skipped}", "dim"))
        for row in one.rows:
            table.add_row(*_cells(row, with_peer=with_peer))
    return Group(Text(heading(run), "bold"), table)


def heading(run: Run) -> str:
    """Return the commit, the machine and the time."""
    changed = " with changes" if run.dirty else ""
    quick = ", quick" if run.quick else ""
    return f"{run.commit[:10]}{changed} on {run.machine}, Python {run.python}, {run.ended}{quick}"


def amount(value: float, unit: str = "") -> str:
    """Return a figure with three significant digits, and its unit."""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def times(ratio: float | None) -> str:
    """Return a ratio with two decimals, or with two digits if it is small."""
    if ratio is None:
        return ""
    return f"× {ratio:.2g}" if 0 < ratio < 0.1 else f"× {ratio:.2f}"


def _cells(row: Row, *, with_peer: bool) -> list[str]:
    reference = "" if row.reference is None else f"{amount(row.reference)} {row.reference_name}"
    cells = [f"  {row.what}", amount(row.value, row.unit), reference, times(row.ratio)]
    if with_peer:
        cells += ["" if row.peer is None else amount(row.peer), times(row.peer_ratio)]
    return [*cells, row.remark]
