"""Draws the pictures of docs/performance.md from runs of the benchmark: `performance.py [FILE]`.

FILE has one run in each line (`bench/history.py`). Of each section the newest run counts. The default is
performance.jsonl beside this file; docs/performance.md says how to add a run to it.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench import scale, startup  # noqa: E402
from bench.clusters import PODS  # noqa: E402
from bench.history import Run, read  # noqa: E402

HERE = Path(__file__).parent
GREY = "#808890"
"""The colour of text and lines. It is legible on white and on black, as are those of the curves."""
COLOURS: Mapping[str, str] = {"binpack": "#2f81f7", "spread": "#d9822b", "fragmentation": "#2da44e"}
SINGLE = "#a371f7"
Points = Mapping[float, float]


def main(file: Path) -> None:
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mgpu", "font.family": "sans-serif", "font.size": 10}
    mpl.rcParams |= dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY
    )
    values = newest(read(file))
    _save(by_nodes(values), "performance-nodes.svg")
    _save(by_pods(values), "performance-pods.svg")


def newest(runs: Iterable[Run]) -> dict[str, float]:
    """Return the value of each row of `scale` and of `startup` by its name, from the newest run that has it."""
    measured = (one for run in runs for one in run.sections if one.section in ("scale", "startup"))
    return {row.what: row.value for one in measured for row in one.rows}


def by_nodes(values: Mapping[str, float]) -> Figure:
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for ax, kind, title in (
        (axes[0][0], scale.KNOWN, "filter and prioritize"),
        (axes[0][1], scale.NEW, "filter and prioritize, first pod of its kind"),
    ):
        curves = {
            policy: _points(values, {n: scale.what(n, PODS, kind, policy) for n in scale.NODES})
            for policy in scale.POLICIES
        }
        _draw(ax, curves, title, "ms of CPU")
    ready = _points(values, {n: startup.what(n, startup.READY) for n in scale.NODES})
    memory = _points(values, {n: startup.what(n, startup.MEMORY) for n in scale.NODES})
    _draw(axes[1][0], {"": ready}, "start until ready", "s of CPU")
    _draw(axes[1][1], {"": memory}, "memory of the scheduler's process", "MiB")
    axes[1][1].set_ylim(bottom=0)
    for ax in axes.flat:
        ax.set_xscale("log")
        if ax is not axes[1][1]:
            ax.set_yscale("log")
        ax.set_xlabel(f"nodes, with 8 cards and {PODS} pods each")
        _plain_numbers(ax)
    return figure


def by_pods(values: Mapping[str, float]) -> Figure:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    ax = figure.subplots()
    each = sorted((PODS, *scale.PODS_EACH))
    nodes = scale.PODS_NODES
    curves = {
        policy: _points(values, {pods: scale.what(nodes, pods, scale.KNOWN, policy) for pods in each})
        for policy in scale.POLICIES
    }
    _draw(ax, curves, "filter and prioritize", "ms of CPU")
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"pods on each of {nodes:,} nodes")
    _plain_numbers(ax)
    return figure


def _points(values: Mapping[str, float], names: Mapping[int, str]) -> Points:
    """Return the values of the rows that were measured, by their positions on the x axis."""
    return {x: values[name] for x, name in names.items() if name in values}


def _draw(ax: Any, curves: Mapping[str, Points], title: str, unit: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_ylabel(unit)
    for name, points in curves.items():
        colour = COLOURS.get(name, SINGLE)
        ax.plot(list(points), list(points.values()), marker="o", markersize=4, linewidth=1.8, color=colour, label=name)
    ax.grid(color=GREY, alpha=0.25, linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        ax.legend(frameon=False)


def _plain_numbers(ax: Any) -> None:
    """Label the axes with 1,000 instead of 10³."""
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            # More numbers would overlap on the x axis.
            axis.set_major_locator(LogLocator(subs=(1,) if axis is ax.xaxis else (1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter("{x:,.10g}")


def _save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / name, transparent=True, metadata={"Date": None})
    print(f"{name}: {(HERE / name).stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "performance.jsonl")
