"""The results of the experiment: JSON, a table, and the curves behind both."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from playground.simulate.openb.experiment import SHOWN, Run


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
