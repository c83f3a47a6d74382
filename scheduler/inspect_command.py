"""The command `mgpu inspect`: shows the cards of a cluster, the pods that hold them, and the pods and gangs that wait.

`mgpu.cli.inspect` renders the output. The command is in this package because only the engine knows why the next member
of a gang does not fit. Without a scheduler to ask, it runs the engine itself, if pods of a gang wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import click

from mgpu.cli import completion
from mgpu.cli.agent_metrics import ClusterWithUse, UseReader
from mgpu.cli.cluster_objects import ClusterLists, Raw
from mgpu.cli.inspect import NO_NODES, overview_json, overview_lines, render_overview
from mgpu.cli.namespaces import namespace_options, only_namespace
from mgpu.cli.sources import Reading, ReadingOptions, Sources, read_cluster, reading_options
from mgpu.cli.watching import FORMATS, WIDE, Output, show_once_or_watch
from mgpu.kube import Api
from mgpu.model.gangs import gang_name
from mgpu.model.pods import read_pod
from mgpu.presentation.answers import ClusterAnswer
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.overview import Overview
from mgpu.settings import Settings

EXAMPLES = """
\b
Examples:
  mgpu inspect
  mgpu inspect node-1 node-2
  mgpu inspect --usage node-1
  mgpu inspect -n team-a -o wide
  mgpu inspect -o json | jq '.nodes[].cards[] | select(.healthy | not)'
  mgpu inspect -o json | jq '.accounting["node-1"].gpuids'
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NODE...]", shell_complete=completion.nodes)
@namespace_options
@click.option("--usage", is_flag=True, help="Also ask the agents of these nodes what is really used of the cards.")
@reading_options(*FORMATS)
def command(
    names: tuple[str, ...],
    *,
    namespace: str,
    all_namespaces: bool,
    usage: bool,
    options: ReadingOptions,
) -> None:
    """Show nodes, cards and the pods that hold them, as recorded in the pods' annotations. Nothing is written.

    A terminal shows a map of the cards. A pipe gets a table with a line for each card, and so does -o wide, with more
    columns. -o name prints the nodes. With -n, only the nodes remain where pods of that namespace hold cards, and of
    the waiting pods those of that namespace. NODE may be node/NAME.

    If there are MtgpuPods, a second table shows, for each node, the number of idle whole cards, and for each GPUID what
    is left of its card. In JSON, "accounting" has for each node {"free": cards, "gpuids": [{"gpuid", "card": index,
    "core": percent left, "memory": bytes left}]}, and "mtgpupods" has for each namespace/name {"node", "gpuid", "card":
    UUID, "phase", "reason", "message", "degraded"}. A node whose mgpu agent is not ready gets no new GPU pods;
    "agentsNotReady" has for each such node {"pod", "reason", "since"}. "pending" lists all pods that wait; "gated" has
    for those of them that have scheduling gates the names of the gates. "gangs" has for each gang that is not complete
    {"namespace", "name", "source", "needed", "placed", "waiting", "gated", "missing", "fits", "misfit": {"pod",
    "reason"}}. With --usage, "usage" has for each node {"unknown": reason or null, "cards": [{"index", "uuid", "used",
    "pods": [{"pod", "held", "used"}]}], "containers"}, where "used" is {"core": percent, "memory": bytes}, each null if
    it is not measured.

    The exit code is 1 if a NODE does not exist or the cluster cannot be read, and 2 if an option, the kubeconfig or the
    settings are invalid.
    """
    sources = Sources(options)
    with_use = UseReader(sources.api, sources.scheduler, wanted=usage, namespace=sources.namespace)
    wanted = [name.removeprefix("node/") for name in names]
    of_namespace = "" if all_namespaces else namespace

    def read() -> Reading[ClusterWithUse] | None:
        found = read_cluster(sources, _incomplete_gangs)
        if found is None:
            return with_use.read(None)
        return with_use.read(replace(found, value=only_namespace(_only(found.value, wanted), of_namespace)))

    empty = f"No pod of namespace {of_namespace} holds a card." if of_namespace else NO_NODES

    def lines(found: ClusterWithUse) -> Iterator[str]:
        if not found.answer.overview.nodes:
            click.echo(empty, err=True)  # As kubectl does, so that a program reads no row.
        return overview_lines(found.answer.overview, found.answer.gangs, found.use, is_wide=options.format == WIDE)

    prints: Output[ClusterWithUse] = Output(
        lambda found: overview_json(found.answer.overview, found.answer.gangs, found.use),
        lambda found: render_overview(found.answer.overview, found.answer.gangs, found.use, empty=empty),
        options.format,
        lines,
        lambda found: [f"node/{node.name}" for node in found.answer.overview.nodes],
    )
    show_once_or_watch(read, prints, options.interval)


def _only(answer: ClusterAnswer, names: Sequence[str]) -> ClusterAnswer:
    """Return the answer with only these nodes; all nodes if there are no names. Raises ClickException."""
    if not names:
        return answer
    overview = answer.overview
    unknown = sorted(set(names) - {node.name for node in overview.nodes})
    if unknown:
        raise click.ClickException(f"no node is named {', '.join(unknown)}")
    return replace(
        answer, overview=replace(overview, nodes=tuple(node for node in overview.nodes if node.name in names))
    )


def _incomplete_gangs(api: Api, settings: Settings, lists: ClusterLists, overview: Overview) -> Sequence[GangView]:
    """Return the gangs that are not complete, from lists of the API server."""
    waiting = frozenset(overview.pending)
    if not any(_is_in_gang(raw) for raw in lists.pods if _key(raw) in waiting):
        return ()
    from scheduler.listed_cluster import incomplete_gangs

    return incomplete_gangs(api, settings, lists, overview)


def _is_in_gang(raw: Raw) -> bool:
    return gang_name(read_pod(raw)) is not None


def _key(raw: Raw) -> str:
    return f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
