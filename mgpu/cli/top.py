"""The command `mgpu top`: shows how full the cards are, by node and model, and which pods hold the most.

`mgpu.presentation.utilization` computes the figures. Scripts read the JSON, so its keys must not change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mgpu.cli.agent_metrics import ASKED_BY_DEFAULT, ClusterWithUse, UseReader, unknown_lines
from mgpu.cli.sources import ReadingOptions, Sources, read_cluster, reading_options
from mgpu.cli.watching import Output, show_once_or_watch
from mgpu.model.quantities import format_bytes
from mgpu.presentation import utilization
from mgpu.presentation.measured_use import NOT_MEASURED, ClusterUse, Used, core_text, describe_unknown, memory_text
from mgpu.presentation.overview import Overview
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.use_figures import use_figures, used_json
from mgpu.presentation.utilization import SORTS, Figures, Fragmentation, Holder

EXAMPLES = """
\b
Examples:
  kubectl mgpu top
  kubectl mgpu top --sort memory --limit 5
  kubectl mgpu top -o json | jq '.nodes[] | select(.idle > 0) | .name'
"""
_BAR_WIDTH = 8
_MOST_REASONS = 5


@click.command(epilog=EXAMPLES)
@click.option(
    "--sort",
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
@reading_options
def command(
    sort: str,
    limit: int,
    *,
    usage: bool | None,
    options: ReadingOptions,
) -> None:
    """Show how full the cards are, for the cluster, each model and each node, and which pods hold the most.

    Core is in percent of one card, so two cards have 200%. The figures show what pods hold according to their
    allocation records and, where the node agents measure it, what their processes really use. The used core is the
    utilization of the SMs. A bar shows what is used within what is held. In JSON, "pending" is the number of all GPU
    pods that wait, and "gated" the number of those of them that have scheduling gates. If the agents were asked, each
    row has "inUse": {"core": percent, "memory": bytes}, each null if it is not measured, and "useUnknown" has the
    reason for each node whose use is unknown. The exit code is 1 if the cluster cannot be read, and 2 if an option, the
    kubeconfig or the settings are invalid.
    """
    sources = Sources(options)
    with_use = UseReader(sources.api, sources.scheduler, wanted=usage)
    prints: Output[ClusterWithUse] = Output(
        lambda found: _json(found.answer.overview, found.use, sort),
        lambda found: _render(found.answer.overview, found.use, sort, limit),
        options.as_json,
    )
    show_once_or_watch(lambda: with_use.read(read_cluster(sources)), prints, options.interval)


def _json(found: Overview, use: ClusterUse | None, sort: str) -> dict[str, Any]:
    nodes = utilization.by_node(found.nodes)
    figures = use_figures(found.nodes, use or {})

    def used(amounts: Used) -> dict[str, Any]:
        return {} if use is None else {"inUse": used_json(amounts)}

    models = utilization.by_model(found.nodes)
    holders = utilization.holders(found.nodes)
    unknown = {node: text for node, row in (use or {}).items() if (text := describe_unknown(row))}
    return {
        "cluster": utilization.figures_json(utilization.add("cluster", nodes)) | used(figures.total),
        "fragmentation": utilization.fragmentation_json(utilization.fragmentation(found.nodes)),
        "models": [utilization.figures_json(row) | used(figures.of_model(row.name)) for row in models],
        "nodes": [
            utilization.figures_json(row) | used(figures.of_node(row.name)) for row in sorted(nodes, key=SORTS[sort])
        ],
        "holders": [utilization.holder_json(row) | used(figures.of_pod(row.pod)) for row in holders],
        **({} if use is None else {"useUnknown": unknown}),
        "pending": len(found.pending),
        "gated": len(found.gated),
    }


def _render(found: Overview, use: ClusterUse | None, sort: str, limit: int) -> Group:
    nodes = sorted(utilization.by_node(found.nodes), key=SORTS[sort])
    total = utilization.add("cluster", nodes)
    if not total.cards:
        return Group(Text("No node has GPU cards (no Device, and no aliyun.com/gpu-mem with gpu-count)."))
    models = utilization.by_model(found.nodes)
    figures = use_figures(found.nodes, use or {})
    is_measured = figures.total != NOT_MEASURED
    of_node, of_model, of_pod = (figures.of_node, figures.of_model, figures.of_pod) if is_measured else (None,) * 3
    parts: list[RenderableType] = [
        *(Text(line) for line in _summary(total, len(found.pending) - len(found.gated), len(found.gated))),
        *([Text(_used_line(figures.total, total))] if is_measured else []),
        Text(free_line(utilization.fragmentation(found.nodes)), style="cyan"),
        *(Text(one_line(line), style="yellow") for line in unknown_lines(use or {})[:_MOST_REASONS]),
        Text(),
    ]
    if len(models) > 1:
        rows = sorted(models, key=SORTS[sort])[:limit]
        parts += [_table("model", rows, of_model), *_more(models, limit), Text()]
    parts += [_table("node", nodes[:limit], of_node), *_more(nodes, limit)]
    most = utilization.holders(found.nodes)
    if most:
        parts += [Text(), _holders(most[:limit], of_pod), *_more(most, limit)]
    return Group(*parts)


def _summary(total: Figures, waiting: int, gated: int) -> list[str]:
    unhealthy = f", {total.unhealthy} unhealthy" if total.unhealthy else ""
    counts = [(waiting, "waiting"), (gated, "gated")]
    (first, *others) = [row for row in counts if row[0]] or [(0, "")]
    pods = f"; {first[0]} GPU pod{_s(first[0])} {first[1]}" if first[0] else ""
    pods += "".join(f", {count} {what}" for count, what in others)
    return [
        f"{total.nodes:,} node{_s(total.nodes)}, {total.cards:,} card{_s(total.cards)} "
        f"({total.idle:,} idle{unhealthy}){pods}",
        f"core {_percent(total.core_share)} of {_core(total.core)}, "
        f"memory {_percent(total.memory_share)} of {_bytes(total.memory)}",
    ]


def free_line(found: Fragmentation) -> str:
    """Return a line with the free capacity, and with how much of it pods cannot use."""
    parts = [f"{found.idle:,} idle card{_s(found.idle)}"] if found.idle else []
    if found.part:
        most = f"at most {_core(found.most_core)} and {_bytes(found.most_memory)} on one"
        amounts = f"{_core(found.part_core)} and {_bytes(found.part_memory)}"
        parts.append(f"{amounts} on {found.part:,} part-used card{_s(found.part)} ({most})")
    useless = [
        *([_core(found.useless_core)] if found.useless_core else []),
        *([_bytes(found.useless_memory)] if found.useless_memory else []),
    ]
    if useless:
        parts.append(
            f"{' and '.join(useless)} where the rest of the card is taken, so that no share of core and memory fits"
        )
    count = found.partitioned
    partitioned = f" ({count:,} partitioned card{_s(count)} not counted)" if count else ""
    return f"Free: {'; '.join(parts) or 'nothing'}{partitioned}"


def _used_line(used: Used, total: Figures) -> str:
    core = "?" if used.core is None else _percent(used.core / total.core if total.core else 0.0)
    memory = "?" if used.memory is None else _percent(used.memory / total.memory if total.memory else 0.0)
    return f"really used: core {core}, memory {memory}"


UsedBy = Callable[[str], Used] | None
"""Returns what is used of the cards of a row, by its name; None if nothing is known of real use."""


def _table(kind: str, rows: Sequence[Figures], used_by: UsedBy) -> Table:
    note = "used/held/all" if used_by else ""
    table = _bare(kind, "cards", "idle", "core", note, "memory", note)
    for row in rows:
        unhealthy = f" {row.unhealthy}✗" if row.unhealthy else ""
        core = f"{_core(row.core_used)} / {_core(row.core)}"
        memory = f"{_bytes(row.memory_used)} / {_bytes(row.memory)}"
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
        core = _core(row.core)
        memory = _bytes(row.memory)
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
    more = len(rows) - limit
    return [Text(f"… and {more:,} more (--limit)", style="grey50")] if more > 0 else []


def _core(milli: int) -> str:
    """Return the percentage of a card for thousandths, such as `1,250%` or `12.5%`."""
    return f"{milli // 10:,}%" if milli % 10 == 0 else f"{milli / 10:,.1f}%"


def _bytes(amount: int) -> str:
    """Return a text such as `64.0 GiB` or `1,140.0 GiB`; from 10 TiB on, the unit is TiB."""
    if amount >= 10 << 40:
        return f"{amount / (1 << 40):,.1f} TiB"
    return f"{amount / (1 << 30):,.1f} GiB" if amount >= 1 << 40 else format_bytes(amount)


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
