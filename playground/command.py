"""What `mgpu playground` and `mgpu demo` have in common: options, start-up, what is told, and a clean stop."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mgpu.kube import ApiError, Unreachable
from playground.cluster import Cluster
from playground.nodes import make_nodes, slice_nodes, two_cards
from playground.processes import StartError


def options(nodes: int = 1, cards: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--nodes and --cards, at least so many, and --config."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--config", type=click.Path(path_type=Path), help="Settings of the real processes (YAML)."),
            click.option("--cards", type=click.IntRange(cards), default=4, show_default=True, help="Cards per node."),
            click.option(
                "--nodes",
                type=click.IntRange(nodes),
                default=3,
                show_default=True,
                help="Nodes; the last of several takes multi-GPU pods.",
            ),
        ):
            function = option(function)
        return function

    return decorated


@contextmanager
def stopping(interrupted: int = 128 + signal.SIGINT) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the program in order; the exit code is `interrupted`, else 128 + signal."""

    def stop(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # once is enough: the stop itself is not interrupted
        raise SystemExit(interrupted if number == signal.SIGINT else 128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def up(console: Console, nodes: int, cards: int, config: Path | None) -> Iterator[Cluster]:
    """A cluster that is ready; one line says of what. A start that fails is a ClickException with the log's end."""
    cluster = Cluster([*make_nodes(nodes, cards), *slice_nodes(), two_cards()], config=config)
    what = "A real API server" if cluster.assets else "An API server"
    plus = "a card for MIG, one for MPS, two for MtgpuPods"
    console.print(f"{what}, {nodes} × {cards} cards, {plus}, webhook, scheduler and node agents are starting …")
    try:
        cluster.__enter__()
    except (StartError, ApiError, Unreachable, OSError) as error:
        raise click.ClickException(str(error)) from error
    try:
        yield cluster
    finally:
        cluster.__exit__(None, None, None)


def show(console: Console, title: str, told: Mapping[str, str], *, good: bool) -> None:
    """What happened, as a table of a few words each; `good` as a mark before the title."""
    console.print()
    mark = Text("✓ " if good else "✗ ", style="bold green" if good else "bold red")
    console.print(Text.assemble(mark, (title, "bold")))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="grey50", no_wrap=True)
    table.add_column(overflow="fold")
    for what, text in told.items():
        table.add_row(f"  {what}", Text(text))
    console.print(table)
