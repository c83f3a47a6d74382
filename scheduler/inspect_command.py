"""The command `mgpu inspect`: shows the cards of a cluster, the pods that hold them, and the pods and gangs that wait.

`mgpu.cli.inspect` renders the output. The command is in this package because only the engine knows why the next member
of a gang does not fit. It runs the engine only if pods of a gang wait.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import click

from mgpu.cli import cluster_objects
from mgpu.cli.cluster_objects import ClusterLists
from mgpu.cli.connection import cluster_options, read_installed_settings, report_api_errors
from mgpu.cli.inspect import overview_json, overview_of, render_overview
from mgpu.kube import Api
from mgpu.model.gangs import POD_GROUP_PATHS, gang_name
from mgpu.model.pods import read_pod
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.terminal import show, show_json
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.listed_cluster import fill_cache

_MOST_OUTLOOKS = 20
"""The most gangs for which the engine examines which members fit."""

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
    for those of them that have scheduling gates the names of the gates. "gangs" has for each gang that is not complete
    {"namespace", "name", "source", "needed", "placed", "waiting", "gated", "missing", "fits", "misfit": {"pod",
    "reason"}}.

    The exit code is 1 if a NODE does not exist or the cluster cannot be read, and 2 if an option, the kubeconfig or the
    settings are invalid.
    """
    with report_api_errors(), cluster_objects.paused_garbage_collection():
        api = Api.connect(kubeconfig, context=context)
        settings, _ = read_installed_settings(api, config)
        lists = cluster_objects.read_lists(api)
        cluster = overview_of(lists, settings)
        gangs = _incomplete_gangs(api, settings, lists, cluster.pending)
    unknown = sorted(set(names) - {node.name for node in cluster.nodes})
    if unknown:
        raise click.ClickException(f"no node is named {', '.join(unknown)}")
    if names:
        cluster = replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name in names))
    if output == "json":
        show_json(overview_json(cluster, gangs))
    else:
        show(render_overview(cluster, gangs))


def _incomplete_gangs(
    api: Api, settings: Settings, lists: ClusterLists, pending: Collection[str]
) -> Sequence[GangView]:
    """Return the gangs that are not complete, sorted by name, the first of them with their outlook."""
    waiting = frozenset(pending)
    pods = (read_pod(raw) for raw in lists.pods if _key(raw) in waiting)
    names = {name for pod in pods if (name := gang_name(pod)) is not None}
    if not names:
        return ()
    state = ClusterCache(settings)
    nodes = fill_cache(state, lists)
    for source in sorted({name.source for name in names} & POD_GROUP_PATHS.keys()):
        for raw in cluster_objects.pod_groups(api, source):
            state.gangs.pod_group_changed(source, raw)
    filter_ = Filter(state, settings, budgets=EffortBudgets(sleep=lambda _: None))
    state.forecast.refresh()
    filter_.refresh()
    outlooks = GangOutlooks(state, filter_, settings)
    views = outlooks.incomplete(state.gpu_pods())
    examined = [outlooks.with_outlook(view, nodes) for view in views[:_MOST_OUTLOOKS]]
    return (*examined, *views[_MOST_OUTLOOKS:])


def _key(raw: cluster_objects.Raw) -> str:
    return f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
