"""`kubectl inspect gpushare`: GPU memory by node and card, in units of `aliyun.com/gpu-mem`.

A replacement for gpushare's own kubectl plugin, for its users and their scripts. It counts pods of all vocabularies.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mgpu.cli import cluster_objects
from mgpu.cli.connection import report_api_errors
from mgpu.cli.main import BadInput
from mgpu.cli.process_settings import UNITS, read_settings
from mgpu.dialects import gpushare
from mgpu.kube import Api
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Amount, GpuRequest, peak
from mgpu.model.pods import Pod, read_node, read_pod
from mgpu.presentation.card_views import NodeView
from mgpu.presentation.gpushare_tables import CardRow, NodeRow, PodRow, details, summary
from mgpu.presentation.overview import make_overview, read_request
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import show_json
from mgpu.settings import Settings

Raw = Mapping[str, Any]

_MOST_GIB = 1024
"""A node that reports more units than this per card counts in MiB."""

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
@click.option("--kubeconfig", default="", help="The cluster to look at.  [default: as kubectl chooses it]")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--memory-unit", type=click.Choice(UNITS, case_sensitive=False), help="[default: as the nodes count]")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(
    name: str | None, detailed: bool, kubeconfig: str, config: Path | None, memory_unit: str | None, output: str
) -> None:
    """Show how much GPU memory of each node and card is allocated, as the pods' own records say.

    Exit code 1 where NODE is not there or the cluster does not answer.
    """
    try:
        settings = read_settings(config, os.environ, {"memory_unit": memory_unit})
        with report_api_errors(), cluster_objects.paused_garbage_collection():
            api = Api.connect(kubeconfig)
            nodes, pods = list(cluster_objects.nodes(api)), list(cluster_objects.pods(api))
            if not memory_unit:
                settings = in_unit(settings, unit_of_nodes(nodes))
            rows = node_rows(nodes, cluster_objects.devices(api), pods, settings, cluster_objects.mtgpupods(api))
    except BadObject as error:
        raise BadInput(str(error)) from error
    if name and not any(node["metadata"]["name"] == name for node in nodes):
        raise click.ClickException(f"no node is named {name}")
    rows = [row for row in rows if name in (None, row.name)]
    unit = settings.dialects.gpushare.memory_unit
    if output == "json":
        answer = {"unit": unit, "nodes": [_json(row) for row in rows]}
        show_json(answer)
    else:
        click.echo(details(rows) if detailed else summary(rows, unit), nl=False)


def unit_of_nodes(nodes: Iterable[Raw]) -> str | None:
    """The unit that the nodes count `gpu-mem` in; None: none of them reports any."""
    per_card = [found[1] for raw in nodes if (found := gpushare.card_units(read_node(raw)))]
    return None if not per_card else "MiB" if max(per_card) > _MOST_GIB else "GiB"


def in_unit(settings: Settings, unit: str | None) -> Settings:
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
) -> list[NodeRow]:
    """The nodes that have GPUs, by name. raws: the cluster's pods."""
    found = make_overview(nodes, devices, raws, settings, mtgpupods=mtgpupods)
    addresses = {str(raw["metadata"]["name"]): _address(raw) for raw in nodes}
    pods = [pod for raw in raws if (pod := read_pod(raw)).node and not pod.ended and f"Pod {pod.key}" in found.unclear]
    rows = []
    for view in found.nodes:
        waiting = {pod.key: _asked(pod, settings) for pod in pods if pod.node == view.name}
        row = _node(view, addresses[view.name], waiting, gpushare.unit_bytes(settings))
        rows += [row] if row.cards else []
    return rows


def _node(view: NodeView, address: str, waiting: Mapping[str, int], unit: int) -> NodeRow:
    """waiting: bytes that pods ask for which do not, or not all, stand on a card of the node for certain."""
    held: dict[str, dict[int, int]] = {}
    left = dict(waiting)
    cards = []
    for view_of_card in view.cards:
        card, used = view_of_card.state.card, 0
        for use in view_of_card.uses:
            if use.certain or use.pod not in waiting:
                held.setdefault(use.pod, {})[card.index] = gpushare.held_units(use.memory, card, unit)
                left[use.pod] = max(0, left.get(use.pod, 0) - use.memory)
                used += use.memory
        cards.append(CardRow(card.index, card.memory // unit, gpushare.held_units(used, card, unit)))
    pods = [_pod(key, held.get(key, {}), -(-left[key] // unit)) for key in left if key in held or left[key]]
    pods.sort(key=lambda pod: (min(pod.cards, default=-1), pod.namespace, pod.name))
    return NodeRow(view.name, address, tuple(cards), tuple(pods))


def _pod(key: str, cards: Mapping[int, int], pending: int) -> PodRow:
    namespace, _, name = key.partition("/")
    return PodRow(namespace, name, cards, pending)


def _asked(pod: Pod, settings: Settings) -> int:
    """Return the bytes of GPU memory that the pod requests, whole cards aside; 0 if its request is unreadable."""
    request = read_request(pod, settings)
    amounts = (
        ((c.stage, Amount(memory=c.memory * c.cards)) for c in request.containers)
        if isinstance(request, GpuRequest)
        else ()
    )
    return peak(amounts).memory


def _address(raw: Raw) -> str:
    rows = (raw.get("status") or {}).get("addresses") or []
    known = {row.get("type"): str(row.get("address")) for row in reversed(rows)}
    return one_line(known.get("InternalIP") or next(iter(reversed(known.values())), "unknown"))


def _json(row: NodeRow) -> dict[str, Any]:
    """Return the JSON of gpushare's extender for `/inspect`, with additional fields."""
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
