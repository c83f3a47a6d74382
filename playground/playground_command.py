"""The command `mgpu playground`, and the functions for options, signals, start and output that `mgpu demo` shares."""

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

from mgpu.cli.process_settings import read_settings
from mgpu.kube import ApiError, Unreachable
from playground.cluster import Cluster
from playground.nodes import make_nodes, slice_nodes, two_cards
from playground.processes import StartError
from playground.samples import EXAMPLES as FOLDER

EXAMPLES = """
\b
Examples:
  mgpu playground
  mgpu playground --nodes 2 --cards 8 --config mgpu.yaml
  KUBEBUILDER_ASSETS=~/envtest/bin mgpu playground      with a real kube-apiserver
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def options(nodes: int = 1, cards: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options --nodes, --cards and --config to a command.

    Args:
        nodes: The least value of --nodes.
        cards: The least value of --cards.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        several = "Number of nodes. The last of several nodes takes multi-GPU pods."
        for option in (
            click.option("--config", type=click.Path(path_type=Path), help="Settings of the real processes (YAML)."),
            click.option("--cards", type=click.IntRange(cards), default=4, show_default=True, help="Cards per node."),
            click.option("--nodes", type=click.IntRange(nodes), default=3, show_default=True, help=several),
        ):
            function = option(function)
        return function

    return decorated


@click.command(epilog=EXAMPLES)
@options()
def command(nodes: int, cards: int, config: Path | None) -> None:
    """Keep a one-machine cluster up for kubectl, until Ctrl-C.

    API server, scheduling loop, kubelets and GPUs are simulated on this machine; the webhook, the scheduler and the
    node agents are the real processes. A container's log is its environment. The exit code is 0 after Ctrl-C, and 1 if
    the cluster does not start.
    """
    console = Console(highlight=False, soft_wrap=True)
    read_settings(config, {}, {})  # an invalid file fails before anything starts
    with stopping(interrupted=0), up(console, nodes, cards, config) as cluster:
        export = Text(f"  export KUBECONFIG={cluster.kubeconfig}", "bold")
        console.print(Text.assemble("Ready. In another terminal:\n\n", export))
        console.print(Text(f"  kubectl get nodes\n  kubectl create -f {FOLDER / 'share.yaml'}\n  kubectl logs share"))
        console.print(Text(f"  kubectl create -f {FOLDER / 'claim.yaml'}\n  kubectl get resourceclaims"))
        console.print(Text(f"  kubectl create -f {FOLDER / 'mtgpupod.yaml'}\n  kubectl get mtgp\n  mgpu inspect\n"))
        console.print(Text(f"The cards as a web page: {cluster.page_url}\n"))
        console.print(Text(f"Logs are in {cluster.logs}. Ctrl-C stops and removes everything."))
        while True:
            signal.pause()


@contextmanager
def stopping(interrupted: int = 128 + signal.SIGINT) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise SystemExit in the context, so that the program cleans up before it ends.

    After SIGINT (Ctrl-C) the exit code is `interrupted`. After another signal it is 128 plus the number of the signal.
    Python sets signal handlers only in the main thread, so enter the context there.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise SystemExit(interrupted if number == signal.SIGINT else 128 + number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def up(console: Console, nodes: int, cards: int, config: Path | None) -> Iterator[Cluster]:
    """Start a cluster, and stop it when the context ends.

    It has `nodes` nodes with `cards` cards each, and further nodes for slices and for MtgpuPods. ResourceClaims are
    enabled.

    Raises ClickException if the cluster does not start. If a process has failed, the message contains the end of its
    log.
    """
    cluster = Cluster([*make_nodes(nodes, cards), *slice_nodes(), two_cards()], config=config, components=("dra",))
    server = "A real API server" if cluster.assets else "An API server"
    plus = "a card for MIG, one for MPS, two for MtgpuPods"
    console.print(f"{server}, {nodes} × {cards} cards, {plus}, webhook, scheduler and node agents are starting …")
    try:
        cluster.__enter__()
    except (StartError, ApiError, Unreachable, OSError) as error:
        raise click.ClickException(str(error)) from error
    try:
        yield cluster
    finally:
        cluster.__exit__(None, None, None)


def show(console: Console, title: str, rows: Mapping[str, str], *, good: bool) -> None:
    """Print a title, and below it a table with a line for each keyword and its text.

    The title has a check mark in front of it if `good` is true, and otherwise a cross.
    """
    console.print()
    mark = Text("✓ " if good else "✗ ", style="bold green" if good else "bold red")
    console.print(Text.assemble(mark, (title, "bold")))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="grey50", no_wrap=True)
    table.add_column(overflow="fold")
    for keyword, text in rows.items():
        table.add_row(f"  {keyword}", Text(text))
    console.print(table)
