"""`mgpu inspect`: nodes, cards and who holds what, read from the cluster."""

import os
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console, Group, RenderableType
from rich.text import Text

from mgpu.cli.overview import Overview, nodes_json, overview
from mgpu.cli.picture import card_map
from mgpu.cli.setup import read_settings
from mgpu.kube import Api, ApiError, Unreachable

_DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"

EXAMPLES = """
\b
Examples:
  mgpu inspect
  mgpu inspect node-1 node-2
  mgpu inspect -o json | jq '.nodes[].cards[] | select(.healthy | not)'
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NODE...]")
@click.option("--kubeconfig", default="", help="The cluster to look at.  [default: as kubectl chooses it]")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(names: tuple[str, ...], kubeconfig: str, config: Path | None, output: str) -> None:
    """Show nodes, cards and who holds what, as the pods' own records say; nothing is written.

    Exit code 1 where a NODE is not there or the cluster does not answer.
    """
    settings = read_settings(config, os.environ, {})
    try:
        nodes, devices, pods = _objects(Api.connect(kubeconfig))
    except (ApiError, Unreachable) as error:
        raise click.ClickException(str(error)) from error
    found = overview(nodes, devices, pods, settings)
    unknown = sorted(set(names) - {node.name for node in found.nodes})
    if unknown:
        raise click.ClickException(f"no node is named {', '.join(unknown)}")
    if names:
        found = Overview(tuple(node for node in found.nodes if node.name in names), found.pending, found.unclear)
    if output == "json":
        click.echo(orjson.dumps(_json(found), option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(_shown(found))


def _objects(api: Api) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    nodes, _ = api.list("/api/v1/nodes")
    pods, _ = api.list("/api/v1/pods")
    try:
        devices, _ = api.list(_DEVICES)
    except ApiError as error:
        if error.status != 404:  # the kind is not there: nodes may still say what cards they have
            raise
        devices = []
    return nodes, devices, pods


def _json(found: Overview) -> dict[str, Any]:
    return {"nodes": nodes_json(found.nodes), "pending": list(found.pending), "unclear": dict(found.unclear)}


def _shown(found: Overview) -> Group:
    parts: list[RenderableType] = [card_map(found.nodes)]
    if found.pending:
        parts.append(Text(f"Waiting for cards: {', '.join(found.pending)}", style="yellow"))
    parts += (Text(f"{what}: {why}", style="bold red") for what, why in found.unclear.items())
    return Group(*parts)
