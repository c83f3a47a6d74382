"""The command line of `mgpu simulate right-sizing` and its output. `simulate_command` runs `command`."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mgpu.cli.process_settings import read_settings
from mgpu.model.errors import BadObject, Problem
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import percent
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import Terminal
from mgpu.settings import CARD_POLICIES, NODE_POLICIES
from playground.simulate.documents import read
from playground.simulate.right_sizing.recorded_use import read_recorded_use
from playground.simulate.right_sizing.repacking import Packing, as_it_runs, pack, split_world
from playground.simulate.right_sizing.workloads import Amounts, Need, needs_of, resized
from playground.simulate.world import read_world

EXAMPLES = """
\b
Examples:
  kubectl get nodes,devices,pods -A -o yaml > cluster.yaml
  mgpu simulate right-sizing --memory memory.json --sm sm.json cluster.yaml
  mgpu simulate right-sizing --memory memory.json --margin 50 cluster.yaml -o json
docs/right-sizing.md says how to get the files from Prometheus.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of right-sizing.

    Attributes:
        running: how full the cluster is now; `requested` and `needed`, after its pods were placed again.
    """

    margin: int
    needs: Sequence[Need]
    running: Packing
    requested: Packing
    needed: Packing


_file = click.Path(path_type=Path)


@click.command(name="right-sizing", epilog=EXAMPLES)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--memory", type=_file, multiple=True, help="Prometheus' answer for mgpu_container_memory_used_bytes (JSON)."
)
@click.option(
    "--sm", type=_file, multiple=True, help="Prometheus' answer for mgpu_container_sm_utilization_ratio (JSON)."
)
@click.option(
    "--margin",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    help="How much more than it has used a container needs, in percent.",
)
@click.option("--config", type=_file, help="Settings file (YAML).")
@click.option("--card-policy", type=click.Choice(CARD_POLICIES), help="Overrides cardPolicy of the settings.")
@click.option("--node-policy", type=click.Choice(NODE_POLICIES), help="Overrides nodePolicy of the settings.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    files: tuple[str, ...],
    memory: tuple[Path, ...],
    sm: tuple[Path, ...],
    margin: int,
    config: Path | None,
    card_policy: str | None,
    node_policy: str | None,
    output: str,
) -> None:
    """Report what would fit on the nodes of the FILEs if shares were as large as what their pods have used.

    For each workload the report has the share that its containers ask of a card, what they have used of it (median,
    99th percentile, most), and what they need: the most memory and the 99th percentile of core, plus --margin. Then it
    places all pods again, with their own shares and with those that they need. Nothing is changed. A workload without
    recorded use keeps its shares. The exit code is 2 if the input cannot be used.
    """
    if not memory and not sm:
        raise click.UsageError("give the recorded use with --memory or --sm, or both")
    settings = read_settings(config, os.environ, {"card_policy": card_policy, "node_policy": node_policy})
    use = read_recorded_use(memory, sm)
    world = read_world(read(files, sys.stdin), _note, settings)
    cards = [card for cards in world.cards.values() for card in cards]
    if not cards:
        raise BadObject([Problem(", ".join(files), "no node has cards")])
    running = as_it_runs(world, settings, _note)
    rest, workloads = split_world(world, settings, _note)
    needs = needs_of(workloads, use, margin, max(cards, key=lambda card: card.memory))
    by_container = {(need.owner, need.container): need for need in needs}
    requested = pack(rest, workloads, [workload.request for workload in workloads], settings)
    needed = pack(rest, workloads, [resized(workload, by_container) for workload in workloads], settings)
    report = Report(margin, needs, running, requested, needed)
    if output == "json":
        click.echo(orjson.dumps(report_json(report), option=orjson.OPT_INDENT_2).decode())
    else:
        Terminal().print(_render(report))


def _note(line: str) -> None:
    click.echo(one_line(line), err=True)


def report_json(report: Report) -> dict[str, Any]:
    """Return the JSON of a report (docs/right-sizing.md). Core is in percent of a card, and memory in bytes."""
    return {
        "margin": report.margin,
        "workloads": [_need_json(need, report) for need in report.needs],
        "packings": {
            "running": _packing_json(report.running),
            "requested": _packing_json(report.requested),
            "needed": _packing_json(report.needed),
        },
    }


def _need_json(need: Need, report: Report) -> dict[str, Any]:
    return {
        **need.owner._asdict(),
        "container": need.container or None,
        "pods": need.pods,
        "cards": need.cards,
        "core": {
            "requested": percent(need.core),
            **_used(need.used_core, percent),
            "needed": percent(need.needed_core),
        },
        "memory": {"requested": need.memory, **_used(need.used_memory, int), "needed": need.needed_memory},
        "further": {
            "requested": (report.requested.further or {}).get(need.owner, 0),
            "needed": (report.needed.further or {}).get(need.owner, 0),
        },
    }


def _used(amounts: Amounts | None, unit: Callable[[int], float]) -> dict[str, float | None]:
    if amounts is None:
        return dict.fromkeys(("p50", "p99", "max"))
    return {"p50": unit(amounts.p50), "p99": unit(amounts.p99), "max": unit(amounts.most)}


def _packing_json(packing: Packing) -> dict[str, Any]:
    return {
        "freeNodes": packing.free_nodes,
        "freeCards": packing.free_cards,
        "unplaced": list(packing.unplaced),
    }


def _render(report: Report) -> Group:
    recorded = [need for need in report.needs if need.is_recorded]
    parts: list[RenderableType] = []
    if any(need.used_memory for need in recorded):
        parts += [_table("memory of each card", recorded, _memory_cells), Text()]
    if any(need.used_core for need in recorded):
        parts += [_table("core of each card", recorded, _core_cells), Text()]
    others = [need for need in report.needs if not need.is_recorded]
    if others:
        names = ", ".join(sorted({str(need.owner) for need in others}))
        parts += [Text(one_line(f"Without recorded use, with their own shares: {names}"), style="yellow"), Text()]
    parts += [_further(report), Text(), _packings(report)]
    return Group(*parts)


def _memory_cells(need: Need) -> list[str]:
    used = [format_bytes(amount) for amount in need.used_memory or ()] or ["?", "?", "?"]
    return [format_bytes(need.memory), *used, format_bytes(need.needed_memory)]


def _core_cells(need: Need) -> list[str]:
    used = [format_core(round(amount, -1)) for amount in need.used_core or ()] or ["?", "?", "?"]
    return [format_core(need.core), *used, format_core(need.needed_core)]


def _table(title: str, needs: Sequence[Need], cells: Callable[[Need], list[str]]) -> Table:
    table = _bare(title, "pods", "requested", "p50", "p99", "max", "needed")
    for need in needs:
        name = " ".join(filter(None, (str(need.owner), need.container)))
        cards = f" × {need.cards} cards" if need.cards > 1 else ""
        table.add_row(one_line(name) + cards, str(need.pods), *cells(need))
    return table


def _further(report: Report) -> Table:
    table = _bare("further pods that would fit", "as requested", "as needed")
    for owner in dict.fromkeys(need.owner for need in report.needs):
        counts = [str((packing.further or {}).get(owner, 0)) for packing in (report.requested, report.needed)]
        table.add_row(one_line(str(owner)), *counts)
    return table


def _packings(report: Report) -> Table:
    table = _bare("", "free nodes", "free cards", "pods that fit nowhere")
    for name, packing in (
        ("as it runs", report.running),
        ("placed again as requested", report.requested),
        (f"placed again as needed, plus {report.margin}%", report.needed),
    ):
        unplaced = "" if packing is report.running else str(len(packing.unplaced))
        table.add_row(name, str(packing.free_nodes), str(packing.free_cards), unplaced)
    return table


def _bare(first: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="grey50")
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    return table
