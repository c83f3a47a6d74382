"""The command `mgpu top`: shows how full the cards are, by node and model, and which pods hold the most.

`mgpu.presentation.utilization` computes the figures, and `mgpu.cli.top_view` has the output for a pipe. Scripts read
the JSON, so its keys must not change.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mgpu.cli.agent_metrics import ASKED_BY_DEFAULT, ClusterWithUse, UseReader
from mgpu.cli.namespaces import namespace_options
from mgpu.cli.sources import ReadingOptions, Sources, read_cluster, reading_options
from mgpu.cli.top_view import (
    ALL,
    NO_CARDS,
    NODES,
    PODS,
    TABLES,
    UsedBy,
    View,
    bytes_text,
    head_lines,
    more_text,
    nothing_held,
    percent_of_card,
    plain_lines,
)
from mgpu.cli.watching import FORMATS, WIDE, Output, show_once_or_watch
from mgpu.presentation import utilization
from mgpu.presentation.claim_views import split_name
from mgpu.presentation.measured_use import NOT_MEASURED, ClusterUse, Used, core_text, describe_unknown, memory_text
from mgpu.presentation.overview import Overview
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.use_figures import use_figures, used_json
from mgpu.presentation.utilization import SORTS, Figures, Holder

EXAMPLES = """
\b
Examples:
  kubectl mgpu top
  kubectl mgpu top --sort memory --limit 5
  kubectl mgpu top pod -n team-a
  kubectl mgpu top -o json | jq '.nodes[] | select(.idle > 0) | .name'
"""
_BAR_WIDTH = 8


@click.command(epilog=EXAMPLES)
@click.argument("table", required=False, type=click.Choice(sorted(TABLES)), metavar="[node|pod]")
@namespace_options
@click.option(
    "--sort",
    "--sort-by",
    "sort",
    type=click.Choice(sorted(SORTS)),
    default="core",
    show_default=True,
    help="The column to sort by; numbers are descending, names ascending.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="The most rows of a table. JSON has all rows.",
)
@click.option(
    "--usage/--no-usage",
    default=None,
    help=f"Whether to ask the agents what is really used.  [default: if at most {ASKED_BY_DEFAULT} nodes have cards]",
)
@reading_options(*FORMATS)
def command(
    table: str | None,
    namespace: str,
    sort: str,
    limit: int,
    *,
    all_namespaces: bool,
    usage: bool | None,
    options: ReadingOptions,
) -> None:
    """Show how full the cards are, for the cluster, each model and each node, and which pods hold the most.

    With `node` or `pod`, only that table is shown. -n leaves only the pods of a namespace, and counts only those that
    wait there; the nodes and models are those of the whole cluster. -o wide shows more columns, and -o name the names
    of the nodes, or with `pod` those of the pods.

    Core is in percent of one card, so two cards have 200%. The figures show what pods hold according to their
    allocation records and, where the node agents measure it, what their processes really use. The used core is the
    utilization of the SMs. A bar shows what is used within what is held. In JSON, "pending" is the number of all GPU
    pods that wait, and "gated" the number of those of them that have scheduling gates. If the agents were asked, each
    row has "inUse": {"core": percent, "memory": bytes}, each null if it is not measured, and "useUnknown" has the
    reason for each node whose use is unknown. The exit code is 1 if the cluster cannot be read, and 2 if an option, the
    kubeconfig or the settings are invalid.
    """
    sources = Sources(options)
    with_use = UseReader(sources.api, sources.scheduler, wanted=usage, namespace=sources.namespace)
    view = View(
        TABLES[table] if table else ALL,
        sort,
        limit,
        "" if all_namespaces else namespace,
        is_wide=options.format == WIDE,
    )
    prints: Output[ClusterWithUse] = Output(
        lambda found: top_json(view, view.overview(found), found.use),
        lambda found: _render(view, view.overview(found), found.use),
        options.format,
        lambda found: plain_lines(view, view.overview(found), found.use),
        lambda found: _object_names(view, view.overview(found)),
    )
    show_once_or_watch(lambda: with_use.read(read_cluster(sources)), prints, options.interval)


def _object_names(view: View, found: Overview) -> list[str]:
    if view.table != PODS:
        return [f"node/{row.name}" for row in view.nodes(found)]
    keys = [split_name(row.pod) for row in view.holders(found)]
    kinds = {True: "resourceclaim", False: "pod"}
    return [f"{kinds[name.startswith('claim ')]}/{name.removeprefix('claim ')}" for _, name in keys]


def top_json(view: View, found: Overview, use: ClusterUse | None) -> dict[str, Any]:
    nodes = view.nodes(found)
    figures = use_figures(found.nodes, use or {})

    def used(amounts: Used) -> dict[str, Any]:
        return {} if use is None else {"inUse": used_json(amounts)}

    models = utilization.by_model(found.nodes)
    unknown = {node: text for node, row in (use or {}).items() if (text := describe_unknown(row))}
    return {
        "cluster": utilization.figures_json(utilization.add("cluster", nodes)) | used(figures.total),
        "fragmentation": utilization.fragmentation_json(utilization.fragmentation(found.nodes)),
        "models": [utilization.figures_json(row) | used(figures.of_model(row.name)) for row in models],
        "nodes": [utilization.figures_json(row) | used(figures.of_node(row.name)) for row in nodes],
        "holders": [utilization.holder_json(row) | used(figures.of_pod(row.pod)) for row in view.holders(found)],
        **({} if use is None else {"useUnknown": unknown}),
        "pending": len(found.pending),
        "gated": len(found.gated),
    }


def _render(view: View, found: Overview, use: ClusterUse | None) -> Group:
    nodes = view.nodes(found)
    total = utilization.add("cluster", nodes)
    if not total.cards:
        return Group(Text(NO_CARDS))
    limit = view.limit
    models = sorted(utilization.by_model(found.nodes), key=SORTS[view.sort])
    figures = use_figures(found.nodes, use or {})
    is_measured = figures.total != NOT_MEASURED
    of_node, of_model, of_pod = (figures.of_node, figures.of_model, figures.of_pod) if is_measured else (None,) * 3
    most = view.holders(found)
    node_parts: list[RenderableType] = [_table("node", nodes[:limit], of_node), *_more(nodes, limit)]
    pod_parts: list[RenderableType] = [_holders(most[:limit], of_pod), *_more(most, limit)] if most else []
    if view.table == NODES:
        return Group(*node_parts)
    if view.table == PODS:
        return Group(*(pod_parts or [Text(nothing_held(view))]))
    styles = ("", "", *([""] if is_measured else []), "cyan")
    lines = head_lines(found, total, figures, use)
    parts: list[RenderableType] = [
        Text(line, style=style) for line, style in zip_longest(lines, styles, fillvalue="yellow")
    ]
    parts.append(Text())
    if len(models) > 1:
        parts += [_table("model", models[:limit], of_model), *_more(models, limit), Text()]
    parts += node_parts
    if pod_parts:
        parts += [Text(), *pod_parts]
    return Group(*parts)


def _table(kind: str, rows: Sequence[Figures], used_by: UsedBy) -> Table:
    note = "used/held/all" if used_by else ""
    table = _bare(kind, "cards", "idle", "core", note, "memory", note)
    for row in rows:
        unhealthy = f" {row.unhealthy}✗" if row.unhealthy else ""
        core = f"{percent_of_card(row.core_used)} / {percent_of_card(row.core)}"
        memory = f"{bytes_text(row.memory_used)} / {bytes_text(row.memory)}"
        used = NOT_MEASURED
        if used_by:
            used = used_by(row.name)
            core = core_text(used.core, row.core_used, row.core)
            memory = memory_text(used.memory, row.memory_used, row.memory)
        table.add_row(
            one_line(row.name),
            f"{row.cards}{unhealthy}",
            str(row.idle),
            *_bar(row.core_used, used.core, row.core, core),
            *_bar(row.memory_used, used.memory, row.memory, memory),
        )
    return table


def _bar(held: int, used: int | None, total: int, text: str) -> tuple[Text, str]:
    """Return a bar of what is held, and the text. If it is known what is used, only that part is drawn solid."""
    share = held / total if total else 0.0
    full = round(share * _BAR_WIDTH)
    solid = full if used is None else min(full, round(used / total * _BAR_WIDTH) if total else 0)
    style = "green"
    if share >= 0.95:
        style = "red"
    elif share >= 0.7:
        style = "yellow"
    parts = (("█" * solid, style), ("▒" * (full - solid), style), ("░" * (_BAR_WIDTH - full), "grey50"))
    return Text.assemble(*parts), text


def _holders(rows: Sequence[Holder], used_by: UsedBy) -> Table:
    note = "\nused/held" if used_by else ""
    table = _bare("pod", "cards", f"core{note}", f"memory{note}", "node", "requested as")
    for row in rows:
        core = percent_of_card(row.core)
        memory = bytes_text(row.memory)
        if used_by:
            used = used_by(row.pod)
            core = core_text(used.core, row.core)
            memory = memory_text(used.memory, row.memory)
        table.add_row(row.pod, str(row.cards), core, memory, ", ".join(row.nodes), row.dialect)
    return table


def _bare(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="grey50")
    for name in names:
        right = name in ("cards", "idle")
        table.add_column(name, overflow="fold", justify="right" if right else "left")
    return table


def _more(rows: Sequence[object], limit: int) -> list[Text]:
    text = more_text(rows, limit)
    return [Text(text, style="grey50")] if text else []
