"""The command `mgpu inspect`: shows the cards of a cluster and the pods that hold them.

Scripts read the JSON, so its keys must not change. The table may change. `mgpu top` calls `read_cluster` too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mgpu.cli import cluster_objects
from mgpu.cli.connection import cluster_options, read_installed_settings, report_api_errors
from mgpu.kube import Api
from mgpu.model.groups import format_group_cards
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import nodes_json
from mgpu.presentation.mtgpupod_tables import NodeAccount, account_nodes, accounting_json, mtgpupods_json
from mgpu.presentation.overview import GroupView, Overview, make_overview
from mgpu.presentation.plain_text import join_names, one_line
from mgpu.presentation.request_text import describe_gates
from mgpu.presentation.terminal import show, show_json

_MOST_GROUP_CARDS = 4  # The cards of a larger group are only counted.
_MOST_PODS = 20

EXAMPLES = """
\b
Examples:
  mgpu inspect
  mgpu inspect node-1 node-2
  mgpu inspect -o json | jq '.nodes[].cards[] | select(.healthy | not)'
  mgpu inspect -o json | jq '.accounting["node-1"].gpuids'
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NODE...]")
@cluster_options
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).  [default: the cluster's]")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(names: tuple[str, ...], kubeconfig: str, context: str, config: Path | None, output: str) -> None:
    """Show nodes, cards and the pods that hold them, as recorded in the pods' annotations. Nothing is written.

    If there are MtgpuPods, a second table shows, for each node, the number of idle whole cards, and for each GPUID what
    is left of its card. In JSON, "accounting" has for each node {"free": cards, "gpuids": [{"gpuid", "card": index,
    "core": percent left, "memory": bytes left}]}, and "mtgpupods" has for each namespace/name {"node", "gpuid", "card":
    UUID, "phase", "reason", "message", "degraded"}. A node whose mgpu agent is not ready gets no new GPU pods;
    "agentsNotReady" has for each such node {"pod", "reason", "since"}. "pending" lists all pods that wait; "gated" has
    for those of them that have scheduling gates the names of the gates.

    The exit code is 1 if a NODE does not exist or the cluster cannot be read, and 2 if an option, the kubeconfig or the
    settings are invalid.
    """
    cluster = read_cluster(kubeconfig, context, config)
    unknown = sorted(set(names) - {node.name for node in cluster.nodes})
    if unknown:
        raise click.ClickException(f"no node is named {', '.join(unknown)}")
    if names:
        cluster = replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name in names))
    if output == "json":
        show_json(_json(cluster))
    else:
        show(render_overview(cluster))


def read_cluster(kubeconfig: str, context: str, config: Path | None) -> Overview:
    """Return a snapshot of the cluster.

    Raises:
        ClickException: if the API server does not answer, or answers with an error.
        BadObject: if the kubeconfig or the settings are invalid.
    """
    with report_api_errors(), cluster_objects.paused_garbage_collection():
        api = Api.connect(kubeconfig, context=context)
        settings, _ = read_installed_settings(api, config)
        return make_overview(
            cluster_objects.nodes(api),
            cluster_objects.devices(api),
            cluster_objects.pods(api),
            settings,
            cluster_objects.unhealthy_lists(api),
            cluster_objects.mtgpupods(api),
        )


def _json(cluster: Overview) -> dict[str, Any]:
    return {
        "nodes": nodes_json(cluster.nodes),
        "accounting": accounting_json(account_nodes(cluster.nodes)),
        "pending": list(cluster.pending),
        "gated": {pod: list(gates) for pod, gates in cluster.gated.items()},
        "unclear": dict(cluster.unclear),
        "dialects": {use.pod: use.dialect for node in cluster.nodes for device in node.devices for use in device.uses},
        "wishes": {pod: constraints.texts() for pod, constraints in cluster.constraints.items()},
        "groups": [
            {
                "wish": view.group.constraint,
                "namespace": view.group.namespace,
                "name": view.group.name,
                "pods": list(view.pods),
                "cards": [card._asdict() for card in view.cards],
            }
            for view in cluster.groups
        ],
        "mtgpupods": mtgpupods_json(cluster.mtgpupods),
        "agentsNotReady": {
            node: {"pod": pod.name, "reason": pod.problem, "since": pod.since}
            for node, pod in cluster.agents_not_ready.items()
        },
    }


def render_overview(cluster: Overview) -> Group:
    """Return the card map, and below it the table of GPUIDs, the waiting pods, the groups and the problems."""
    parts: list[RenderableType] = [card_map(cluster.nodes) if cluster.nodes else Text("There are no nodes.")]
    accounts = account_nodes(cluster.nodes)
    if cluster.mtgpupods or any(account.gpuids for account in accounts):
        parts += [Text(), _table(accounts), Text()]
    if cluster.pending:
        reasons = {v.pod.key: ": ".join(filter(None, (f"GPUID {v.pod.gpuid}", v.reason))) for v in cluster.mtgpupods}
        waiting = [
            _with_constraints(pod, cluster.constraints.get(pod, NO_CONSTRAINTS), reasons.get(pod, ""))
            for pod in cluster.pending
            if pod not in cluster.gated
        ]
        parts += _names("Waiting for cards", waiting)
        parts += _names(
            "Waiting for scheduling gates",
            [f"{pod} ({describe_gates(gates)})" for pod, gates in cluster.gated.items()],
        )
    parts += _lines(map(_group, cluster.groups), "")
    degraded = (f"MtgpuPod {view.pod.key}: degraded: {view.degraded}" for view in cluster.mtgpupods if view.degraded)
    parts += _lines(degraded, "bold red")
    silent = (f"{node}: its mgpu agent is not ready ({pod.problem})" for node, pod in cluster.agents_not_ready.items())
    parts += _lines(silent, "bold red")
    parts += _lines((f"{what}: {why}" for what, why in cluster.unclear.items()), "bold red")
    return Group(*parts)


def _names(title: str, pods: Sequence[str]) -> Iterator[Text]:
    """Yield a line with at most `_MOST_PODS` of the pods; nothing if there are none."""
    if pods:
        yield Text(one_line(f"{title}: {join_names(pods, _MOST_PODS)}"), style="yellow")


def _lines(texts: Iterable[str], style: str) -> Iterator[Text]:
    """Yield at most `_MOST_PODS` lines, and one more line with the number of the others, if any."""
    lines = list(texts)
    yield from (Text(one_line(line), style=style) for line in lines[:_MOST_PODS])
    if len(lines) > _MOST_PODS:
        yield Text(f"… and {len(lines) - _MOST_PODS:,} more (-o json has all)", style=style)


def _table(accounts: tuple[NodeAccount, ...]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="grey50")
    for name in ("node", "free cards", "GPUID", "card", "core left", "memory left"):
        table.add_column(name, overflow="fold", justify="left" if name in ("node", "GPUID") else "right")
    for account in accounts:
        rows = [
            (left.gpuid, str(left.card), format_core(left.core), format_bytes(left.memory)) for left in account.gpuids
        ]
        for i, row in enumerate(rows or [("", "", "", "")]):
            table.add_row(*((account.node, str(account.free)) if i == 0 else ("", "")), *row)
    return table


def _with_constraints(pod: str, constraints: Constraints, reason: str) -> str:
    note = reason or (str(constraints) if constraints != NO_CONSTRAINTS else "")
    return f"{pod} ({note})" if note else pod


def _group(view: GroupView) -> str:
    """Return a line such as `same-card-group team/pair: 2 pods on card 0 of n1`."""
    constraint, namespace, name = view.group
    pods = f"{len(view.pods)} pod{'' if len(view.pods) == 1 else 's'}"
    nodes = len({card.node for card in view.cards})
    cards = f"{len(view.cards)} cards of {nodes} nodes"
    if len(view.cards) <= _MOST_GROUP_CARDS:
        cards = format_group_cards(view.cards)
    return f"{constraint} {namespace}/{name}: {pods} on {cards}"
