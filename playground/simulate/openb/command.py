"""The command line of `mgpu simulate openb` and its output."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from playground.simulate.openb import plot
from playground.simulate.openb.experiment import SHOWN, Run, arrivals, run_all
from playground.simulate.openb.policies import POLICIES
from playground.simulate.openb.trace import Trace, read_trace


def run_json(run: Run) -> dict[str, Any]:
    """As on the spec page simulate.md. load: percent, null where so much did not arrive."""
    load = {str(percent): _rounded(run.curve.get(percent)) for percent in SHOWN}
    return {
        "policy": run.policy,
        "seed": run.seed,
        "load": load,
        "placements_per_second": round(run.placements_per_second, 1),
    }


def mean_curves(runs: Sequence[Run]) -> dict[str, Mapping[int, float]]:
    """policy → the curve of its runs' means, in the order in which the policies come."""
    curves: dict[str, list[Mapping[int, float]]] = {}
    for run in runs:
        curves.setdefault(run.policy, []).append(run.curve)
    return {policy: _mean(found) for policy, found in curves.items()}


def _mean(curves: Sequence[Mapping[int, float]]) -> Mapping[int, float]:
    everywhere = set(curves[0]).intersection(*curves)
    return {percent: fmean(curve[percent] for curve in curves) for percent in sorted(everywhere)}


def over(runs: Sequence[Run]) -> str:
    """Which seeds the figures are of."""
    first, last = min(run.seed for run in runs), max(run.seed for run in runs)
    return f"seed {first}" if first == last else f"means over the seeds {first} to {last}"


def table(runs: Sequence[Run]) -> Table:
    """A row per policy, the means over its seeds."""
    title = f"% of the GPUs allocated when pods have asked for so many %; {over(runs)}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("policy")
    for percent in SHOWN:
        shown.add_column(f"{percent} %", justify="right")
    shown.add_column("pods/s", justify="right")
    for policy, curve in mean_curves(runs).items():
        rate = fmean(run.placements_per_second for run in runs if run.policy == policy)
        cells = [f"{curve[percent]:.2f}" if percent in curve else "" for percent in SHOWN]
        shown.add_row(policy, *cells, f"{rate:.0f}")
    return shown


def _rounded(percent: float | None) -> float | None:
    return None if percent is None else round(percent, 3)


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
    if not 0 < load <= _MOST_LOAD:  # not so for NaN either, which a FloatRange lets pass
        raise click.BadParameter(f"{load} is not a number above 0 and up to {_MOST_LOAD}")
    return load


@click.command(name="openb", epilog=EXAMPLES)
@click.option("--nodes", type=click.Path(path_type=Path), required=True, help="CSV: cpu_milli,memory_mib,gpu,model.")
@click.option(
    "--pods",
    type=click.Path(path_type=Path),
    required=True,
    help="CSV: cpu_milli,memory_mib,num_gpu,gpu_milli and, if models are bound, gpu_spec.",
)
@click.option("--policy", "policies", multiple=True, required=True, type=click.Choice([*POLICIES, _ALL]))
@click.option("--seed", type=click.IntRange(0), default=42, show_default=True, help="Of all that is left to chance.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="So many, from --seed on.")
@click.option(
    "--load", type=float, callback=_load, default=1.3, show_default=True, help="GPUs that are asked for ÷ GPUs there."
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Write the curves too: FILE.png or FILE.svg.")
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
    """Let the pods of a trace arrive at its nodes, and tell how much of the GPUs a policy has allocated.

    The pods arrive in random order, then are drawn with replacement until they ask for --load of the GPUs; none
    leaves, none is tried twice. --policy may be given several times; `-o json` prints one object for one policy and
    seed, else a list. The same seed gives the same result.
    """
    if picture:
        plot.check(picture)
    trace = read_trace(nodes, pods)
    names = tuple(POLICIES) if _ALL in policies else tuple(dict.fromkeys(policies))
    wanted = [(policy, seed + i) for policy in names for i in range(seeds)]
    with _progress(trace, len(names), range(seed, seed + seeds), load) as (bar, task):
        runs = run_all(trace, wanted, load, lambda done: bar.advance(task, done))
    if picture:
        plot.draw(picture, mean_curves(runs), f"{pods.stem}, {over(runs)}")
    if output == "json":
        found = [run_json(run) for run in runs]
        click.echo(orjson.dumps(found[0] if len(found) == 1 else found, option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(table(runs))


@contextmanager
def _progress(trace: Trace, policies: int, seeds: range, load: float) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        total = sum(len(arrivals(trace, Random(seed), load)) for seed in seeds) if console.is_terminal else None
        yield bar, bar.add_task("pods arriving", total=total and total * policies)
