"""The command line of `mgpu simulate`."""

import os
import sys
from pathlib import Path

import click
import orjson
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mgpu.cli.picture import card_map
from mgpu.cli.setup import read_settings
from mgpu.settings import CARD_POLICIES, NODE_POLICIES
from playground.simulate.documents import read
from playground.simulate.pipeline import Outcome, Result, result_json, simulate
from playground.simulate.world import read_world

EXAMPLES = """
\b
Examples:
  mgpu simulate nodes.yaml pods.yaml
  mgpu simulate cluster.yaml --card-policy spread -o json
  kubectl get nodes,devices,pods -A -o yaml | mgpu simulate - --fail-on-pending
"""


@click.command(epilog=EXAMPLES)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--card-policy", type=click.Choice(CARD_POLICIES), help="Holds over the settings'.")
@click.option("--node-policy", type=click.Choice(NODE_POLICIES), help="Holds over the settings'.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--fail-on-pending", is_flag=True, help="Exit with 1 where a pod finds no node.")
def command(
    files: tuple[str, ...],
    config: Path | None,
    card_policy: str | None,
    node_policy: str | None,
    output: str,
    *,
    fail_on_pending: bool,
) -> None:
    """Place the pods of FILEs on their nodes without a cluster: would they fit, where, and why not.

    Files hold Kubernetes objects (Node, Device, Pod, Deployment, StatefulSet, Job, List) in YAML or JSON; `-` is
    standard input. Pods with spec.nodeName run already, the others are submitted in order. Exit code 0 whenever the
    input could be read, else 2.
    """
    settings = read_settings(config, os.environ, {"card_policy": card_policy, "node_policy": node_policy})
    world = read_world(read(files, sys.stdin), _note)
    result = simulate(world, settings, _note)
    if output == "json":
        click.echo(orjson.dumps(result_json(result), option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(_shown(result))
    if fail_on_pending and any(outcome.pending for outcome in result.outcomes):
        raise SystemExit(1)


def _note(line: str) -> None:
    click.echo(line, err=True)


def _shown(result: Result) -> Group:
    pods = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("POD", "NODE", "CARDS", "WHY"):
        pods.add_column(heading, overflow="fold", no_wrap=heading != "WHY")
    for outcome in result.outcomes:
        pods.add_row(Text(outcome.pod.key), *_row(outcome))
    return Group(pods, Text(), card_map(result.nodes))


def _row(outcome: Outcome) -> tuple[Text, Text, Text]:
    if outcome.denied:
        return Text("denied", style="red"), Text(), Text("\n".join(map(str, outcome.denied)))
    if outcome.pending:
        reasons = "\n".join(f"{node}: {reason}" for node, reason in outcome.rejections.items())
        return Text("pending", style="yellow"), Text(), Text(reasons or "there are no nodes")
    cards = [f"{name} {','.join(map(str, given['cards']))}" for name, given in outcome.containers.items()]
    why = "" if outcome.dialect else "asks for no GPU"
    return Text(outcome.node, style="green"), Text("\n".join(cards)), Text(why)
