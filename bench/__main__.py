"""Runs the benchmark: `make bench`, or `python -m bench [SECTION…]` for some sections.

It prints one table, and appends the run to the history (`bench/history.py`).
"""

import sys
import time

import click

from bench import history, tables
from bench.history import Measured
from bench.rows import Options, Skipped
from bench.sections import LONG, SECTIONS, measure, title


@click.command()
@click.argument("sections", nargs=-1, type=click.Choice(SECTIONS))
@click.option("--nodes", multiple=True, type=click.IntRange(min=1), help="Number of nodes to measure with; repeatable.")
@click.option("--quick", is_flag=True, help="Measure a fifth as often. The figures vary more.")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one line of JSON, and do not keep it.")
@click.option("--list", "only_list", is_flag=True, help="Print the names of the sections, and what they measure.")
def main(sections: tuple[str, ...], nodes: tuple[int, ...], *, quick: bool, as_json: bool, only_list: bool) -> None:
    """Measure mgpu: the named sections, or all that do not take long."""
    if only_list:
        for section in SECTIONS:
            click.echo(f"{section:18} {title(section)}")
        return
    options = Options(nodes, quick)
    found: list[Measured] = []
    try:
        for section in sections or (one for one in SECTIONS if one not in LONG):
            click.echo(f"{section} …", err=True)
            found.append(_measured(section, options))
    finally:
        # If a section fails, what was measured before it is still worth reading, but it is not kept.
        run = history.new_run(options, tuple(found))
        if as_json:
            click.echo(history.to_json(run))
        else:
            tables.console().print(tables.run_table(run))
    if not as_json:
        history.append(history.history_file(), run)


def _measured(section: str, options: Options) -> Measured:
    began = time.monotonic()
    try:
        rows = measure(section, options)
    except Skipped as reason:
        return Measured(section, skipped=str(reason))
    return Measured(section, rows, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    sys.exit(main())
