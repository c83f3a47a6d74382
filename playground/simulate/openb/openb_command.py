"""The command line of `mgpu simulate openb` and its output. `simulate_command` runs `command`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import orjson
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from playground.simulate.openb import curve_plot
from playground.simulate.openb.experiment import REPORTED, Run, run_all
from playground.simulate.openb.experiment_policies import POLICIES
from playground.simulate.openb.trace import read_trace

EXAMPLES = """
\b
Examples:
  mgpu simulate openb --nodes nodes.csv --pods pods.csv --policy fragmentation --seed 42
  mgpu simulate openb --nodes nodes.csv --pods pods.csv --policy fgd --policy fragmentation --seeds 10
  mgpu simulate openb --nodes nodes.csv --pods pods.csv --policy all --seeds 10 --plot load.png
"""
_ALL = "all"
_MOST_LOAD = 100


def _load(_: click.Context, __: click.Parameter, load: float) -> float:
    if not 0 < load <= _MOST_LOAD:  # rejects NaN too, which FloatRange accepts
        raise click.BadParameter(f"{load} is not a number above 0 and up to {_MOST_LOAD}")
    return load


@click.command(name="openb", epilog=EXAMPLES)
@click.option("--nodes", type=click.Path(path_type=Path), required=True, help="CSV: cpu_milli,memory_mib,gpu,model.")
@click.option(
    "--pods",
    type=click.Path(path_type=Path),
    required=True,
    help="CSV: cpu_milli,memory_mib,num_gpu,gpu_milli and, if pods need certain models, gpu_spec.",
)
@click.option("--policy", "policies", multiple=True, required=True, type=click.Choice([*POLICIES, _ALL]))
@click.option("--seed", type=click.IntRange(0), default=42, show_default=True, help="Seed of all random choices.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Number of runs of each policy, with the seeds from --seed on.",
)
@click.option(
    "--load",
    type=float,
    callback=_load,
    default=1.3,
    show_default=True,
    help="Requested GPUs, as a multiple of the existing ones.",
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path), help="Also draw the curves into this file (PNG or SVG)."
)
def command(
    nodes: Path,
    pods: Path,
    policies: Sequence[str],
    seed: int,
    seeds: int,
    load: float,
    output: str,
    picture: Path | None,
) -> None:
    """Let the pods of a trace arrive at its nodes, and report how much of the GPUs each policy allocates.

    The pods arrive in random order, followed by pods that are drawn with replacement, until they request --load
    times the GPUs. No pod ends, and none is tried twice. --policy may be given several times. `-o json` prints an
    object if there is only one run, and otherwise a list. The same seed gives the same percentages. The exit code is 2
    if the input cannot be used.
    """
    if picture:
        curve_plot.check(picture)
    trace = read_trace(nodes, pods)
    names = tuple(POLICIES) if _ALL in policies else tuple(dict.fromkeys(policies))
    wanted = [(policy, seed + i) for policy in names for i in range(seeds)]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=len(wanted))
        runs = run_all(trace, wanted, load, lambda: bar.advance(task))
    if picture:
        curve_plot.draw(picture, mean_curves(runs), f"{pods.stem}, {_seeds(runs)}")
    if output == "json":
        found = [run_json(run) for run in runs]
        click.echo(orjson.dumps(found[0] if len(found) == 1 else found, option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(_table(runs))


def run_json(run: Run) -> dict[str, Any]:
    """Return the JSON of one run (docs/design/simulate.md).

    `load` has null for a percentage of requested GPUs that the run did not reach.
    """
    found = {percent: run.curve.get(percent) for percent in REPORTED}
    load = {str(percent): None if height is None else round(height, 3) for percent, height in found.items()}
    rate = round(run.placements_per_second, 1)
    return {"policy": run.policy, "seed": run.seed, "load": load, "placements_per_second": rate}


def mean_curves(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Return the mean curve of each policy. It has the percentages that the curves of all runs of the policy have."""
    curves: dict[str, list[Mapping[int, float]]] = {}
    for run in runs:
        curves.setdefault(run.policy, []).append(run.curve)
    return {
        policy: {
            percent: fmean(curve[percent] for curve in found) for percent in sorted(set.intersection(*map(set, found)))
        }
        for policy, found in curves.items()
    }


def _seeds(runs: Sequence[Run]) -> str:
    first, last = min(run.seed for run in runs), max(run.seed for run in runs)
    return f"seed {first}" if first == last else f"means over the seeds {first} to {last}"


def _table(runs: Sequence[Run]) -> Table:
    """Return a table with the means over the seeds for each policy."""
    title = f"GPUs allocated (%), by the GPUs that the arrived pods request (%); {_seeds(runs)}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("policy")
    for percent in REPORTED:
        shown.add_column(f"{percent} %", justify="right")
    shown.add_column("pods/s", justify="right")
    for policy, curve in mean_curves(runs).items():
        rate = fmean(run.placements_per_second for run in runs if run.policy == policy)
        cells = [f"{curve[percent]:.2f}" if percent in curve else "" for percent in REPORTED]
        shown.add_row(policy, *cells, f"{rate:.0f}")
    return shown
