"""The picture of the experiment. matplotlib is an extra: it is imported only when a picture is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu.model.errors import BadObject, Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")

_SHOWN = (80, 130)  # arrived percent
_STYLE: Mapping[str, dict[str, Any]] = {
    "fragmentation": {"color": "#c2410c", "linewidth": 2.4, "zorder": 4},
    "fragmentation-known": {"color": "#fb923c", "linewidth": 1.6, "linestyle": (0, (4, 2)), "zorder": 3},
    "fgd": {"color": "#1d4ed8", "linewidth": 2.0, "zorder": 3},
    "binpack": {"color": "#0f766e"},
    "bestfit": {"color": "#7c3aed"},
    "spread": {"color": "#a16207"},
    "random": {"color": "#6b7280"},
}
_LABEL_GAP = 0.032  # of the height, between the middles of two labels


def check(file: Path) -> None:
    """Raises BadObject where no picture could be written, before time is spent on what it would show."""
    if file.suffix not in SUFFIXES:
        raise BadObject([Problem(f"--plot {file}", f"must end in {' or '.join(SUFFIXES)}")])
    if not file.parent.is_dir():
        raise BadObject([Problem(f"--plot {file}", f"{file.parent} is not a directory")])
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise BadObject(
            [Problem("--plot", "needs matplotlib, which is not installed: pip install 'mgpu[plot]'")]
        ) from error


def draw(file: Path, curves: Mapping[str, Mapping[int, float]], subtitle: str) -> None:
    """curves: policy → arrived percentage → allocated percentage. Raises BadObject where it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(_SHOWN, _SHOWN, color="#9ca3af", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    ends: dict[str, float] = {}
    for policy, curve in curves.items():
        points = [(x, y) for x, y in curve.items() if _SHOWN[0] <= x <= _SHOWN[1]]
        if points:
            axes.plot(*zip(*points, strict=True), **{"linewidth": 1.6, **_STYLE.get(policy, {})})
            ends[policy] = points[-1][1]
    _frame(axes, [y for curve in curves.values() for x, y in curve.items() if x >= _SHOWN[0]])
    _labels(axes, ends)
    axes.set_title("GPUs allocated as pods arrive", loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color="#6b7280", fontsize=9)
    try:
        figure.savefig(file)
    except OSError as error:
        raise BadObject([Problem(f"--plot {file}", f"cannot be written: {error.strerror}")]) from error


def _frame(axes: "Axes", heights: list[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(*_SHOWN)
    if heights:
        top = max(heights) + 1.2
        axes.set_ylim(min(heights) - 0.5, top)
        axes.annotate(
            "all that arrived",
            (top, top),
            xytext=(-12, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#9ca3af",
            fontsize=9,
        )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("GPUs asked for by the pods that arrived, % of the cluster")
    axes.set_ylabel("GPUs allocated, % of the cluster")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#374151")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _labels(axes: "Axes", ends: Mapping[str, float]) -> None:
    """Each curve's name and height at its right end, moved up as far as the one below needs."""
    low, high = axes.get_ylim()
    gap, floor = _LABEL_GAP * (high - low), low
    for policy, height in sorted(ends.items(), key=lambda row: (row[1], row[0])):
        floor = max(height, floor + gap)
        style = _STYLE.get(policy, {})
        axes.annotate(
            f"{policy}  {height:.2f}",
            (1, floor),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=style.get("color", "black"),
            fontweight="bold" if policy == "fragmentation" else "normal",
            fontsize=9,
        )
