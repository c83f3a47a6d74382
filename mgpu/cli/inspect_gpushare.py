"""The command `kubectl inspect gpushare`: shows GPU memory by node and card, in units of `aliyun.com/gpu-mem`.

The command replaces gpushare's own kubectl plugin. The scripts of that plugin's users read the output, so it must not
change. The command counts the pods of all vocabularies.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mgpu.cli import cluster_objects
from mgpu.cli.connection import Connection, report_api_errors
from mgpu.cli.kubectl_options import cluster_options
from mgpu.cli.main import BadInput
from mgpu.cli.process_settings import UNITS, read_settings
from mgpu.dialects import gpushare
from mgpu.kube import Api
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Amount, GpuRequest, peak
from mgpu.model.pods import Pod, read_node, read_pod
from mgpu.presentation.card_views import NodeView
from mgpu.presentation.claim_views import NO_CLAIMS, ClaimViews, read_claims, split_name
from mgpu.presentation.gpushare_tables import CardRow, NodeRow, PodRow, details, summary
from mgpu.presentation.overview import make_overview, read_request
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import show_json, show_yaml
from mgpu.settings import Settings

Raw = Mapping[str, Any]

_MOST_GIB = 1024
"""The most GiB that a card can have. If a node reports more units per card, the unit of gpu-mem must be MiB."""

EXAMPLES = """
\b
Examples:
  kubectl inspect gpushare
  kubectl inspect gpushare -d
  kubectl inspect gpushare -d node-1
  kubectl inspect gpushare -o json | jq '.nodes[].devs[]'
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("name", required=False, metavar="[NODE]")
@click.option("-d", "--details", "detailed", is_flag=True, help="Show every pod.")
@cluster_options
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option(
    "--memory-unit",
    type=click.Choice(UNITS, case_sensitive=False),
    help="The unit of gpu-mem.  [default: that of the nodes]",
)
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
def main(
    name: str | None, detailed: bool, connection: Connection, config: Path | None, memory_unit: str | None, output: str
) -> None:
    """Show how much GPU memory of each node and card is allocated, according to the allocation records of the pods.

    The exit code is 1 if NODE does not exist or the cluster cannot be read, and 2 if an option, the kubeconfig or the
    settings are invalid.
    """
    try:
        settings = read_settings(config, os.environ, {"memory_unit": memory_unit})
        with report_api_errors(), cluster_objects.paused_garbage_collection():
            api = connection.connect(10.0, Api)
            nodes = list(cluster_objects.nodes(api))
            pods = list(cluster_objects.pods(api))
            if not memory_unit:
                settings = in_unit(settings, unit_of_nodes(nodes))
            rows = node_rows(
                nodes,
                cluster_objects.devices(api),
                pods,
                settings,
                cluster_objects.mtgpupods(api),
                read_claims(cluster_objects.claims(api)),
            )
    except BadObject as error:
        raise BadInput(str(error)) from error
    if name and not any(node["metadata"]["name"] == name for node in nodes):
        raise click.ClickException(f"no node is named {name}")
    rows = [row for row in rows if name in (None, row.name)]
    unit = settings.dialects.gpushare.memory_unit
    if output in ("json", "yaml"):
        show_data = show_json if output == "json" else show_yaml
        show_data({"unit": unit, "nodes": [_json(row) for row in rows]})
    else:
        click.echo(details(rows) if detailed else summary(rows, unit), nl=False)


def unit_of_nodes(nodes: Iterable[Raw]) -> str | None:
    """Return the unit in which the nodes probably report `gpu-mem`; None if no node has `gpu-mem` and `gpu-count`."""
    per_card = [units[1] for raw in nodes if (units := gpushare.card_units(read_node(raw)))]
    if not per_card:
        return None
    return "MiB" if max(per_card) > _MOST_GIB else "GiB"


def in_unit(settings: Settings, unit: str | None) -> Settings:
    """Return the settings with this unit of `gpu-mem`; None leaves the settings unchanged."""
    if unit is None:
        return settings
    own = settings.dialects.gpushare.model_copy(update={"memory_unit": unit})
    return settings.model_copy(update={"dialects": settings.dialects.model_copy(update={"gpushare": own})})


def node_rows(
    nodes: Sequence[Raw],
    devices: Iterable[Raw],
    raws: Sequence[Raw],
    settings: Settings,
    mtgpupods: Iterable[Raw] = (),
    claims: ClaimViews = NO_CLAIMS,
) -> list[NodeRow]:
    """Return the rows of the nodes with GPUs, sorted by name.

    Args:
        raws: the Pods of the cluster.
    """
    cluster = make_overview(nodes, devices, raws, settings, mtgpupods=mtgpupods, claims=claims)
    addresses = {str(raw["metadata"]["name"]): _address(raw) for raw in nodes}
    pods = [pod for pod in map(read_pod, raws) if pod.node and not pod.ended and f"Pod {pod.key}" in cluster.unclear]
    rows = []
    for view in cluster.nodes:
        requested = {pod.key: _requested_memory(pod, settings) for pod in pods if pod.node == view.name}
        row = _node_row(view, addresses[view.name], requested, gpushare.unit_bytes(settings))
        if row.cards:
            rows.append(row)
    return rows


def _node_row(view: NodeView, address: str, requested: Mapping[str, int], unit: int) -> NodeRow:
    """Return the row of a node.

    Args:
        requested: the pods on the node whose cards are not all known, by `namespace/name`, each with the bytes that it
            requests.
        unit: the bytes of one unit.
    """
    held: dict[str, dict[int, int]] = {}
    pending = dict(requested)
    cards = []
    for card_view in view.cards:
        card = card_view.state.card
        used = 0
        for use in card_view.uses:
            if use.certain or use.pod not in requested:
                held.setdefault(use.pod, {})[card.index] = gpushare.held_units(use.memory, card, unit)
                pending[use.pod] = max(0, pending.get(use.pod, 0) - use.memory)
                used += use.memory
        cards.append(CardRow(card.index, card.memory // unit, gpushare.held_units(used, card, unit)))
    pods = []
    for key in pending:
        if key in held or pending[key]:
            namespace, name = split_name(key)
            pods.append(PodRow(namespace, name, held.get(key, {}), -(-pending[key] // unit)))
    pods.sort(key=lambda pod: (min(pod.cards, default=-1), pod.namespace, pod.name))
    return NodeRow(view.name, address, tuple(cards), tuple(pods))


def _requested_memory(pod: Pod, settings: Settings) -> int:
    """Return the GPU memory that the pod requests in bytes.

    Whole cards and amounts in percent count as 0. The result is 0 if the request cannot be read.
    """
    request = read_request(pod, settings)
    if not isinstance(request, GpuRequest):
        return 0
    return peak((c.stage, Amount(memory=c.memory * c.cards)) for c in request.containers).memory


def _address(raw: Raw) -> str:
    """Return the first internal address of a node, or else another address or `unknown`."""
    rows = (raw.get("status") or {}).get("addresses") or []
    by_type = {row.get("type"): str(row.get("address")) for row in reversed(rows)}
    return one_line(by_type.get("InternalIP") or next(iter(reversed(by_type.values())), "unknown"))


def _json(row: NodeRow) -> dict[str, Any]:
    """Return the JSON that gpushare's extender returns for `/inspect`, with additional fields."""
    return {
        "name": row.name,
        "ipAddress": row.address,
        "totalGPU": row.total,
        "usedGPU": row.used,
        "pending": row.pending,
        "devs": [
            {
                "id": card.index,
                "totalGPU": card.total,
                "usedGPU": card.used,
                "pods": [
                    {"name": pod.name, "namespace": pod.namespace, "usedGPU": pod.cards[card.index]}
                    for pod in row.pods
                    if card.index in pod.cards
                ],
            }
            for card in row.cards
        ],
    }
