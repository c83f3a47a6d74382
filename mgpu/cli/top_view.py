"""What `mgpu top` shows, and its output as plain text for a pipe. `mgpu.cli.top` draws it for a terminal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mgpu.cli.agent_metrics import ClusterWithUse, unknown_lines
from mgpu.cli.namespaces import is_in, without_other_waiting
from mgpu.model.quantities import format_bytes
from mgpu.presentation import utilization
from mgpu.presentation.claim_views import split_name
from mgpu.presentation.measured_use import NOT_MEASURED, ClusterUse, Used
from mgpu.presentation.overview import Overview
from mgpu.presentation.plain_tables import core_cell, memory_cell, table_lines
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.use_figures import UseFigures, use_figures
from mgpu.presentation.utilization import SORTS, Figures, Fragmentation, Holder

NO_CARDS = "No node has GPU cards (no Device, and no aliyun.com/gpu-mem with gpu-count)."
_MOST_REASONS = 5
ALL, NODES, PODS = "", "node", "pod"
TABLES = {**dict.fromkeys(("node", "nodes", "no"), NODES), **dict.fromkeys(("pod", "pods", "po"), PODS)}
UsedBy = Callable[[str], Used] | None
"""Returns what is used of the cards of a row, by its name; None if nothing is known of real use."""


@dataclass(frozen=True, slots=True)
class View:
    """What the user wants to see.

    Attributes:
        table: `NODES` or `PODS` for that table alone, `ALL` for everything.
        sort: the column by which nodes and models are sorted.
        limit: the most rows of a table.
        namespace: the namespace of the pods; "" for all.
        is_wide: whether the tables have all columns.
    """

    table: str
    sort: str
    limit: int
    namespace: str
    is_wide: bool

    def overview(self, found: ClusterWithUse) -> Overview:
        return without_other_waiting(found.answer.overview, self.namespace)

    def holders(self, overview: Overview) -> list[Holder]:
        found = utilization.holders(overview.nodes)
        return [row for row in found if is_in(row.pod, self.namespace)] if self.namespace else found

    def nodes(self, overview: Overview) -> list[Figures]:
        return sorted(utilization.by_node(overview.nodes), key=SORTS[self.sort])


def plain_lines(view: View, found: Overview, use: ClusterUse | None) -> Iterator[str]:
    """Yield what `_render` shows as plain text, without bars."""
    nodes = view.nodes(found)
    total = utilization.add("cluster", nodes)
    if not total.cards:
        yield NO_CARDS
        return
    figures = use_figures(found.nodes, use or {})
    is_measured = figures.total != NOT_MEASURED
    pods = list(_pod_lines(view, view.holders(found), figures if is_measured else None))
    if view.table == PODS:
        yield from pods or [nothing_held(view)]
        return
    if view.table == NODES:
        yield from _node_lines(view, "NODE", nodes, figures.of_node if is_measured else None)
        return
    yield from head_lines(found, total, figures, use)
    models = sorted(utilization.by_model(found.nodes), key=SORTS[view.sort])
    if len(models) > 1:
        yield ""
        yield from _node_lines(view, "MODEL", models, figures.of_model if is_measured else None)
    yield ""
    yield from _node_lines(view, "NODE", nodes, figures.of_node if is_measured else None)
    if pods:
        yield ""
        yield from pods


def _node_lines(view: View, kind: str, rows: Sequence[Figures], used_by: UsedBy) -> Iterator[str]:
    names = [kind, "CARDS", "IDLE", "UNHEALTHY", "HELD-CORE", "CORE", "HELD-MEMORY", "MEMORY"]
    names += ["USED-CORE", "USED-MEMORY"] if used_by else []
    names += ["HELD-CORE%", "HELD-MEMORY%", "MODELS"] if view.is_wide else []
    yield from table_lines(names, [_node_cells(view, row, used_by) for row in rows[: view.limit]])
    if more := more_text(rows, view.limit):
        yield more


def _node_cells(view: View, row: Figures, used_by: UsedBy) -> list[str]:
    used = used_by(row.name) if used_by else NOT_MEASURED
    wide = [percent_text(row.core_share), percent_text(row.memory_share), ",".join(row.models)]
    return [
        row.name,
        str(row.cards),
        str(row.idle),
        str(row.unhealthy),
        core_cell(row.core_used),
        core_cell(row.core),
        memory_cell(row.memory_used),
        memory_cell(row.memory),
        *([core_cell(used.core), memory_cell(used.memory)] if used_by else []),
        *(wide if view.is_wide else []),
    ]


def _pod_lines(view: View, rows: Sequence[Holder], figures: UseFigures | None) -> Iterator[str]:
    if not rows:
        return
    names = ["NAMESPACE", "NAME", "CARDS", "HELD-CORE", "HELD-MEMORY"]
    names += ["USED-CORE", "USED-MEMORY"] if figures else []
    names += ["NODE", "REQUESTED-AS"]
    cells = []
    for row in rows[: view.limit]:
        namespace, name = split_name(row.pod)
        used = figures.of_pod(row.pod) if figures else NOT_MEASURED
        cells.append(
            [
                namespace,
                name.replace("claim ", "claim/"),
                str(row.cards),
                core_cell(row.core),
                memory_cell(row.memory),
                *([core_cell(used.core), memory_cell(used.memory)] if figures else []),
                ",".join(row.nodes),
                row.dialect,
            ]
        )
    yield from table_lines(names, cells)
    if more := more_text(rows, view.limit):
        yield more


def head_lines(found: Overview, total: Figures, figures: UseFigures, use: ClusterUse | None) -> list[str]:
    """Return the lines about the whole cluster."""
    return [
        *_summary(total, len(found.pending) - len(found.gated), len(found.gated)),
        *([_used_line(figures.total, total)] if figures.total != NOT_MEASURED else []),
        free_line(utilization.fragmentation(found.nodes)),
        *(one_line(line) for line in unknown_lines(use or {})[:_MOST_REASONS]),
    ]


def nothing_held(view: View) -> str:
    return f"No pod holds a card{f' in namespace {view.namespace}' if view.namespace else ''}."


def more_text(rows: Sequence[object], limit: int) -> str:
    """Return a line with the number of the rows that are not shown; "" if there are none."""
    more = len(rows) - limit
    return f"… and {more:,} more (--limit)" if more > 0 else ""


def _summary(total: Figures, waiting: int, gated: int) -> list[str]:
    unhealthy = f", {total.unhealthy} unhealthy" if total.unhealthy else ""
    counts = [(waiting, "waiting"), (gated, "gated")]
    (first, *others) = [row for row in counts if row[0]] or [(0, "")]
    pods = f"; {first[0]} GPU pod{_s(first[0])} {first[1]}" if first[0] else ""
    pods += "".join(f", {count} {what}" for count, what in others)
    return [
        f"{total.nodes:,} node{_s(total.nodes)}, {total.cards:,} card{_s(total.cards)} "
        f"({total.idle:,} idle{unhealthy}){pods}",
        f"core {percent_text(total.core_share)} of {percent_of_card(total.core)}, "
        f"memory {percent_text(total.memory_share)} of {bytes_text(total.memory)}",
    ]


def free_line(found: Fragmentation) -> str:
    """Return a line with the free capacity, and with how much of it pods cannot use."""
    parts = [f"{found.idle:,} idle card{_s(found.idle)}"] if found.idle else []
    if found.part:
        most = f"at most {percent_of_card(found.most_core)} and {bytes_text(found.most_memory)} on one"
        amounts = f"{percent_of_card(found.part_core)} and {bytes_text(found.part_memory)}"
        parts.append(f"{amounts} on {found.part:,} part-used card{_s(found.part)} ({most})")
    useless = [
        *([percent_of_card(found.useless_core)] if found.useless_core else []),
        *([bytes_text(found.useless_memory)] if found.useless_memory else []),
    ]
    if useless:
        parts.append(
            f"{' and '.join(useless)} where the rest of the card is taken, so that no share of core and memory fits"
        )
    count = found.partitioned
    partitioned = f" ({count:,} partitioned card{_s(count)} not counted)" if count else ""
    return f"Free: {'; '.join(parts) or 'nothing'}{partitioned}"


def _used_line(used: Used, total: Figures) -> str:
    core = "?" if used.core is None else percent_text(used.core / total.core if total.core else 0.0)
    memory = "?" if used.memory is None else percent_text(used.memory / total.memory if total.memory else 0.0)
    return f"really used: core {core}, memory {memory}"


def percent_of_card(milli: int) -> str:
    """Return the percentage of a card for thousandths, such as `1,250%` or `12.5%`."""
    return f"{milli // 10:,}%" if milli % 10 == 0 else f"{milli / 10:,.1f}%"


def bytes_text(amount: int) -> str:
    """Return a text such as `64.0 GiB` or `1,140.0 GiB`; from 10 TiB on, the unit is TiB."""
    if amount >= 10 << 40:
        return f"{amount / (1 << 40):,.1f} TiB"
    return f"{amount / (1 << 30):,.1f} GiB" if amount >= 1 << 40 else format_bytes(amount)


def percent_text(share: float) -> str:
    return f"{share:.0%}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
